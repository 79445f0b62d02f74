"""Packed micro-batches, and one schedule that runs a loss over them on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.core_attention import Pack, pack_of
from megatron_gmc.learner.log_probs import TokenScores, token_scores
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.pack import context_rows
from megatron_gmc.learner.plan import Plan

LossOfLogProbs = Callable[["MicroBatch", TokenScores], Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """Some trajectories of a batch as one pack.

    T: the pack's tokens that this context rank holds, padding included. K: the loss tokens of
    the trajectories, one trajectory after another; L: those of them that this rank scores.
    """

    index_N: Tensor  # int64, the trajectories' places in the batch; empty for a filler
    tokens_T: Tensor  # int64
    pack: Pack
    row_K: Tensor  # int64, the trajectory here of each loss token
    target_K: Tensor  # int64, token ids
    behaviour_log_prob_K: Tensor  # float32
    place_K: Tensor  # int64, each loss token's place among all loss tokens of the batch
    slot_L: Tensor  # int64, the place among K
    at_L: Tensor  # int64, the place in T of the token that predicts it


def micro_batches_of(batch: Batch, plan: Plan, mesh: Mesh) -> list[MicroBatch]:
    """This rank's share of `plan`."""
    starts_N = batch.length_N.cumsum(0) - batch.length_N
    place_S = batch.loss_mask_S.cumsum(0) - 1
    return [
        _pack(batch, starts_N, place_S, indexes, plan, mesh)
        for indexes in plan.micro_batches[mesh.data_rank]
    ]


def _pack(
    batch: Batch,
    starts_N: Tensor,
    place_S: Tensor,
    indexes: Sequence[int],
    plan: Plan,
    mesh: Mesh,
) -> MicroBatch:
    # The longest first, which is the order in which attention wants them.
    by_length = sorted(indexes, key=lambda index: -int(batch.length_N[index]))
    index_N = torch.tensor(by_length, dtype=torch.int64)
    length_N = batch.length_N[index_N]
    padded = plan.padding.padded(length_N.tolist())
    total = sum(padded)
    # The trajectories' own tokens: where they come from in the batch and where they go.
    row_J = torch.repeat_interleave(torch.arange(len(indexes)), length_N)
    column_J = torch.arange(len(row_J)) - (length_N.cumsum(0) - length_N)[row_J]
    source_J = starts_N[index_N][row_J] + column_J
    target_J = (torch.tensor([0, *padded]).cumsum(0))[row_J] + column_J
    tokens = torch.zeros(total, dtype=torch.int64)
    tokens[target_J] = batch.tokens_S[source_J]
    loss_J = batch.loss_mask_S[source_J]
    flat_K = source_J[loss_J]
    rows_T = context_rows(padded, mesh.context_size, mesh.context_rank)
    local = torch.full((total,), -1)
    local[rows_T] = torch.arange(len(rows_T))
    # A prompt has at least one token, so each loss token has one before it in its trajectory.
    at_K = local[target_J[loss_J] - 1]
    slot_L = (at_K >= 0).nonzero()[:, 0]
    device = mesh.device
    return MicroBatch(
        index_N=index_N.to(device),
        tokens_T=tokens[rows_T].to(device),
        pack=pack_of(padded, size=mesh.context_size, rank=mesh.context_rank, device=device),
        row_K=row_J[loss_J].to(device),
        target_K=batch.tokens_S[flat_K].to(device),
        behaviour_log_prob_K=batch.behaviour_log_prob_S[flat_K].to(device),
        place_K=place_S[flat_K].to(device),
        slot_L=slot_L.to(device),
        at_L=at_K[slot_L].to(device),
    )


def run_micro_batches(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    loss_of: LossOfLogProbs,
    *,
    mesh: Mesh,
    vocabulary: int,
    temperature: float,
    entropy: bool,
    forward_only: bool,
) -> Tensor:
    """Run forward (and backward) over `micro_batches` under megatron's pipeline schedule.

    `loss_of(micro_batch, scores)` is called on the last stage with what the current policy says
    at `temperature` of all the micro-batch's loss tokens (entropies where `entropy`), the same on
    every context rank; it returns this micro-batch's share of the batch's loss, already divided
    by the batch's denominator. The gradient left in the model is that of the sum over
    micro-batches and data-parallel ranks. Returns this rank's sum of the shares, float32, 0 on
    other stages.
    """

    def forward_step(
        iterator: Iterator[MicroBatch], chunk: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        micro_batch = next(iterator)
        # Positions follow from where the pack's trajectories begin.
        output = chunk(micro_batch.tokens_T[None], None, None, packed_seq_params=micro_batch.pack)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            scores = token_scores(
                chunk.module,
                hidden,
                micro_batch.at_L,
                micro_batch.target_K[micro_batch.slot_L],
                temperature=temperature,
                vocab_size=vocabulary,
                mesh=mesh,
                entropy=entropy,
            )
            share = loss_of(micro_batch, _of_all_ranks(scores, micro_batch, mesh))
            # Megatron adds up a token count that would divide the gradient; the share needs none.
            return share, torch.zeros((), dtype=torch.int), {"loss": share.detach()}

        return output, loss

    # One chunk is no interleaved pipeline, and megatron then takes no list.
    iterators = [iter(micro_batches) for _ in chunks]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        # Not read: stages tell each other how long a pack is.
        seq_length=len(micro_batches[0].tokens_T),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    shares = [output["loss"].float() for output in outputs]
    return torch.stack(shares).sum() if shares else torch.zeros((), device=mesh.device)


def _of_all_ranks(scores: TokenScores, micro_batch: MicroBatch, mesh: Mesh) -> TokenScores:
    """All of the micro-batch's scores, in its order, on every context rank."""
    if mesh.context_size == 1:
        return scores
    size, group = len(micro_batch.target_K), mesh.context_group
    log_prob_K = _Joined.apply(scores.log_prob_K, micro_batch.slot_L, size, group)
    if scores.entropy_K is None:
        return TokenScores(log_prob_K, None)
    return TokenScores(log_prob_K, _Joined.apply(scores.entropy_K, micro_batch.slot_L, size, group))


class _Context(FunctionCtx):
    """What the forward pass leaves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]


class _Joined(torch.autograd.Function):
    """Each rank's values in their slots of one vector, the same on all ranks.

    Every rank then forms the same loss, of which its own values' gradient is its part.
    """

    @staticmethod
    def forward(
        ctx: _Context, value_L: Tensor, slot_L: Tensor, size: int, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(slot_L)
        value_K = value_L.new_zeros(size)
        value_K[slot_L] = value_L
        dist.all_reduce(value_K, group=group)
        return value_K

    @staticmethod
    def backward(ctx: _Context, gradient_K: Tensor) -> tuple[Tensor, None, None, None]:
        (slot_L,) = ctx.saved_tensors
        return gradient_K[slot_L], None, None, None
