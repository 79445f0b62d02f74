"""The counts that the scheduler decides by: what was sent, is finished, was consumed.

No I/O and no clock, so that the driver and the simulator keep the same books.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from megatron_gmc.rollout.scheduler import LagScheduler

T = TypeVar("T")


class Ledger(Generic[T]):
    """Submissions of one run from step `version` on; T is what a finished one has to show.

    Args:
        version: the learner's, which is also the first step of the batch that it takes next.
        submitted: every submission below was sent at some time, before a restart too.
        finished: (oldest version of its tokens, content) of the finished ones by submission.
        ahead: submissions consumed before an earlier one, which is still to come.

    What `batch` gives out stays in `finished` until `advance`.
    """

    def __init__(
        self,
        scheduler: LagScheduler,
        version: int = 0,
        submitted: int = 0,
        finished: Mapping[int, tuple[int, T]] | None = None,
        ahead: Iterable[int] = (),
    ) -> None:
        self.version = version
        self.ahead = set(ahead)
        self.finished: dict[int, T] = {}
        self._scheduler = scheduler
        # Due steps of the finished ones, and of those sent or to be sent again and not finished.
        self._due: dict[int, int] = {}
        self._due_unfinished: dict[int, int] = {}
        self._batch: list[list[int]] | None = None
        # Below `_unsent` every submission was sent in this process, is finished or consumed.
        self._unsent = self._first = version * scheduler.groups_per_step - len(self.ahead)
        self.submitted = max(self._first, submitted)
        self._complete = self._first
        for number, (oldest, content) in (finished or {}).items():
            self._add(number, oldest, content)
        for number in range(self._first, self.submitted):
            if number not in self.finished and number not in self.ahead:
                # Engines of this process load no version before this one.
                self._due_unfinished[number] = scheduler.due(number, version)

    @property
    def batch_given(self) -> bool:
        """Whether the batch under way was given out."""
        return self._batch is not None

    @property
    def complete(self) -> int:
        """How many first submissions are all finished or consumed."""
        while self._is_done(self._complete):
            self._complete += 1
        return self._complete

    @property
    def waiting(self) -> int:
        """Finished submissions that no batch has taken."""
        taken = self._scheduler.groups_per_batch if self.batch_given else 0
        return len(self.finished) - taken

    @property
    def unfinished(self) -> int:
        """Submissions that were sent, or are to be sent again, and are not finished."""
        return len(self._due_unfinished)

    def first_unsent(self) -> int:
        """The submission to send next."""
        while self._is_done(self._unsent):
            self._unsent += 1
        return self._unsent

    def send(self, stop: int, held: int) -> list[int]:
        """Note that what is unsent below `stop` goes to an engine that holds `held`; return it."""
        numbers = [n for n in range(self.first_unsent(), stop) if not self._is_done(n)]
        for number in numbers:
            self._due_unfinished[number] = self._scheduler.due(number, held)
        self._unsent = stop
        self.submitted = max(self.submitted, stop)
        return numbers

    def send_again(self, number: int, held: int) -> None:
        """Note that `number`, which was sent and came to nothing, goes to an engine at `held`."""
        due = self._scheduler.due(number, held)
        self._due_unfinished[number] = max(due, self._due_unfinished[number])

    def may_send(self, number: int, held: int) -> bool:
        """Whether `number` may go to an engine that holds `held`, for the first time or again."""
        if not self._scheduler.may_submit(number, held):
            return False
        due = self._scheduler.due(number, held)
        return due >= self._due_unfinished.get(number, due)

    def keeps_lag(self, number: int, oldest: int, newest: int) -> bool:
        """Whether tokens of versions `oldest` … `newest` may be in a submission under way."""
        in_time = self._scheduler.due(number, oldest) >= self._due_unfinished[number]
        return in_time and self._scheduler.keeps_lag(number, oldest, newest)

    def finish(self, number: int, oldest: int, content: T) -> None:
        """Book a submission as finished; `oldest` is the version of its oldest token."""
        del self._due_unfinished[number]
        self._add(number, oldest, content)

    def batch(self) -> list[list[int]] | None:
        """What each step of the batch under way consumes, the same until `advance`; None: wait."""
        if self._batch is None:
            self._batch = self._scheduler.choose(
                self.version, self._due, self._due_unfinished.values()
            )
        return self._batch

    def advance(self) -> None:
        """Note that the learner is past the batch that it was given."""
        assert self._batch is not None
        for number in (number for step in self._batch for number in step):
            del self.finished[number], self._due[number]
            self.ahead.add(number)
        self._batch = None
        self.version += self._scheduler.steps_per_batch
        while self._first in self.ahead:
            self.ahead.remove(self._first)
            self._first += 1

    def _add(self, number: int, oldest: int, content: T) -> None:
        self.finished[number] = content
        self._due[number] = self._scheduler.due(number, oldest)

    def _is_done(self, number: int) -> bool:
        return number in self.finished or number in self.ahead or number < self._first
