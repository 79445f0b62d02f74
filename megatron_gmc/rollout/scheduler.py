"""The lag scheduler: who may sample what, when, so that the lag is a guarantee.

Pure arithmetic on counts: no I/O, no clock, no state of its own. The driver keeps the counts and
asks.

Words. Groups are numbered by *submission*: n = 0, 1, 2 … With P groups a step, step t consumes the
submissions t·P … (t+1)·P − 1, in that order. One optimizer step per batch makes one version, so
step t is consumed at learner version t. An engine *holds* the newest version it acknowledged.

Invariants
    pacing      submission n is sent only to an engine that holds at least max(0, n//P − k);
                in exact mode, precisely that version.
    order       step t consumes exactly its own P submissions; nothing finished is thrown away.
    switching   bounded: an engine may load a newer version at any time, also inside a response.
                exact: only when every submission that needs an older version is complete.

Proof that lag ≤ k. Versions of an engine only rise, so each token of submission n was sampled by
a version ≥ the one held when n was sent, which is ≥ n//P − k. Submission n is consumed at learner
version n//P. Hence lag = n//P − version ≤ k, whatever the durations, in both modes. Pacing by the
learner's version instead of the engine's would break this as soon as an engine loads late.

Proof that exact mode is exact. n was sent at version r = max(0, n//P − k) and no engine leaves r
before n is complete, so all its tokens carry r.

No deadlock. Step t waits for submissions that need a version ≤ t, and versions 0 … t are
published before step t starts. In exact mode the switch to version v waits for the submissions
below (v + k)·P only; those need versions < v, which the engines reach first.

Queue. An engine holds at most the learner's version t, so every submission ever sent is below
(t + k + 1)·P while those below t·P are consumed: at most (k + 1)·P are in flight or finished. And
everything below t·P was sent, so engines go to version t − k or newer next: at most k + 1 published
versions can still be asked for.

Restarts change nothing: a run that resumes at version v is described by the same counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExactLag:
    """Step t is sampled wholly by version max(0, t − k)."""

    k: int

    def __post_init__(self) -> None:
        _check_lag(self.k)

    def __str__(self) -> str:
        return f"lag {self.k} (exact)"


@dataclass(frozen=True)
class BoundedLag:
    """No consumed token is more than k versions old; sampling never stops."""

    k: int

    def __post_init__(self) -> None:
        _check_lag(self.k)

    def __str__(self) -> str:
        return f"lag ≤ {self.k} (bounded)"


Lag = ExactLag | BoundedLag


def _check_lag(k: int) -> None:
    if k < 0:
        raise ValueError(f"lag k must be 0 or above, got {k}")


@dataclass(frozen=True)
class LagScheduler:
    """Answers for one run; see the module's docstring for what holds and why.

    `steps` ends the run: no submission that only a later step would consume is ever sent, and the
    engines may go on to the last versions without them. None: the run is endless.

    Raises ValueError for `groups_per_step` below 1 or `steps` below 0.
    """

    lag: Lag
    groups_per_step: int
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be 1 or above, got {self.groups_per_step}")
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"steps must be 0 or above, got {self.steps}")

    def consumed_by(self, step: int) -> range:
        """The submissions that step `step` consumes, in order."""
        return range(step * self.groups_per_step, (step + 1) * self.groups_per_step)

    def oldest_version(self, submission: int) -> int:
        """The oldest version that a token of `submission` may carry."""
        return max(0, submission // self.groups_per_step - self.lag.k)

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

    def complete_before(self, version: int) -> int:
        """How many first submissions must be complete before an engine may load `version`."""
        if isinstance(self.lag, BoundedLag) or version == 0:
            return 0
        return self._capped((version + self.lag.k) * self.groups_per_step)

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
