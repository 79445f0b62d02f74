"""Attention over packs against an explicit softmax over each trajectory alone, in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_gmc.learner.core_attention import RowPlan, packed_attention, plan_rows
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.pack import Padding, context_rows
from tests.distributed import run_ranks

LENGTHS = (5, 16, 9, 30, 1, 16, 23)
HEADS = ((4, 4), (8, 2))  # queries, and the keys and values that they share
SIZE = 16
CONTEXT_SIZES = (1, 2, 4)


def inputs(queries: int, groups: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output, float32, of a whole pack."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(rows, heads, SIZE) for heads in (queries, groups, groups, queries)]
    query, key, value, gradient = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, gradient


def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One trajectory, every step written out."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / SIZE**0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


def expected(padded: list[int], heads: tuple[int, int]) -> list[Tensor]:
    """Output and the gradients of query, key and value, float64."""
    *parts, gradient = (tensor.double() for tensor in inputs(*heads, sum(padded)))
    leaves = [part.requires_grad_() for part in parts]
    output = torch.cat(
        [alone(*one) for one in zip(*(leaf.split(padded) for leaf in leaves), strict=True)]
    )
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def save_attention(folder: str) -> None:
    """On four ranks, for each number of context ranks: rows, their output and their gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in CONTEXT_SIZES:
        mesh = Mesh.create(1, 1, context=size)
        padded = Padding.of(tensor=1, context=size, sequence_parallel=False).padded(LENGTHS)
        rows = context_rows(padded, size, mesh.context_rank)
        plan = plan_rows(padded, size=size, rank=mesh.context_rank, device=mesh.device)
        results = {heads: _on_this_rank(heads, padded, rows, plan, mesh) for heads in HEADS}
        torch.save((padded, rows, results), Path(folder) / f"context{size}.rank{mesh.rank}")
        mesh.close()
    dist.destroy_process_group()


def _on_this_rank(
    heads: tuple[int, int], padded: list[int], rows: Tensor, plan: RowPlan, mesh: Mesh
) -> list[Tensor | None]:
    *parts, gradient = (tensor[rows] for tensor in inputs(*heads, sum(padded)))
    query, key, value = (part.requires_grad_() for part in parts)
    # megatron's gather, whose backward sums over the ranks; at size 1 it does nothing.
    everywhere = [
        gather_from_sequence_parallel_region(part, group=mesh.context_group)
        for part in (key, value)
    ]
    output = packed_attention(query, *everywhere, plan, SIZE**-0.5)
    output.backward(gradient)
    return [output.detach(), query.grad, key.grad, value.grad]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    run_ranks("tests.learner.test_core_attention", "save_attention", 4, str(folder))
    return folder


@pytest.mark.parametrize("size", CONTEXT_SIZES)
def test_each_trajectory_attends_to_itself_alone(size: int, saved: Path) -> None:
    """Forward and backward at context 1, 2 and 4, with queries that share keys and without."""
    ranks = [torch.load(saved / f"context{size}.rank{rank}") for rank in range(4)]
    for heads in HEADS:
        wanted = expected(ranks[0][0], heads)
        for _, rows, results in ranks:
            for found, whole in zip(results[heads], wanted, strict=True):
                torch.testing.assert_close(found.double(), whole[rows], rtol=0, atol=1e-5)


def test_work_is_the_sum_over_the_trajectories() -> None:
    """No block reaches over a trajectory's end, whatever else the pack holds."""
    plan = plan_of(LENGTHS)
    pairs = sum(block.entries * block.queries * block.keys for block in plan.blocks)
    assert pairs == sum(length**2 for length in LENGTHS)
    assert len(plan.blocks) == len(set(LENGTHS))


def test_nothing_moves_where_the_longest_come_first() -> None:
    """The order of a micro-batch; both orders give the same, each row at its place."""
    assert plan_of(LENGTHS).order is not None
    ordered = sorted(LENGTHS, reverse=True)
    plan = plan_of(ordered)
    assert plan.order is None
    query, key, value, _ = inputs(8, 2, sum(ordered))
    found = packed_attention(query, key, value, plan, SIZE**-0.5)
    parts = (part.double().split(ordered) for part in (query, key, value))
    wanted = torch.cat([alone(*one) for one in zip(*parts, strict=True)])
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def plan_of(lengths: Sequence[int]) -> RowPlan:
    return plan_rows(lengths, size=1, rank=0, device=torch.device("cpu"))


if __name__ == "__main__":
    assert sys.argv[1] == "save_attention", sys.argv
    save_attention(*sys.argv[2:])
