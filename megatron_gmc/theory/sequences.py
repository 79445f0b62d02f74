"""A tabular autoregressive policy whose sequences can all be listed: 4⁶ = 4096 by default.

Every prefix has its own logits, so any policy over the sequences is one of these. Behaviour that
switches versions inside a sequence, filters, tempers or truncates has exact probabilities too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gmc.theory.lattice import Estimate, lattice_of_atoms, mass_deficit


@dataclass(frozen=True)
class SequenceSpace:
    """All sequences of `length` tokens out of `vocabulary`, in lexicographic order."""

    vocabulary: int = 4
    length: int = 6

    @property
    def prefixes(self) -> int:
        """Number of prefixes that a token follows: Σ_t Vᵗ, t < T."""
        return sum(self.vocabulary**t for t in range(self.length))

    def tokens(self) -> Tensor:
        """int64 [Vᵀ, T]."""
        return torch.cartesian_prod(*[torch.arange(self.vocabulary)] * self.length)

    def prefix_index(self) -> Tensor:
        """Row of each position's prefix in the table of logits, int64 [Vᵀ, T]."""
        tokens = self.tokens()
        code = torch.zeros(len(tokens), dtype=torch.int64)
        columns, first = [], 0
        for t in range(self.length):
            columns.append(first + code)
            first += self.vocabulary**t
            code = code * self.vocabulary + tokens[:, t]
        return torch.stack(columns, 1)

    def token_log_probs(self, table: Tensor) -> Tensor:
        """log π(y_t | y_<t) of every sequence, float64 [Vᵀ, T].

        table: log-probs of the next token, float64 [prefixes, V]; rows need not sum to 1.
        """
        return table[self.prefix_index(), self.tokens()]


def chi_square(log_policy: Tensor, log_behaviour: Tensor) -> float:
    """χ²(π‖μ) = Σ π²/μ − 1 of two laws over the same list of sequences, float64 [Vᵀ] each."""
    return float((2 * log_policy - log_behaviour).exp().sum()) - 1


def mean_ratio(log_policy: Tensor, log_recorded: Tensor, probability: Tensor) -> float:
    """E[π/recorded] when sequences come with `probability`; 1 iff the bookkeeping is right.

    `log_recorded` is the log-prob that the ratio's denominator uses, `probability` the law of what
    reaches the learner; sequences of probability 0 do not count.
    """
    sampled = probability > 0
    ratio = (log_policy[sampled] - log_recorded[sampled]).exp()
    return float(probability[sampled] @ ratio)


def mixed_token_log_probs(
    space: SequenceSpace, tables: list[Tensor], version: Callable[[Tensor], Tensor]
) -> Tensor:
    """Token log-probs when the version changes inside a sequence, float64 [Vᵀ, T].

    version: maps the sequences, int64 [Vᵀ, T], to which of `tables` sampled each token, int64
    [Vᵀ, T]; a token's version may depend on the tokens before it and on nothing later.
    """
    each = torch.stack([space.token_log_probs(table) for table in tables])
    chosen = version(space.tokens())
    return each.gather(0, chosen[None])[0]


def kept_by_top_p(table: Tensor, top_p: float) -> Tensor:
    """Which next tokens nucleus sampling keeps: the fewest whose mass reaches top_p; bool."""
    ordered, order = table.exp().sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(table, dtype=torch.bool).scatter(-1, order, before < top_p)


def group_deficit(
    log_policy: Tensor, log_behaviour: Tensor, group_size: int, epsilon: float, cells: int = 2**15
) -> Estimate:
    """E(M − c)₊ of groups sampled from the behaviour law, by convolution; see `lattice`."""
    step = group_size * (1 + epsilon) / cells
    ratio = (log_policy - log_behaviour).exp()
    law = lattice_of_atoms(ratio, log_behaviour.exp(), step, cells)
    return mass_deficit(law, group_size, epsilon)
