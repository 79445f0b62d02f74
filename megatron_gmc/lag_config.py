"""The section of a config that says how far samples may lag."""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, Order
from megatron_gmc.section import Section


class RampConfig(Section):
    """A lag that moves in a straight line, rounded down, before it stays."""

    start: NonNegativeInt
    """The lag of step 0."""
    steps: PositiveInt
    """From this step on the lag is what `exact` or `bounded` says."""


class LagConfig(Section):
    """How far the sampled tokens may lag behind the policy: one of exact and bounded."""

    exact: NonNegativeInt | None = None
    """Step t is trained on samples of version max(0, t − exact), wholly."""
    bounded: NonNegativeInt | None = None
    """Sampling never stops; no consumed token is older than this many versions."""
    order: Order = "submission"
    """With bounded: earliest_deadline lets finished groups overtake unfinished ones that still can
    be consumed in time; which groups a step takes then depends on how long each took."""
    ramp: RampConfig | None = None
    """The lag of the first steps, as a straight line."""
    first: tuple[NonNegativeInt, ...] = ()
    """The lags of the first steps, one by one."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.exact is None) == (self.bounded is None):
            raise ValueError(
                "give one of exact or bounded, as in 'lag: {exact: 16}'; got "
                f"exact={self.exact}, bounded={self.bounded}"
            )
        return self

    @model_validator(mode="after")
    def _only_what_fits(self) -> Self:
        if self.ramp is not None and self.first:
            raise ValueError("ramp: given beside first, and both say the first lags; give one")
        if self.order != "submission" and self.exact is not None:
            raise ValueError(
                f"order: {self.order} needs a bounded lag; an exact one fixes what a step takes"
            )
        if self.order != "submission" and (self.ramp is not None or self.first):
            raise ValueError(
                f"order: {self.order} keeps one bound for the whole run; leave ramp and first out"
            )
        return self

    def build(self, steps_per_batch: int) -> Lag:
        """What the scheduler keeps; an exact lag is read at batch starts, in whole batches."""
        if self.exact is not None:
            return ExactLag(self.exact, self._first(self.exact, steps_per_batch))
        assert self.bounded is not None
        return BoundedLag(self.bounded, self._first(self.bounded, 1), order=self.order)

    def _first(self, k: int, size: int) -> tuple[int, ...]:
        if self.ramp is None:
            return self.first
        start, steps = self.ramp.start, self.ramp.steps
        lags: list[int] = []
        for step in range(0, steps, size):
            line = start + (k - start) * step // steps
            # The start itself is not rounded: one that does not fit is refused.
            lags += [line - line % size if step else start] * size
        return tuple(lags)
