"""Ends a run in which a rank has stopped getting on, and says which rank and in which phase.

A rank that hangs makes all others wait for it in a collective, whose own timeout is long and names
nobody. So a thread of each rank tells a store on rank 0, again and again, where its main thread is
(step and phase) and since when; rank 0 looks at all of them.

A rank hangs when
    it is silent: nothing came from it for `timeout_s` (the process is frozen, lost, or keeps the
    interpreter to itself), or
    it is behind: for `timeout_s` no rank was earlier in the step than it. Where several are
    equally far, those are named whose main thread does not wait in a collective.
Phases in which rank 0 waits for samples do not count, however long: the rollout has limits of its
own. So no phase of a sound run may last longer than `timeout_s`, waiting for samples excepted.

The verdict ends every rank. A rank that gets no answer from the store for `timeout_s` names rank 0.
Words of ranks that were asked to stop travel the same way.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from megatron_gmc.failures import EXIT_FAILED
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.phases import ORDER, WAITING, Phases
from megatron_gmc.signals import StopRequest

VERDICT = "verdict"
FAREWELL_S = 5.0
"""How long rank 0 keeps the store open so that the others read the verdict."""
# Looking more often than this would cost and find nothing sooner that matters.
LONGEST_INTERVAL_S = 1.0


class _Store(Protocol):
    """What the watchdog uses of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


@dataclass(frozen=True)
class Beat:
    """What one rank tells of itself."""

    count: int
    step: int
    phase: str
    spent_s: float
    """Seconds since its main thread entered the phase, or left it with none to follow."""
    in_collective: bool
    line: str
    """Where its main thread is, file:line."""
    stop: str
    """Who asked this rank to stop; empty if nobody did."""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, ORDER.index(self.phase)

    def __str__(self) -> str:
        return f"in phase {self.phase} of step {self.step}"


@dataclass(frozen=True)
class Heard:
    """The last word of a rank, and how long ago it came."""

    beat: Beat
    ago_s: float


class Judge:
    """The module's rule, over what is heard of the ranks as time goes on."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._earliest: tuple[object, ...] = ()
        self._since = 0.0

    def verdict(self, ranks: Sequence[Heard], now: float) -> str | None:
        """Which ranks hang and where; None where none does."""
        silent = {r: one for r, one in enumerate(ranks) if one.ago_s > self._timeout_s}
        if silent:
            said = {r: f"silent for {h.ago_s:.1f} s, last {h.beat}" for r, h in silent.items()}
            return _sentence(said, self._timeout_s)
        first = min(one.beat.place for one in ranks)
        behind = {r: one.beat for r, one in enumerate(ranks) if one.beat.place == first}
        if self._earliest != (first, *behind):
            self._earliest, self._since = (first, *behind), now
        if now - self._since <= self._timeout_s or ORDER[first[1]] in WAITING:
            return None
        idle = {r: beat for r, beat in behind.items() if not beat.in_collective} or behind
        said = {r: f"{beat} for {beat.spent_s:.1f} s, at {beat.line}" for r, beat in idle.items()}
        return _sentence(said, self._timeout_s)


def _sentence(ranks: dict[int, str], timeout_s: float) -> str:
    named = "; ".join(f"rank {rank} hangs, {what}" for rank, what in ranks.items())
    return f"{named} (train.stall_timeout_s: {timeout_s:g}); all ranks end, resume from the last"


class Watchdog:
    """One for each rank; `watching` is collective."""

    def __init__(self, mesh: Mesh, phases: Phases, stop: StopRequest, timeout_s: float) -> None:
        self._mesh = mesh
        self._phases = phases
        self._stop = stop
        self._timeout_s = timeout_s
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / 10)
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._count = 0
        self._judge = Judge(timeout_s)
        self._answered = time.monotonic()
        self._lead: Beat | None = None
        # Of each rank, on rank 0: its last word and when that came.
        self._heard: dict[int, tuple[Beat, float]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while inside; the calling thread is the one that is watched."""
        store = _open_store(self._mesh, self._timeout_s)
        threading.Thread(target=self._talk, args=(store,), daemon=True).start()
        # A call to the store may hang with rank 0.
        threading.Thread(target=self._guard, daemon=True).start()
        try:
            yield
            # Before rank 0 takes its store away.
            dist.barrier()
        finally:
            self._ended.set()

    def _talk(self, store: _Store) -> None:
        while not self._ended.wait(self._interval_s):
            beat = self._own_beat()
            try:
                store.set(_key(self._mesh.rank), json.dumps(asdict(beat)))
                if self._mesh.rank == 0:
                    self._look(store)
                else:
                    self._listen(store)
            except dist.DistError:
                continue  # rank 0 is gone or frozen: `_guard` gives it its time
            self._answered = time.monotonic()

    def _look(self, store: _Store) -> None:
        keys = [_key(rank) for rank in range(self._mesh.world_size)]
        if not store.check(keys):
            return  # some have not spoken yet
        now = time.monotonic()
        for rank, text in enumerate(store.multi_get(keys)):
            beat = Beat(**json.loads(text))
            if rank not in self._heard or self._heard[rank][0].count != beat.count:
                self._heard[rank] = (beat, now)
            if beat.stop:
                self._stop.ask(beat.stop)
        heard = [Heard(beat, now - at) for _, (beat, at) in sorted(self._heard.items())]
        verdict = self._judge.verdict(heard, now)
        if verdict is not None:
            store.set(VERDICT, verdict)
            self._wait_for_readers(store, heard)
            self._end(verdict)

    def _wait_for_readers(self, store: _Store, heard: Sequence[Heard]) -> None:
        alive = sum(one.ago_s <= self._timeout_s for one in heard) - 1
        deadline = time.monotonic() + FAREWELL_S
        while store.add("read", 0) < alive and time.monotonic() < deadline:
            time.sleep(self._interval_s / 4)

    def _listen(self, store: _Store) -> None:
        if store.check([VERDICT]):
            verdict = store.get(VERDICT).decode()
            store.add("read", 1)
            self._end(verdict)
        self._lead = Beat(**json.loads(store.get(_key(0))))

    def _guard(self) -> None:
        while not self._ended.wait(self._interval_s):
            ago = time.monotonic() - self._answered
            if ago > self._timeout_s:
                last = f", last {self._lead}" if self._lead else ""
                self._end(_sentence({0: f"silent for {ago:.1f} s{last}"}, self._timeout_s))

    def _own_beat(self) -> Beat:
        self._count += 1
        place = self._phases.place
        frames = list(_frames_of(self._main))
        return Beat(
            count=self._count,
            step=place.step,
            phase=place.phase,
            spent_s=time.monotonic() - place.since,
            in_collective=any(_module(frame).startswith("torch.distributed") for frame in frames),
            line=f"{_module(frames[0])}:{frames[0].f_lineno}" if frames else "?",
            stop=self._stop.reason,
        )

    def _end(self, verdict: str) -> None:
        if self._ended.is_set():
            return
        os.write(2, f"error: {verdict}\n".encode())
        # The main thread may never come back, and nothing that it holds is needed any more.
        os._exit(EXIT_FAILED)


def _open_store(mesh: Mesh, timeout_s: float) -> _Store:
    """A store of the watchdog's own: a blocked call in another store would keep it waiting."""
    if mesh.world_size == 1:
        return cast(_Store, dist.HashStore())  # type: ignore[attr-defined]
    tcp: Callable[..., Any] = dist.TCPStore  # type: ignore[attr-defined]
    host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=timeout_s)
    store = None
    port = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    if mesh.rank == 0:
        store = tcp(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, src=0)
    if store is None:
        store = tcp(host, int(port), timeout=limit, wait_for_workers=False)
    return cast(_Store, store)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _frames_of(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))
