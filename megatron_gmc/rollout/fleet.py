"""Keeps engines in service: one that fails is brought back, left out for good, or ends the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_gmc.rollout.channel import EngineChannel
from megatron_gmc.rollout.engine import EngineError, NoEngineCanError
from megatron_gmc.rollout.meter import Meter

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0
CHECK_S = 1.0

Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class FleetDownError(EngineError):
    """No engine is in service, and none came back in time."""


@dataclass(frozen=True)
class FleetPolicy:
    """An engine is brought back `attempts` times in a row, then excluded.

    Before each attempt is a pause, `pause_s` seconds at first, doubling up to LONGEST_PAUSE_S.
    A run whose engines are all out of service for `all_down_timeout_s` seconds ends.
    """

    attempts: int
    pause_s: float
    all_down_timeout_s: float

    def pause(self, failures: int) -> float:
        """Seconds to wait after the n-th failure in a row, n from 1 on."""
        return min(self.pause_s * 2.0 ** (failures - 1), LONGEST_PAUSE_S)


class Fleet:
    """The engines of a run; everything here runs on the rollout's loop.

    Without a policy the first failure of an engine ends the run. `changed` is called whenever an
    engine came or went.
    """

    def __init__(
        self,
        policy: FleetPolicy | None,
        channels: Sequence[EngineChannel],
        meter: Meter,
        changed: Callable[[], None],
    ) -> None:
        self.policy = policy
        self._channels = channels
        self._meter = meter
        self._changed = changed

    @contextmanager
    def survived(self, channel: EngineChannel, life: int, spawn: Spawn) -> Iterator[None]:
        """An engine's error inside takes it out of service and starts to bring it back.

        `life` is the engine's when the work was decided on: errors of a life that has ended
        already are its echo and change nothing.
        """
        try:
            yield
        except EngineError as error:
            if self.policy is None or isinstance(error, NoEngineCanError):
                raise
            if channel.life == life:
                channel.leave(error)
                self._meter.add("engine_faults")
                log.warning("%s is out of service: %s", channel.name, error)
                spawn(self._bring_back(channel, self.policy), f"bringing {channel.name} back")
        self._changed()

    async def release_memory(self, spawn: Spawn) -> None:
        """Have every engine in service give its memory to the learner."""
        for channel in (one for one in self._channels if one.started):
            with self.survived(channel, channel.life, spawn):
                await channel.release_memory()

    async def watch(self) -> None:
        """Raise FleetDownError where nobody is in service for too long, or nobody can come back."""
        policy = self.policy
        if policy is None:
            return
        up_at = time.monotonic()
        while True:
            await asyncio.sleep(min(CHECK_S, policy.all_down_timeout_s / 4))
            now = time.monotonic()
            # one that is starting for the first time is not down
            if any(one.started or one.failures == 0 for one in self._channels):
                up_at = now
            excluded = all(one.excluded for one in self._channels)
            if excluded or now - up_at >= policy.all_down_timeout_s:
                how = "all are excluded" if excluded else f"none came back in {now - up_at:.0f} s"
                reasons = "; ".join(one.fault for one in self._channels)
                raise FleetDownError(f"no engine is in service, {how}: {reasons}")

    async def _bring_back(self, channel: EngineChannel, policy: FleetPolicy) -> None:
        while channel.failures <= policy.attempts:
            await asyncio.sleep(policy.pause(channel.failures))
            try:
                await channel.start()
            except EngineError as error:
                channel.leave(error)
            else:
                log.warning("%s is back and gets the current weights first", channel.name)
                self._changed()
                return
        channel.excluded = True
        self._meter.add("engines_excluded")
        log.error("%s is left out from now on: %s", channel.name, channel.fault)
