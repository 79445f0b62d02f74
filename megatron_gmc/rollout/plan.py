"""What a rollout samples and how, fixed for the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_gmc.rollout.fleet import FleetPolicy
from megatron_gmc.rollout.scheduler import LagScheduler
from megatron_gmc.rollout.types import Prompt


@dataclass(frozen=True)
class RolloutPlan:
    """See RolloutDriver for each field."""

    scheduler: LagScheduler
    prompt_at: Callable[[int], Prompt]
    prompt_fingerprint: str
    group_size: int
    seed: int
    request_groups: int
    calls_per_engine: int | None
    stall_timeout_s: float
    fleet: FleetPolicy | None
