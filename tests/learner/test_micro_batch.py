"""What a pack holds of its trajectories, counted token by token against the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.micro_batch import MicroBatch, micro_batches_of
from megatron_gmc.learner.pack import Padding
from megatron_gmc.learner.plan import Plan
from tests.learner.steps import ADAMW, new_learner, random_rows
from tests.qwen3 import tiny_qwen3

BATCH = Batch.from_rows(
    [replace(row, loss_mask=[i % 3 != 1 for i, _ in enumerate(row.loss_mask)])
     for row in random_rows(3)]
)  # fmt: skip
UNITS = (((4, 0), (2,)), ((1, 3, 5), ()))
MESHES = [(1, False, 1), (2, False, 1), (2, True, 2), (4, True, 2)]


def padding(context: int, sequence_parallel: bool, tensor: int) -> Padding:
    return Padding.of(tensor=tensor, context=context, sequence_parallel=sequence_parallel)


def shares(mesh: Mesh, pad: Padding, context: int) -> list[list[MicroBatch]]:
    """The micro-batches of both data ranks, each as all context ranks see it."""
    plan = Plan(UNITS, pad, two_pass=False)
    seen = []
    for data_rank in range(2):
        ranks = [
            micro_batches_of(
                BATCH,
                plan,
                replace(mesh, data_rank=data_rank, context_size=context, context_rank=rank),
            )
            for rank in range(context)
        ]
        seen += [list(same) for same in zip(*ranks, strict=True)]
    return seen


@pytest.mark.parametrize(("context", "sequence_parallel", "tensor"), MESHES)
def test_every_loss_token_is_scored_once_from_the_token_before_it(
    mesh: Mesh, context: int, sequence_parallel: bool, tensor: int
) -> None:
    """T3: also a first response token, from the last token of the prompt."""
    start_N = BATCH.length_N.cumsum(0) - BATCH.length_N
    loss_places = BATCH.loss_mask_S.nonzero()[:, 0]
    placed = []
    for ranks in shares(mesh, padding(context, sequence_parallel, tensor), context):
        first = ranks[0]
        slots = torch.cat([one.slot_L for one in ranks])
        assert slots.sort().values.tolist() == list(range(len(first.target_K)))
        for one in ranks:
            assert torch.equal(one.target_K, first.target_K)
            assert torch.equal(one.place_K, first.place_K)
            source_L = loss_places[one.place_K[one.slot_L]]
            assert torch.equal(one.tokens_T[one.at_L], BATCH.tokens_S[source_L - 1])
        source_K = loss_places[first.place_K]
        assert torch.equal(first.target_K, BATCH.tokens_S[source_K])
        assert torch.equal(first.behaviour_log_prob_K, BATCH.behaviour_log_prob_S[source_K])
        of_K = torch.searchsorted(start_N, source_K, right=True) - 1
        assert torch.equal(first.index_N[first.row_K], of_K)
        placed += first.place_K.tolist()
    assert sorted(placed) == list(range(len(loss_places)))


@pytest.mark.parametrize(("context", "sequence_parallel", "tensor"), MESHES)
def test_packs_hold_whole_trajectories_and_no_more_padding_than_the_mesh_needs(
    mesh: Mesh, context: int, sequence_parallel: bool, tensor: int
) -> None:
    pad = padding(context, sequence_parallel, tensor)
    indexes = [set(unit) for rank in UNITS for unit in rank]
    for unit, ranks in zip(indexes, shares(mesh, pad, context), strict=True):
        first = ranks[0]
        assert set(first.index_N.tolist()) == unit
        lengths = BATCH.length_N[first.index_N].tolist()
        assert lengths == sorted(lengths, reverse=True)
        (size,) = {len(one.tokens_T) for one in ranks}
        assert size * context == pad.of_pack(lengths)
        assert first.pack.cu_seqlens_q[-1] == size * context
        assert (size % tensor == 0) or not sequence_parallel
        held = sorted(torch.cat([one.tokens_T for one in ranks]).tolist())
        own = [t for i in unit for t in BATCH.tokens_S.split(BATCH.length_N.tolist())[i].tolist()]
        assert held == sorted(own + [0] * (size * context - len(own)))


def test_what_attention_costs_is_what_a_counter_of_operations_says(
    mesh: Mesh, folder: Path
) -> None:
    """Operations of transformers' model at two lengths: a · n for tokens and b · n² for pairs."""
    model = tiny_qwen3(tied=True)
    counts = []
    for length in (8, 16):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.int64))
        counts.append(counter.get_total_flops())
    pair = (counts[1] - 2 * counts[0]) / (16**2 - 2 * 8**2)
    token = (counts[0] - pair * 8**2) / 8
    limits = new_learner(folder, mesh, ADAMW).limits
    # The rotary table's few operations are in the count too.
    assert limits.attention_cost == pytest.approx(pair / token, rel=0.01)
