"""When an engine that failed is brought back, left out for good, or ends the run with the others.

No I/O and no clock of its own: the loop keeps the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_gmc.rollout.channel import EngineChannel
from megatron_gmc.rollout.engine import EngineError

LONGEST_PAUSE_S = 60.0


class FleetDownError(EngineError):
    """No engine is in service, and none came back in time."""


@dataclass(frozen=True)
class FleetPolicy:
    """An engine is brought back `attempts` times in a row, then excluded.

    Before each attempt is a pause, `pause_s` seconds at first, doubling up to LONGEST_PAUSE_S.
    A run whose engines are all out of service for `all_down_timeout_s` ends.
    """

    attempts: int
    pause_s: float
    all_down_timeout_s: float

    def pause(self, failures: int) -> float:
        """Seconds to wait after the n-th failure in a row, n from 1 on."""
        return min(self.pause_s * 2.0 ** (failures - 1), LONGEST_PAUSE_S)

    def gives_up(self, failures: int) -> bool:
        return failures > self.attempts


def check_any_left(policy: FleetPolicy, channels: Sequence[EngineChannel], down_s: float) -> None:
    """Raise FleetDownError where nobody can or did come back after `down_s` seconds without any."""
    excluded = all(channel.excluded for channel in channels)
    if not excluded and down_s < policy.all_down_timeout_s:
        return
    reasons = "; ".join(f"{one.name}: {one.fault}" for one in channels)
    how = "all are excluded" if excluded else f"none came back within {down_s:.0f} s"
    raise FleetDownError(f"no engine is in service, {how} ({reasons})")
