"""Known bad signs in a run's metrics, in plain words, each with what to do about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_gmc.run_record import ACCURACY, COLLAPSE, RunRecord

MISMATCH_SD = 1.0
"""Of the log-ratios at lag 0; above it engine and learner themselves disagree."""
RETAINED_MASS = 0.3
ESS_OF_ONE = 1.25
"""Times 1/G: below it one trajectory of a group holds nearly all of the weight."""
ENTROPY = "entropy/mean"
ENTROPY_LEFT = 0.1
"""Share of the first steps' entropy below which a policy counts as collapsed."""
IDLE = 0.5
"""Share of the time from which engines or learner count as mostly idle."""
BOTH_IDLE = 0.3
"""Share of the time from which both, idle in turn, do not overlap."""
TRUNCATED_RISE = 0.1

_WINDOW = 10
_TREND_STEPS = 20


@dataclass(frozen=True)
class Sign:
    """`step` is the newest step that shows it."""

    step: int
    text: str


def bad_signs(run: RunRecord) -> list[Sign]:
    """What the run shows now: medians of its last ten steps against the limits above.

    Idle shares leave the first step out, in which engines start. A metric that the run does not
    have gives no sign.
    """
    found = (
        _fallen(run),
        _mismatch(run),
        _retained(run),
        _concentrated(run),
        _entropy(run),
        _idle(run),
        _truncated(run),
        _refused(run),
    )
    return [Sign(run.step, text) for text in found if text is not None]


def _recent(run: RunRecord, name: str) -> float | None:
    values = [value for value in run.values(name)[-_WINDOW:] if not math.isnan(value)]
    return statistics.median(values) if values else None


def _fallen(run: RunRecord) -> str | None:
    accuracy = run.values(ACCURACY)
    if not accuracy or accuracy[-1] >= accuracy[0] - COLLAPSE:
        return None
    return (
        f"Held-out accuracy is at {accuracy[-1]:.3f}, below the {accuracy[0]:.3f} of the start: "
        "the run has collapsed. Lower the step size or the lag, or cap the weights."
    )


def _mismatch(run: RunRecord) -> str | None:
    spread = _recent(run, "ratio/log_ratio_sd_lag0")
    if spread is None or spread <= MISMATCH_SD:
        return None
    return (
        f"Engine and learner disagree: sd(ℓ) at lag 0 is {spread:.2f}, above {MISMATCH_SD:g}. "
        "Give both the same dtype and a float32 output layer, or shorten the responses."
    )


def _retained(run: RunRecord) -> str | None:
    kept = _recent(run, "ratio/retained_mass")
    if kept is None or kept >= RETAINED_MASS:
        return None
    return (
        f"Only {kept:.0%} of the expected gradient weight is retained. Lower the lag or the step "
        "size, or raise G; `megatron-gmc theory RUN` says by how much."
    )


def _concentrated(run: RunRecord) -> str | None:
    share, size = _recent(run, "ratio/ess"), run.group_size
    if share is None or size is None or size < 3 or share > ESS_OF_ONE / size:
        return None
    return (
        f"One trajectory holds nearly all of a group's weight: the effective share of samples is "
        f"{share:.3f}, and 1/G is {1 / size:.3f}. Lower the lag or the step size."
    )


def _entropy(run: RunRecord) -> str | None:
    values, now = run.values(ENTROPY), _recent(run, ENTROPY)
    if now is None or len(values) <= _WINDOW:
        return None
    first = statistics.median(values[:_WINDOW])
    if now >= ENTROPY_LEFT * first:
        return None
    return (
        f"The policy's entropy fell from {first:.3g} to {now:.3g}: it answers nearly the same "
        "every time. Lower the step size, or look at what the reward asks for."
    )


def _idle(run: RunRecord) -> str | None:
    learner, engines = idle_shares(run)
    if learner is None or engines is None:
        return None
    if learner > BOTH_IDLE and engines > BOTH_IDLE:
        return (
            f"Learner (idle {learner:.0%}) and engines (idle {engines:.0%}) wait for each other. "
            f"Try {_next_lag(run)}, so that they overlap."
        )
    if learner > IDLE:
        return (
            f"The learner waits {learner:.0%} of the time and the engines do not: sampling is the "
            "bottleneck. More engines or shorter responses help; more lag does not."
        )
    if engines > IDLE:
        return (
            f"Engines are idle {engines:.0%} of the time: the learner is the bottleneck. Fewer "
            f"engines do, or a larger learner mesh{_lower_lag(run)}."
        )
    return None


def idle_shares(run: RunRecord) -> tuple[float | None, float | None]:
    """(learner's, engines') share of idle time over the last ten steps, the first left out."""
    wait, step = _later_sum(run, "time/wait_s"), _later_sum(run, "time/step_s")
    idle, busy = _later_sum(run, "rollout/engine_idle_s"), _later_sum(run, "rollout/engine_busy_s")
    return _share(wait, step), _share(idle, idle + busy)


def _later_sum(run: RunRecord, name: str) -> float:
    return math.fsum(run.values(name)[1:][-_WINDOW:])


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _next_lag(run: RunRecord) -> str:
    for kind in ("exact", "bounded"):
        lag = run.settings.get(f"rollout.lag.{kind}")
        if isinstance(lag, int):
            return f"`rollout.lag: {{{kind}: {max(1, 2 * lag)}}}`"
    return "a larger rollout.lag"


def _lower_lag(run: RunRecord) -> str:
    for kind in ("exact", "bounded"):
        lag = run.settings.get(f"rollout.lag.{kind}")
        if isinstance(lag, int) and lag > 1:
            return f"; `rollout.lag: {{{kind}: {lag // 2}}}` would be fresher, and may be as fast"
    return ""


def _truncated(run: RunRecord) -> str | None:
    shares = run.values("response/truncated_share")
    if len(shares) < _TREND_STEPS:
        return None
    quarter = len(shares) // 4
    before, now = statistics.fmean(shares[:quarter]), statistics.fmean(shares[-quarter:])
    if now - before <= TRUNCATED_RISE:
        return None
    return (
        f"Truncated responses rose from {before:.0%} to {now:.0%}: raise "
        "rollout.max_response_tokens, or the policy learns from answers that were cut off."
    )


def _refused(run: RunRecord) -> str | None:
    counts = {
        name.removeprefix("rollout/refused/"): sum(run.values(name))
        for name in run.series
        if name.startswith("rollout/refused/")
    }
    if not counts:
        return None
    reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in sorted(counts.items()))
    return f"Samples were refused and sampled again ({reasons}); engine.log says more."


def by_idleness(run: RunRecord) -> Iterator[str]:
    """Learner's and engines' idle shares for a status line."""
    for who, share in zip(("learner", "engines"), idle_shares(run), strict=True):
        if share is not None:
            yield f"{who} idle {share:.0%}"
