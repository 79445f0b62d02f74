"""Padded micro-batches, and one schedule that runs a loss over them on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.log_probs import token_log_probs
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.plan import Plan

LossOfLogProbs = Callable[["MicroBatch", Tensor], Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """Some trajectories of a batch as padded rows. K: their loss tokens, flat, in row order."""

    index_N: Tensor  # int64, the trajectories' places in the batch; empty for a filler
    input_ids: Tensor  # int64 [rows, width]
    position_ids: Tensor  # int64 [rows, width]
    row_K: Tensor  # int64, row of each loss token, which is also its trajectory here
    column_K: Tensor  # int64, position whose logits predict the loss token
    target_K: Tensor  # int64, token ids
    behaviour_log_prob_K: Tensor  # float32
    place_K: Tensor  # int64, each loss token's place among all loss tokens of the batch


def micro_batches_of(batch: Batch, plan: Plan, mesh: Mesh) -> list[MicroBatch]:
    """This rank's share of `plan`.

    Pipeline stages exchange tensors of one fixed shape, so with a pipeline every micro-batch is
    filled up to the same number of rows.
    """
    fixed = plan.rows if mesh.pipeline_size > 1 else 1
    starts_N = batch.length_N.cumsum(0) - batch.length_N
    place_S = batch.loss_mask_S.cumsum(0) - 1
    return [
        _pad(batch, starts_N, place_S, indexes, max(fixed, len(indexes)), plan.width, mesh.device)
        for indexes in plan.micro_batches[mesh.data_rank]
    ]


def _pad(
    batch: Batch,
    starts_N: Tensor,
    place_S: Tensor,
    indexes: Sequence[int],
    rows: int,
    width: int,
    device: torch.device,
) -> MicroBatch:
    index_N = torch.tensor(indexes, dtype=torch.int64)
    length_N, start_N = batch.length_N[index_N], starts_N[index_N]
    columns = torch.arange(width)
    inside = columns < length_N[:, None]
    source = torch.where(inside, start_N[:, None] + columns, 0)
    input_ids = torch.zeros(rows, width, dtype=torch.int64)
    input_ids[: len(indexes)] = torch.where(inside, batch.tokens_S[source], 0)
    # A prompt has at least one token, so no loss token stands in column 0.
    row_K, token_K = (inside & batch.loss_mask_S[source]).nonzero(as_tuple=True)
    flat_K = source[row_K, token_K]
    return MicroBatch(
        index_N=index_N.to(device),
        input_ids=input_ids.to(device),
        position_ids=columns.expand(rows, width).to(device),
        row_K=row_K.to(device),
        column_K=(token_K - 1).to(device),
        target_K=batch.tokens_S[flat_K].to(device),
        behaviour_log_prob_K=batch.behaviour_log_prob_S[flat_K].to(device),
        place_K=place_S[flat_K].to(device),
    )


def run_micro_batches(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_of: LossOfLogProbs,
    *,
    mesh: Mesh,
    vocabulary: int,
    temperature: float,
    forward_only: bool,
) -> Tensor:
    """Run forward (and backward) over `micro_batches` under megatron's pipeline schedule.

    `loss_of(micro_batch, log_prob_K)` is called on the last stage with the loss tokens' float32
    log-probs under the current policy at `temperature`; it returns this micro-batch's share of
    the batch's loss, already divided by the batch's denominator. The gradient left in the model
    is that of the sum over micro-batches and data-parallel ranks. Returns this rank's sum of the
    shares, float32, 0 on other stages.
    """

    def forward_step(
        iterator: Iterator[MicroBatch], stage: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        micro_batch = next(iterator)
        output = stage(micro_batch.input_ids, micro_batch.position_ids, None)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            log_prob_K = token_log_probs(
                logits[micro_batch.row_K, micro_batch.column_K],
                micro_batch.target_K,
                temperature=temperature,
                vocab_size=vocabulary,
                mesh=mesh,
            )
            share = loss_of(micro_batch, log_prob_K)
            # Megatron adds up a token count that would divide the gradient; the share needs none.
            return share, torch.zeros((), dtype=torch.int), {"loss": share.detach()}

        return output, loss

    rows, width = micro_batches[0].input_ids.shape
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=width,
        micro_batch_size=rows,
        forward_only=forward_only,
    )
    total = torch.zeros((), dtype=torch.float32, device=mesh.device)
    for output in outputs:
        total += output["loss"].float()
    return total
