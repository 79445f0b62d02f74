"""Log-probs and entropies of chosen tokens straight from hidden states, never with whole logits.

The output layer is applied to all tokens for some columns of the vocabulary at a time, and again in
backward: one block of logits is all that ever exists. Blocks of columns, and not of tokens, give
each row of the weight's gradient in one product. The vocabulary stays spread over the tensor ranks:
each reduces its own columns, and a few numbers a token are exchanged at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.output_head import head_weight, whole_sequence

BLOCK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
"""Logits that exist at a time: 64 MiB in float32 on a CPU; a GPU needs more to be kept busy."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What the current policy says about each loss token, differentiable, float32 [K]."""

    log_prob_K: Tensor
    entropy_K: Tensor | None
    """Entropy in nats of the distribution that the token was drawn from, where asked for."""


def token_scores(
    chunk: GPTModel,
    hidden: Tensor,
    at_K: Tensor,
    target_K: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    mesh: Mesh,
    entropy: bool = False,
) -> TokenScores:
    """log softmax(logits / temperature) at `target_K`, and that distribution's entropy.

    `chunk` is the last stage's, and `hidden` [b, t, hidden] what it returned (t / tensor ranks
    with sequence parallelism). `at_K` int64 [K] are places in the b · t tokens whose logits
    predict the tokens `target_K` int64 [K], ids below `vocab_size`; a target that is no column
    gives -inf. Padded columns of the vocabulary have no probability and no gradient. Arithmetic
    beyond the matrix product is float32, or float64 for a float64 model. Collective over the
    tensor group, with the same arguments and the same gradient on each rank.
    """
    weight = head_weight(chunk)
    columns = len(weight)
    first = mesh.tensor_rank * columns
    head = _Head(
        temperature,
        valid=min(max(vocab_size - first, 0), columns),
        group=mesh.tensor_group if mesh.tensor_size > 1 else None,
    )
    hidden_K = whole_sequence(chunk, hidden)[at_K]
    log_prob_K, entropy_K = _Scores.apply(hidden_K, weight, target_K - first, head, entropy)
    return TokenScores(log_prob_K, entropy_K)


@dataclass(frozen=True, eq=False)
class _Head:
    """How hidden states become this rank's columns of the logits."""

    temperature: float
    valid: int
    """Columns that are no padding."""
    group: ProcessGroup | None

    def blocks(self, hidden_K: Tensor) -> Iterator[slice]:
        """Runs of columns whose logits may exist at a time."""
        size = max(1, BLOCK_ELEMENTS[hidden_K.device.type] // max(1, len(hidden_K)))
        for start in range(0, self.valid, size):
            yield slice(start, min(start + size, self.valid))

    def logits(self, hidden_K: Tensor, rows: Tensor) -> Tensor:
        """Divided by the temperature, at least float32, for some rows of the weight."""
        logits = hidden_K @ rows.t()
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(dtype).div_(self.temperature)


class _Context(FunctionCtx):
    """What the forward pass leaves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    head: _Head


class _Scores(torch.autograd.Function):
    """Log-probs and, where asked for, entropies; each rank's gradient is its columns' part."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden_K: Tensor,
        weight: Tensor,
        column_K: Tensor,
        head: _Head,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`column_K` counts from this rank's first column."""
        dtype = torch.promote_types(hidden_K.dtype, torch.float32)
        sums = _Sums.of_no_column(len(hidden_K), dtype, hidden_K.device)
        for block in head.blocks(hidden_K):
            logits = head.logits(hidden_K, weight[block])
            sums = sums.joined_with(_Sums.of(logits, column_K - block.start, entropy=entropy))
        target_K, log_total_K, entropy_K = sums.over_ranks(head.group).results()
        ctx.save_for_backward(hidden_K, weight, column_K, log_total_K, entropy_K)
        ctx.head = head
        return target_K - log_total_K, entropy_K if entropy else None

    @staticmethod
    def backward(
        ctx: _Context, gradient_K: Tensor, entropy_gradient_K: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        """(one-hot − p) for a log-prob, −p · (log p + entropy) for an entropy, per temperature."""
        hidden_K, weight, column_K, log_total_K, entropy_K = ctx.saved_tensors
        head = ctx.head
        # Blocks are added up in float32, whatever the model's dtype is.
        total_K = torch.zeros_like(hidden_K, dtype=log_total_K.dtype)
        weight_gradient = torch.empty_like(weight)
        weight_gradient[head.valid :] = 0.0
        for block in head.blocks(hidden_K):
            log_p = head.logits(hidden_K, weight[block]).sub_(log_total_K[:, None])
            slope = _slope(log_p, gradient_K, entropy_K, entropy_gradient_K)
            here_K, at_K = _inside(column_K - block.start, slope.shape[1])
            slope.scatter_add_(-1, at_K[:, None], gradient_K.where(here_K, 0.0)[:, None])
            slope = slope.div_(head.temperature).to(hidden_K.dtype)
            if total_K.dtype == hidden_K.dtype:
                total_K.addmm_(slope, weight[block])
            else:
                total_K.add_(slope @ weight[block])
            torch.mm(slope.t(), hidden_K, out=weight_gradient[block])
        return total_K.to(hidden_K.dtype), weight_gradient, None, None, None


@dataclass(frozen=True, eq=False)
class _Sums:
    """Of some columns, with e = exp(logit − peak): what softmax and entropy need of them, [K]."""

    peak_K: Tensor
    """The largest logit, −inf without a column."""
    target_K: Tensor
    """The target's logit, −inf where it is none of the columns."""
    sum_K: Tensor
    """Σ e."""
    weighted_K: Tensor
    """Σ e · log e; 0 where no entropy is asked for."""

    @classmethod
    def of_no_column(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> _Sums:
        zero_K = torch.zeros(tokens, dtype=dtype, device=device)
        return cls(zero_K - torch.inf, zero_K - torch.inf, zero_K, zero_K)

    @classmethod
    def of(cls, logits: Tensor, column_K: Tensor, *, entropy: bool) -> _Sums:
        """Of a block, [K, columns] with at least one column; consumes `logits`."""
        peak_K = logits.amax(-1)
        here_K, at_K = _inside(column_K, logits.shape[1])
        target_K = logits.gather(-1, at_K[:, None])[:, 0].masked_fill(~here_K, -torch.inf)
        # Where each logit is −inf the sums are of zeros, not of NaN.
        shifted = logits.sub_(peak_K.masked_fill(peak_K == -torch.inf, 0.0)[:, None])
        if not entropy:
            return cls(peak_K, target_K, shifted.exp_().sum(-1), torch.zeros_like(peak_K))
        exponential = shifted.exp()
        sum_K = exponential.sum(-1)
        # 0 · log 0 is 0.
        product = shifted.clamp_(min=torch.finfo(shifted.dtype).min).mul_(exponential)
        return cls(peak_K, target_K, sum_K, product.sum(-1))

    def joined_with(self, other: _Sums) -> _Sums:
        """Of both sets of columns."""
        peak_K = torch.maximum(self.peak_K, other.peak_K)
        ours, theirs = self.shifted(peak_K), other.shifted(peak_K)
        return _Sums(
            peak_K,
            torch.maximum(self.target_K, other.target_K),
            ours.sum_K + theirs.sum_K,
            ours.weighted_K + theirs.weighted_K,
        )

    def shifted(self, peak_K: Tensor) -> _Sums:
        """The same columns' sums from a higher peak."""
        # Columns that are all impossible have a peak of −inf, and add nothing.
        lower_K = torch.where(self.sum_K == 0, 0.0, self.peak_K - peak_K)
        factor_K = lower_K.exp()
        weighted_K = (self.weighted_K + lower_K * self.sum_K) * factor_K
        return _Sums(peak_K, self.target_K, self.sum_K * factor_K, weighted_K)

    def over_ranks(self, group: ProcessGroup | None) -> _Sums:
        """Of the whole vocabulary, on each rank of the tensor group."""
        if group is None:
            return self
        largest = torch.stack([self.peak_K, self.target_K])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        own = self.shifted(largest[0])
        sums = torch.stack([own.sum_K, own.weighted_K])
        dist.all_reduce(sums, group=group)
        return _Sums(largest[0], largest[1], sums[0], sums[1])

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """The target's logit, log Σ exp of the logits, and the entropy."""
        log_sum_K = self.sum_K.log()
        return self.target_K, self.peak_K + log_sum_K, log_sum_K - self.weighted_K / self.sum_K


def _inside(column_K: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Which targets are among a block's columns, and an index that is always one of them."""
    return (column_K >= 0) & (column_K < columns), column_K.clamp(0, columns - 1)


def _slope(
    log_p: Tensor, gradient_K: Tensor, entropy_K: Tensor, entropy_gradient_K: Tensor | None
) -> Tensor:
    """−p · gradient − p · (log p + entropy) · entropy_gradient, [K, columns]; consumes `log_p`."""
    if entropy_gradient_K is None:
        return log_p.exp_().mul_(-gradient_K[:, None])
    p = log_p.exp()
    inner = log_p.clamp_(min=torch.finfo(log_p.dtype).min).add_(entropy_K[:, None])
    return inner.mul_(-entropy_gradient_K[:, None]).sub_(gradient_K[:, None]).mul_(p)
