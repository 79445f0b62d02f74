"""The lag scheduler: who may sample what, when, so that the lag is a guarantee.

Pure arithmetic on counts: no I/O, no clock, no state of its own. The ledger keeps the counts and
asks.

Words. Groups are numbered by *submission*: n = 0, 1, 2 … Step t takes P groups and makes version
t + 1. S consecutive steps t₀ = b·S … t₀ + S − 1 are *batch* b: its S·P groups are complete before
step t₀ begins, and weights are published at batch ends alone, so engines know multiples of S.
An engine *holds* the newest version it acknowledged. k(t) is the lag of step t, mostly constant.

Invariants
    pacing      submission n, with t = n // P, is sent only to an engine that holds version
                bounded: max(0, t − k(t)) or newer; exact: precisely max(0, t₀ − k(t₀)).
    due         every submission sent is due at a step at which its oldest token keeps the bound.
    order       each batch takes the S·P finished groups that are due first, and begins only when
                what it leaves behind can still be taken in time. Nothing finished is thrown away.
    switching   bounded: an engine may load a newer version at any time, also inside a response.
                exact: only when every submission that needs an older version is complete.

Due. In submission order n is due at step n // P. By earliest deadline it is due at v + k, where v
is the version held when it was sent, or its oldest token's once it is finished.

Proof that lag ≤ k. Versions of an engine only rise, so each token of submission n was sampled by
a version ≥ the one held when n was sent. In submission order that is ≥ t − k(t), and n is consumed
at learner version t = n // P. By earliest deadline, consumption by step v + k is the bound itself.
Pacing by the learner's version instead of the engine's would break this as soon as an engine
loads late. In exact mode n was sent at version r = max(0, t₀ − k(t₀)) and no engine leaves r
before n is complete, so all its tokens carry r: step t₀ + j learns at lag t₀ + j − r, which is
k + j once t₀ ≥ k.

Proof that everything is taken in time. Say that step t *fits* when the submissions sent and not
consumed, sorted by due step d₀ ≤ d₁ ≤ …, have i < (dᵢ − t + 1)·P: each has a place at or before
its due step (Hall's condition for P places a step). `choose` starts a batch only if the step after
it fits. Sending n keeps the fit: n is due at d ≥ n // P by pacing, before it n − tP submissions
were sent and not consumed, so no place gets beyond n − tP < (d − t + 1)·P, the limit of n, and of
all that are due later and move up by one. Once a submission is finished its due step only
rises. Inside a batch, the i-th chosen by due step lies in mini-batch i // P and is due there or
later, again by the fit.

No deadlock. When all that was sent is finished, the groups due first are a choice that fits, since
removing the S·P first lowers every other place by S·P. There are S·P of them: k(t₀ + j) ≥ j, so
version t₀ is new enough for the whole batch, and it is published before. In exact mode the switch
to version v waits for the submissions that need versions < v, which the engines reach first;
since r never falls from one batch to the next, no engine ever has to go back.

Queue. An engine holds at most t₀, so every submission sent is below (t₀ + k + 1)·P (exact:
(t₀ + k + S)·P), and t₀·P are consumed: at most (k + 1)·P, exact (k + S)·P, are in flight or
finished, with the largest k of the run. At most k + 1 published versions can still be asked for.

Restarts change nothing: a run that resumes at version v is described by the same counts. What was
in flight is sent again, to engines that hold v or newer, and is due at v + k at the earliest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Order = Literal["submission", "earliest_deadline"]


@dataclass(frozen=True)
class _Lag:
    """`first`: the lags of the first steps, where they differ from k, that of all later ones."""

    k: int
    first: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for lag in (*self.first, self.k):
            if lag < 0:
                raise ValueError(f"lag k must be 0 or above, got {lag}")

    def at(self, step: int) -> int:
        """The lag of step `step`."""
        return self.first[step] if step < len(self.first) else self.k

    @property
    def largest(self) -> int:
        return max(self.k, *self.first) if self.first else self.k

    def _described(self) -> str:
        if not self.first:
            return str(self.k)
        return f"{self.first[0]} → {self.k} in {len(self.first)} steps"


@dataclass(frozen=True)
class ExactLag(_Lag):
    """The batch of step t is sampled wholly by version max(0, t − k)."""

    def __str__(self) -> str:
        return f"lag {self._described()} (exact)"


@dataclass(frozen=True)
class BoundedLag(_Lag):
    """No consumed token is more than k versions old; sampling never stops.

    `order` earliest_deadline lets finished groups overtake unfinished ones that are not yet due;
    which groups a step takes then depends on how long each took.
    """

    order: Order = "submission"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first and self.order != "submission":
            raise ValueError(
                f"order {self.order} keeps one bound for the whole run; use order submission with "
                "a lag that changes"
            )

    def __str__(self) -> str:
        order = "" if self.order == "submission" else ", earliest deadline"
        return f"lag ≤ {self._described()} (bounded{order})"


Lag = ExactLag | BoundedLag


@dataclass(frozen=True)
class LagScheduler:
    """Answers for one run; see the module's docstring for what holds and why.

    `steps` ends the run: no submission that only a later step would consume is ever sent, and the
    engines may go on to the last versions without them. None: the run is endless.
    `steps_per_batch` is S, the optimizer steps between two publications.

    Raises ValueError for a number out of range, or a lag that cannot be kept with S steps a batch.
    """

    lag: Lag
    groups_per_step: int
    steps: int | None = None
    steps_per_batch: int = 1

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be 1 or above, got {self.groups_per_step}")
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"steps must be 0 or above, got {self.steps}")
        if self.steps_per_batch < 1:
            raise ValueError(f"steps_per_batch must be 1 or above, got {self.steps_per_batch}")
        if self.steps is not None and self.steps % self.steps_per_batch:
            raise ValueError(
                f"steps must be a multiple of the {self.steps_per_batch} steps of a batch, got "
                f"{self.steps}; {_neighbours(self.steps, self.steps_per_batch)} would do"
            )
        for start in range(0, len(self.lag.first) + self.steps_per_batch, self.steps_per_batch):
            _check_batch(self.lag, start, self.steps_per_batch)

    @property
    def groups_per_batch(self) -> int:
        return self.groups_per_step * self.steps_per_batch

    @property
    def queue_limit(self) -> int:
        """The most submissions that are ever sent and not consumed."""
        ahead = self.steps_per_batch if isinstance(self.lag, ExactLag) else 1
        return (self.lag.largest + ahead) * self.groups_per_step

    def batch_start(self, step: int) -> int:
        """The first step of the batch that `step` lies in."""
        return step - step % self.steps_per_batch

    def due(self, submission: int, oldest: int) -> int:
        """The last step that may consume `submission`, whose tokens are of `oldest` or newer."""
        if isinstance(self.lag, BoundedLag) and self.lag.order == "earliest_deadline":
            return oldest + self.lag.k
        return submission // self.groups_per_step

    def oldest_version(self, submission: int) -> int:
        """The oldest version that may sample `submission`; always one that is published."""
        step, size = submission // self.groups_per_step, self.steps_per_batch
        if isinstance(self.lag, ExactLag):
            return _sampled_by(self.lag, self.batch_start(step))
        return -(-max(0, step - self.lag.at(step)) // size) * size

    def required_version(self, submission: int) -> int | None:
        """The one version that must sample `submission`; None where any recent one may."""
        return self.oldest_version(submission) if isinstance(self.lag, ExactLag) else None

    def may_submit(self, submission: int, held: int) -> bool:
        """Whether `submission` may be sent now to an engine that holds version `held`.

        `held` is below 0 for an engine without weights of this run.
        """
        if self._past_end(submission):
            return False
        oldest = self.oldest_version(submission)
        return held == oldest if isinstance(self.lag, ExactLag) else held >= oldest

    def keeps_lag(self, submission: int, oldest: int, newest: int) -> bool:
        """Whether tokens of versions `oldest` … `newest` may be in `submission`'s group."""
        required = self.required_version(submission)
        if required is None:
            return oldest >= self.oldest_version(submission)
        return oldest == newest == required

    def choose(
        self, start: int, finished: Mapping[int, int], unfinished: Collection[int]
    ) -> list[list[int]] | None:
        """The submissions that each step of the batch at step `start` consumes; None: wait.

        `finished` maps every finished submission to its due step, `unfinished` has the due steps
        of all others that were sent; what is consumed is in neither.
        """
        after = start + self.steps_per_batch
        if len(finished) < self.groups_per_batch or any(due < after for due in unfinished):
            return None  # The common answer, without sorting.
        by_due = sorted(finished, key=lambda number: (finished[number], number))
        chosen, left = by_due[: self.groups_per_batch], by_due[self.groups_per_batch :]
        if not self.fits(after, (*(finished[number] for number in left), *unfinished)):
            return None
        # Where the batch leaves a choice, the order of submission.
        chosen.sort(key=lambda number: (min(finished[number], after - 1), number))
        size = self.groups_per_step
        return [chosen[first : first + size] for first in range(0, len(chosen), size)]

    def fits(self, step: int, due: Iterable[int]) -> bool:
        """Whether submissions due at the steps `due` all can be consumed in time from `step` on."""
        return all(
            place < (last - step + 1) * self.groups_per_step
            for place, last in enumerate(sorted(due))
        )

    def complete_before(self, version: int) -> int:
        """How many first submissions must be complete before an engine may load `version`."""
        if isinstance(self.lag, BoundedLag) or version == 0:
            return 0
        # The first batch that may be sampled by `version` or newer; r is at least t − k.
        lag, size = self.lag, self.steps_per_batch
        starts = range(0, version + lag.largest + size, size)
        first = bisect_left(starts, version, key=lambda start: _sampled_by(lag, start))
        return self._capped(first * self.groups_per_batch)

    def may_switch(self, version: int, complete: int) -> bool:
        """Whether an engine may load `version` now.

        `complete` counts the submissions 0 … complete − 1 that are all sampled and accepted.
        """
        return complete >= self.complete_before(version)

    def next_version(self, submission: int, newest: int) -> int:
        """The version an engine should hold next.

        `submission` is the first one not yet sent, `newest` the newest version published.
        """
        if isinstance(self.lag, BoundedLag) or self._past_end(submission):
            return newest
        return min(newest, self.oldest_version(submission))

    def _past_end(self, submission: int) -> bool:
        return self.steps is not None and submission >= self.steps * self.groups_per_step

    def _capped(self, submissions: int) -> int:
        if self.steps is None:
            return submissions
        return min(submissions, self.steps * self.groups_per_step)


def _sampled_by(lag: ExactLag, start: int) -> int:
    """r of the batch that begins at step `start`."""
    return max(0, start - lag.at(start))


def _check_batch(lag: Lag, start: int, size: int) -> None:
    """Raise ValueError where `lag` cannot be kept in the batch of `size` steps from `start` on."""
    if isinstance(lag, BoundedLag):
        for step in range(start, start + size):
            if lag.at(step) < step - start:
                raise ValueError(
                    f"a bound of {lag.at(step)} at step {step} cannot be kept with {size} "
                    f"optimizer steps a batch, whose last one is {size - 1} versions ahead of the "
                    f"weights that sample; use {size - 1} or more"
                )
        return
    lags = [lag.at(step) for step in range(start, start + size)]
    if min(lags) != max(lags):
        raise ValueError(
            f"an exact lag cannot change inside a batch, and steps {start} to {start + size - 1} "
            f"have {', '.join(map(str, lags))}; change it every {size} steps"
        )
    if lags[0] % size:
        raise ValueError(
            f"an exact lag must be a multiple of the {size} optimizer steps of a batch, after "
            f"which weights are published, got {lags[0]}; {_neighbours(lags[0], size)} would do"
        )
    if start >= size and _sampled_by(lag, start - size) > _sampled_by(lag, start):
        raise ValueError(
            f"an exact lag may rise by {size} a batch at most, and it rises from "
            f"{lag.at(start - size)} to {lags[0]} at step {start}: the engines would have to go "
            "back to older weights"
        )


def _neighbours(value: int, size: int) -> str:
    """The multiples of `size` around `value`, as text; without 0 below."""
    return " or ".join(
        str(one) for one in (value // size * size, (value // size + 1) * size) if one
    )
