"""Log-probs of chosen tokens from logits whose vocabulary is spread over the tensor ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from megatron_gmc.learner.mesh import Mesh


def token_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float, vocab_size: int, mesh: Mesh
) -> Tensor:
    """log softmax(logits / temperature) at `targets`, differentiable, [...].

    `logits` [..., padded vocabulary / tensor ranks] holds this rank's columns and is left as it
    is; columns from `vocab_size` on are padding: they get no probability and a gradient of 0.
    `targets` int64 [...] are token ids below `vocab_size`. Arithmetic and result are float32, or
    float64 for float64 logits. Collective over the tensor group, with the same rows on each rank;
    the vocabulary is never gathered. A target that is no column gives -inf.
    """
    columns = logits.shape[-1]
    first = mesh.tensor_rank * columns
    valid = min(max(vocab_size - first, 0), columns)
    group = mesh.tensor_group if mesh.tensor_size > 1 else None
    result: Tensor = _TokenLogProbs.apply(logits, targets - first, temperature, valid, group)
    return result


class _Context(FunctionCtx):
    """What the forward pass leaves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    temperature: float
    valid: int


class _TokenLogProbs(torch.autograd.Function):
    """The softmax is formed again in backward from the logits, so that it is never stored."""

    @staticmethod
    def forward(
        ctx: _Context,
        logits: Tensor,
        column: Tensor,
        temperature: float,
        valid: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        """`column` counts from this rank's first one; `valid` columns are no padding."""
        scaled = _scaled(logits, temperature, valid)
        here = (column >= 0) & (column < valid)
        # One reduction brings both: only the rank that has the target offers more than -inf.
        peak_and_target = scaled.new_full((2, *column.shape), -torch.inf)
        if valid:
            at_target = scaled.gather(-1, column.clamp(0, valid - 1).unsqueeze(-1)).squeeze(-1)
            peak_and_target[0] = scaled.amax(-1)
            peak_and_target[1] = at_target.masked_fill(~here, -torch.inf)
        if group is not None:
            dist.all_reduce(peak_and_target, dist.ReduceOp.MAX, group=group)
        peak, target = peak_and_target[0], peak_and_target[1]
        total = scaled.sub_(peak.unsqueeze(-1)).exp_().sum(-1)
        if group is not None:
            dist.all_reduce(total, group=group)
        log_total = peak + total.log()
        ctx.save_for_backward(logits, column, log_total)
        ctx.temperature = temperature
        ctx.valid = valid
        return target - log_total

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """(one-hot − softmax) / temperature, times the incoming gradient."""
        logits, column, log_total = ctx.saved_tensors
        slope = gradient / ctx.temperature
        softmax = _scaled(logits, ctx.temperature, ctx.valid).sub_(log_total.unsqueeze(-1)).exp_()
        inner = softmax.mul_(-slope.unsqueeze(-1))
        if ctx.valid:
            here = (column >= 0) & (column < ctx.valid)
            at = column.clamp(0, ctx.valid - 1).unsqueeze(-1)
            inner.scatter_add_(-1, at, slope.masked_fill(~here, 0.0).unsqueeze(-1))
        outer = torch.zeros_like(logits)
        outer[..., : ctx.valid] = inner
        return outer, None, None, None, None


def _scaled(logits: Tensor, temperature: float, valid: int) -> Tensor:
    """A copy of the columns that are no padding, divided by the temperature."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits[..., :valid].to(dtype, copy=True).div_(temperature)
