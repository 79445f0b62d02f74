"""A mesh that cannot be is refused before anything is built, with what would fit."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_gmc.learner.mesh import Mesh, check_mesh

QWEN3_06B = {"layers": 28, "heads": 16, "query_groups": 8, "ffn": 3072}


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline"), [(1, 1, 1), (8, 8, 1), (8, 2, 4), (6, 1, 2), (28, 1, 28)]
)
def test_a_mesh_that_fits(world: int, tensor: int, pipeline: int) -> None:
    check_mesh(world, tensor, pipeline, **QWEN3_06B)


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "fault"),
    [
        (
            2,
            4,
            1,
            "mesh.tensor 4 × mesh.pipeline 1 = 4 is more than the number of ranks, 2; start a "
            "multiple of 4 ranks, or a mesh whose product is 1 or 2",
        ),
        (1, 1, 2, "= 2 is more than the number of ranks, 1; .* a mesh whose product is 1$"),
        (6, 2, 2, "= 4 does not divide the number of ranks, 6; .* product is 1, 2, 3 or 6$"),
    ],
)
def test_a_mesh_that_the_ranks_do_not_fill(
    world: int, tensor: int, pipeline: int, fault: str
) -> None:
    """C8."""
    with pytest.raises(ValueError, match=fault):
        check_mesh(world, tensor, pipeline, **QWEN3_06B)


def test_more_tensor_ranks_than_query_groups() -> None:
    """C4."""
    fault = r"mesh.tensor: 4 does not divide the model's 2 \(query groups\); on 4 ranks use 1 or 2$"
    with pytest.raises(ValueError, match=fault):
        check_mesh(4, 4, 1, **(QWEN3_06B | {"query_groups": 2}))


@pytest.mark.parametrize(
    ("part", "size", "fault"),
    [
        ("heads", 9, r"9 \(attention heads\)"),
        ("ffn", 3073, r"3073 \(MLP width\)"),
        ("query_groups", 3, r"3 \(query groups\)"),
    ],
)
def test_what_tensor_ranks_must_divide(part: str, size: int, fault: str) -> None:
    with pytest.raises(ValueError, match=f"mesh.tensor: 2 does not divide the model's {fault}"):
        check_mesh(2, 2, 1, **(QWEN3_06B | {part: size}))


def test_layers_that_the_stages_do_not_divide() -> None:
    fault = "mesh.pipeline: 8 does not divide the model's 28 layers; on 16 ranks .* use 1, 2 or 4"
    with pytest.raises(ValueError, match=fault):
        check_mesh(16, 1, 8, **QWEN3_06B)


def test_create_refuses_what_the_world_does_not_fill_and_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match=r"mesh\.tensor 2 × mesh\.pipeline 1 = 2 is more"):
        Mesh.create(tensor=2, pipeline=1)
    assert not dist.is_initialized()


def test_a_world_of_one_without_torchrun_and_again_after_closing() -> None:
    for _ in range(2):
        mesh = Mesh.create(tensor=1, pipeline=1)
        assert (mesh.rank, mesh.world_size, mesh.data_size) == (0, 1, 1)
        assert mesh.is_first_stage
        assert mesh.is_last_stage
        mesh.close()
        assert not dist.is_initialized()


def test_a_world_that_runs_already_is_left_running() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        Mesh.create(tensor=1, pipeline=1).close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
