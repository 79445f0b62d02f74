"""The charts of a report: which metrics each draws, and how.

The page's script makes the rows that a chart of each kind draws; `specs` names their columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_gmc.report import specs
from megatron_gmc.report.specs import Spec

_SECTIONS = ("Learning", "Lag", "Weights", "Optimizer", "Responses", "Time")
Kind = Literal["lines", "mass", "lag_course", "lag_histogram", "seconds", "comparison"]


@dataclass(frozen=True)
class Chart:
    """`fields` maps a metric to its name in the chart; `one_run` charts show one run at a time."""

    id: str
    section: str
    title: str
    help: str
    kind: Kind
    fields: Mapping[str, str]
    spec: Spec
    one_run: bool = False

    def payload(self) -> dict[str, object]:
        return asdict(self)


def available(names: Iterable[str], *, many: bool) -> list[Chart]:
    """The charts that have a metric among `names`; `many`: more than one run is reported."""
    present = set(names)
    charts = [
        *(line.chart(many) for line in _LINES),
        _mass_chart(many),
        *_lag_charts(present),
        *_time_charts(present),
    ]
    charts.sort(key=lambda chart: _SECTIONS.index(chart.section))
    kept = []
    for chart in charts:
        fields = {metric: label for metric, label in chart.fields.items() if metric in present}
        if fields:
            kept.append(Chart(**{**asdict(chart), "fields": fields}))
    return kept + (_comparisons() if many else [])


_SHARE: Spec = {"domain": [0, 1]}
_WIDENING: Spec = {"type": "symlog", "constant": 0.1}
"""Linear near 0, where a norm may be exactly that, and logarithmic beyond."""


@dataclass(frozen=True)
class _Line:
    """A chart of lines; `sparse` marks each point, where there are few."""

    id: str
    section: str
    title: str
    help: str
    fields: Mapping[str, str]
    scale: Spec | None = None
    sparse: bool = False

    def chart(self, many: bool) -> Chart:
        several = len(self.fields) > 1
        spec = specs.lines(
            self.title, many=many, several=several, scale=self.scale, sparse=self.sparse
        )
        return Chart(self.id, self.section, self.title, self.help, "lines", self.fields, spec)


_LINES = (
    _Line(
        "accuracy",
        "Learning",
        "Held-out accuracy",
        "Mean reward on prompts that are never trained on. First and last point use all of "
        "them, the others as many as evaluation.prompts says.",
        {"evaluation/accuracy": "held-out accuracy"},
        _SHARE,
        sparse=True,
    ),
    _Line(
        "reward",
        "Learning",
        "Training reward",
        "Mean reward of the batch that each step consumed.",
        {"reward/mean": "reward"},
    ),
    _Line(
        "kept",
        "Weights",
        "Retained mass and effective share of samples",
        "Retained mass: mean weight, the share of the expected gradient weight that survives. "
        "ESS/G: the share of a group's samples that carry its weight; 1/G means one of them.",
        {"ratio/retained_mass": "retained mass", "ratio/ess": "ESS/G"},
    ),
    _Line(
        "spread",
        "Weights",
        "Spread of log-ratios, sd(ℓ)",
        "Over all trajectories of a batch, and over those without lag alone, where it measures "
        "how far engine and learner disagree.",
        {"ratio/log_ratio_sd": "sd(ℓ)", "ratio/log_ratio_sd_lag0": "sd(ℓ) at lag 0"},
        _WIDENING,
    ),
    _Line(
        "capped",
        "Weights",
        "Groups over the cap, and the largest member's share",
        "Share of groups whose mass exceeds the cap; mean share of a group's mass that its "
        "largest member holds.",
        {"ratio/capped_share": "capped groups", "ratio/largest_share": "largest member"},
        _SHARE,
    ),
    _Line(
        "grad_norm",
        "Optimizer",
        "Gradient norm",
        "Global norm before any clipping.",
        {"grad_norm": "gradient norm"},
        _WIDENING,
    ),
    _Line(
        "lengths",
        "Responses",
        "Response length",
        "Mean tokens of a response in the batch.",
        {"response/mean_tokens": "tokens"},
    ),
    _Line(
        "truncated",
        "Responses",
        "Truncated responses",
        "Share of responses that reached rollout.max_response_tokens.",
        {"response/truncated_share": "truncated share"},
        _SHARE,
    ),
    _Line(
        "speed",
        "Time",
        "Tokens a second",
        "Learner: tokens of the batch over the step's seconds. Engines: tokens sampled over "
        "the same time.",
        {"throughput/tokens_per_s": "learner", "rollout/tokens_per_s": "engines"},
    ),
)


def _mass_chart(many: bool) -> Chart:
    return Chart(
        "mass",
        "Weights",
        "Group mass against the cap",
        "Median (line), 10th to 90th percentile (band) and largest (dotted) of the groups' masses; "
        "dashed: the cap c = 1 + ε. The scale is logarithmic.",
        "mass",
        {f"ratio/log_mass_{q}": q for q in ("p10", "p50", "p90", "max")},
        specs.mass(many),
    )


def _lag_charts(present: set[str]) -> list[Chart]:
    shares = {name: name.removeprefix("lag/share_") for name in sorted(present, key=_natural)
              if name.startswith("lag/share_")}  # fmt: skip
    return [
        Chart("lag_course", "Lag", "Lag over the run",
              "Share of each batch's trajectories at each lag (learner version − version of the "
              "oldest token).", "lag_course", shares, specs.lag_course(), one_run=True),
        Chart("lag_histogram", "Lag", "Lag histogram",
              "The same, averaged over the steps shown.", "lag_histogram", shares,
              specs.lag_histogram(),
              one_run=True),
    ]  # fmt: skip


# Phases in the order in which a step goes through them; others follow in the order of their names.
_PHASES = {
    "wait": "waiting for samples",
    "score": "scoring",
    "learn": "forward, backward, optimizer",
    "publish": "publishing weights",
    "checkpoint": "checkpoint",
}
_ENGINE = {
    "rollout/engine_busy_s": "sampling",
    "rollout/switch_s": "loading weights",
    "rollout/engine_idle_s": "idle",
}


def _time_charts(present: set[str]) -> list[Chart]:
    known = {f"time/{phase}_s": label for phase, label in _PHASES.items()}
    others = {
        name: name.removeprefix("time/").removesuffix("_s")
        for name in sorted(present)
        if name.startswith("time/") and name.endswith("_s") and name not in {*known, "time/step_s"}
    }
    return [
        Chart("seconds", "Time", "Where the learner's time went",
              "Seconds a step by phase, averaged over neighbouring steps in long runs; the rest "
              "is `other`.", "seconds", {**known, **others, "time/step_s": "other"},
              specs.seconds(),
              one_run=True),
        Chart("engine_seconds", "Time", "Where the engines' time went",
              "Seconds a step, summed over engines; sampling means that at least one call is "
              "open.", "seconds", _ENGINE, specs.seconds(), one_run=True),
    ]  # fmt: skip


COMPARED = {
    "final": ("Final held-out accuracy", "Mean over seeds with its standard error."),
    "collapsed": ("Share of runs that collapsed", "Ended more than 0.05 below their start."),
    "retained": ("Retained mass by lag", "Mean over steps and seeds, with its standard error."),
    "spread": ("sd(ℓ) by lag", "Mean over steps and seeds, with its standard error."),
}


def _comparisons() -> list[Chart]:
    return [
        Chart(f"by_{name}", "Comparison", title, help, "comparison", {name: title},
              specs.comparison(title))
        for name, (title, help) in COMPARED.items()
    ]  # fmt: skip


def _natural(name: str) -> tuple[int, str]:
    tail = name.rpartition("_")[2]
    return (int(tail) if tail.isdigit() else -1, name)
