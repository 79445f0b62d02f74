"""A mesh that cannot be is refused before anything is built, with what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_gmc.config import MeshConfig
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.learner.mesh import Mesh, check_mesh

QWEN3_06B = ModelShape(
    layers=28,
    hidden=1024,
    ffn=3072,
    heads=16,
    query_groups=8,
    head_size=128,
    vocab_size=151_936,
    max_positions=40_960,
    norm_epsilon=1e-6,
    rope_theta=1e6,
    tied=True,
    initializer_range=0.02,
)
MIXTURE = replace(QWEN3_06B, experts=8, experts_per_token=2)


def refusal(world: int, shape: ModelShape = QWEN3_06B, **sizes: int) -> str:
    """What the mesh is refused with."""
    with pytest.raises(ValueError) as caught:
        check_mesh(world, MeshConfig(**sizes), shape)
    return str(caught.value)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (1, {}),
        (8, {"tensor": 8}),
        (8, {"tensor": 2, "pipeline": 4}),
        (6, {"pipeline": 2}),
        (28, {"pipeline": 28}),
        (8, {"tensor": 2, "sequence_parallel": True, "context": 2, "pipeline": 2}),
        (4, {"pipeline": 4, "virtual_pipeline": 7}),
        (16, {"context": 16}),
    ],
)
def test_a_mesh_that_fits(world: int, sizes: dict[str, int]) -> None:
    check_mesh(world, MeshConfig(**sizes), QWEN3_06B)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (4, {"expert": 4}),
        (8, {"expert": 2, "pipeline": 2}),
        (4, {"expert": 4, "context": 4}),
        (4, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    ],
)
def test_a_mesh_that_fits_a_mixture(world: int, sizes: dict[str, int]) -> None:
    check_mesh(world, MeshConfig(**sizes), MIXTURE)


@pytest.mark.parametrize(
    ("world", "sizes", "fault"),
    [
        (
            2,
            {"tensor": 4},
            "mesh.tensor 4 × mesh.pipeline 1 = 4 is more than the number of ranks, 2; start a "
            "multiple of 4 ranks, or a mesh whose product is 1 or 2",
        ),
        (
            1,
            {"pipeline": 2},
            "mesh.tensor 1 × mesh.pipeline 2 = 2 is more than the number of ranks, 1; start a "
            "multiple of 2 ranks, or a mesh whose product is 1",
        ),
        (
            6,
            {"tensor": 2, "pipeline": 2},
            "mesh.tensor 2 × mesh.pipeline 2 = 4 does not divide the number of ranks, 6; start a "
            "multiple of 4 ranks, or a mesh whose product is 1, 2, 3 or 6",
        ),
        (
            4,
            {"tensor": 2, "context": 2, "pipeline": 2},
            "mesh.tensor 2 × mesh.context 2 × mesh.pipeline 2 = 8 is more than the number of "
            "ranks, 4; start a multiple of 8 ranks, or a mesh whose product is 1, 2 or 4",
        ),
    ],
)
def test_a_mesh_that_the_ranks_do_not_fill(world: int, sizes: dict[str, int], fault: str) -> None:
    """C8."""
    assert refusal(world, **sizes) == fault


def test_more_tensor_ranks_than_query_groups() -> None:
    """C4."""
    assert refusal(4, replace(QWEN3_06B, query_groups=2), tensor=4) == (
        "mesh.tensor: 4 does not divide the model's 2 (query groups); on 4 ranks use 1 or 2"
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"heads": 9}, "9 (attention heads)"),
        ({"ffn": 3073}, "3073 (MLP width)"),
        ({"query_groups": 3}, "3 (query groups)"),
    ],
)
def test_what_tensor_ranks_must_divide(change: dict[str, int], fault: str) -> None:
    start = f"mesh.tensor: 2 does not divide the model's {fault}; on 2 ranks use 1"
    assert refusal(2, replace(QWEN3_06B, **change), tensor=2) == start


@pytest.mark.parametrize(
    ("world", "sizes", "fault"),
    [
        (
            16,
            {"pipeline": 8},
            "mesh.pipeline: 8 does not divide the model's 28 layers; on 16 ranks with "
            "mesh.tensor 1 use 1, 2 or 4",
        ),
        (
            16,
            {"pipeline": 8, "context": 2},
            "mesh.pipeline: 8 does not divide the model's 28 layers; on 16 ranks with "
            "mesh.tensor 1 and mesh.context 2 use 1, 2 or 4",
        ),
        (
            2,
            {"virtual_pipeline": 2},
            "mesh.virtual_pipeline: 2 with mesh.pipeline 1; chunks are interleaved between "
            "stages, so use mesh.pipeline 2 or more, or virtual_pipeline 1",
        ),
        (
            4,
            {"pipeline": 4, "virtual_pipeline": 2},
            "mesh.virtual_pipeline: 2 does not divide the 7 layers of a stage (28 layers, "
            "mesh.pipeline 4); use 1 or 7",
        ),
        (
            2,
            {"sequence_parallel": True},
            "mesh.sequence_parallel: true with mesh.tensor 1; it shares the tokens between "
            "tensor ranks, so use mesh.tensor 2 or more, or sequence_parallel false",
        ),
        (
            2,
            {"expert": 2},
            "mesh.expert: 2 with a model that has no experts; use expert 1",
        ),
    ],
)
def test_what_does_not_go_together(world: int, sizes: dict[str, int], fault: str) -> None:
    assert refusal(world, **sizes) == fault


def test_sequences_too_short_for_the_context_ranks() -> None:
    assert refusal(8, replace(QWEN3_06B, max_positions=12), context=8) == (
        "mesh.context: 8 cuts every sequence into 16 parts, and the model's context is 12 "
        "tokens; use at most 6"
    )


@pytest.mark.parametrize(
    ("world", "sizes", "fault"),
    [
        (
            4,
            {"expert": 4, "pipeline": 2},
            "mesh.expert: 4 does not divide context × data = 2; on 4 ranks with mesh.tensor 1 "
            "and mesh.pipeline 2 use 1 or 2",
        ),
        (
            6,
            {"expert": 6},
            "mesh.expert: 6 does not divide the model's 8 experts; on 6 ranks with mesh.tensor 1 "
            "and mesh.pipeline 1 use 1 or 2",
        ),
        (
            4,
            {"expert": 2, "tensor": 2},
            "mesh.sequence_parallel: false with mesh.tensor 2 and a mixture of experts, whose "
            "tokens tensor ranks have to share; set it to true, or mesh.tensor to 1",
        ),
    ],
)
def test_what_a_mixture_does_not_fit(world: int, sizes: dict[str, int], fault: str) -> None:
    assert refusal(world, MIXTURE, **sizes) == fault


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
