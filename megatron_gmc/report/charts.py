"""The charts of a report: which metrics each draws, and its Vega-Lite specification without data.

The page's script fills in rows. A chart of kind `lines` gets rows {run, key, series, x, value}, one
of kind `mass` {run, key, x, p10, p50, p90, max, cap} (powers of ten), the others what their spec
names. `key` is what colour stands for: the run, or its method where there are many runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Spec = dict[str, object]
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
    sparse: bool = field(default=False)

    def payload(self) -> dict[str, object]:
        return asdict(self)


def available(names: Iterable[str], *, many: bool) -> list[Chart]:
    """The charts that have a metric among `names`; `many`: more than one run is reported."""
    present = set(names)
    charts = [*_line_charts(many), _mass_chart(many), *_lag_charts(present), *_time_charts(present)]
    charts.sort(key=lambda chart: _SECTIONS.index(chart.section))
    kept = []
    for chart in charts:
        fields = {metric: label for metric, label in chart.fields.items() if metric in present}
        if fields:
            kept.append(Chart(**{**asdict(chart), "fields": fields}))
    return kept + (_comparisons() if many else [])


def _line_charts(many: bool) -> list[Chart]:
    def lines(
        id: str,
        section: str,
        title: str,
        help: str,
        fields: Mapping[str, str],
        scale: Spec | None = None,
        sparse: bool = False,
    ) -> Chart:
        spec = _lines(title, many=many, several=len(fields) > 1, scale=scale, sparse=sparse)
        return Chart(id, section, title, help, "lines", fields, spec, sparse=sparse)

    share: Spec = {"domain": [0, 1]}
    widening: Spec = {"type": "symlog", "constant": 0.1}
    return [
        lines(
            "accuracy",
            "Learning",
            "Held-out accuracy",
            "Mean reward on prompts that are never trained on. First and last point use all of "
            "them, the others as many as evaluation.prompts says.",
            {"evaluation/accuracy": "held-out accuracy"},
            share,
            sparse=True,
        ),
        lines(
            "reward",
            "Learning",
            "Training reward",
            "Mean reward of the batch that each step consumed.",
            {"reward/mean": "reward"},
        ),
        lines(
            "kept",
            "Weights",
            "Retained mass and effective share of samples",
            "Retained mass: mean weight, the share of the expected gradient weight that survives. "
            "ESS/G: the share of a group's samples that carry its weight; 1/G means one of them.",
            {"ratio/retained_mass": "retained mass", "ratio/ess": "ESS/G"},
        ),
        lines(
            "spread",
            "Weights",
            "Spread of log-ratios, sd(ℓ)",
            "Over all trajectories of a batch, and over those without lag alone, where it measures "
            "how far engine and learner disagree.",
            {"ratio/log_ratio_sd": "sd(ℓ)", "ratio/log_ratio_sd_lag0": "sd(ℓ) at lag 0"},
            widening,
        ),
        lines(
            "capped",
            "Weights",
            "Groups over the cap, and the largest member's share",
            "Share of groups whose mass exceeds the cap; mean share of a group's mass that its "
            "largest member holds.",
            {"ratio/capped_share": "capped groups", "ratio/largest_share": "largest member"},
            share,
        ),
        lines(
            "grad_norm",
            "Optimizer",
            "Gradient norm",
            "Global norm before any clipping.",
            {"grad_norm": "gradient norm"},
            widening,
        ),
        lines(
            "lengths",
            "Responses",
            "Response length",
            "Mean tokens of a response in the batch.",
            {"response/mean_tokens": "tokens"},
        ),
        lines(
            "truncated",
            "Responses",
            "Truncated responses",
            "Share of responses that reached rollout.max_response_tokens.",
            {"response/truncated_share": "truncated share"},
            share,
        ),
        lines(
            "speed",
            "Time",
            "Tokens a second",
            "Learner: tokens of the batch over the step's seconds. Engines: tokens sampled over "
            "the same time.",
            {"throughput/tokens_per_s": "learner", "rollout/tokens_per_s": "engines"},
        ),
    ]


def _mass_chart(many: bool) -> Chart:
    x = _x()
    colour = _colour("key" if many else None)
    band = {"field": "p10", "type": "quantitative", "axis": _powers(), "title": "group mass M"}
    line = {**band, "field": "p50"}
    spec: Spec = {
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.25},
                "encoding": {"x": x, "y": band, "y2": {"field": "p90"}, **colour, **_detail()},
            },
            {
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {"x": x, "y": line, **colour, **_detail()},
            },
            {
                "mark": {"type": "line", "strokeWidth": 1, "strokeDash": [2, 3]},
                "encoding": {"x": x, "y": {**line, "field": "max"}, **colour, **_detail()},
            },
            {
                "name": "cap",
                "transform": [{"filter": "isValid(datum.cap)"}],
                "mark": {"type": "line", "strokeDash": [8, 4], "strokeWidth": 1.5},
                "encoding": {
                    "x": x,
                    "y": {**line, "field": "cap"},
                    "detail": {"field": "run"},
                    "color": {"value": "@ink"},
                },
            },
            _hover(
                x,
                {**line, "field": "p50"},
                colour,
                [("p50Text", "median"), ("bandText", "p10 – p90"), ("maxText", "largest")],
            ),
        ]
    }
    fields = {f"ratio/log_mass_{q}": q for q in ("p10", "p50", "p90", "max")}
    return Chart(
        "mass",
        "Weights",
        "Group mass against the cap",
        "Median (line), 10th to 90th percentile (band) and largest (dotted) of the groups' masses; "
        "dashed: the cap c = 1 + ε. The scale is logarithmic.",
        "mass",
        fields,
        spec,
    )


def _lag_charts(present: set[str]) -> list[Chart]:
    shares = {name: name.removeprefix("lag/share_") for name in sorted(present, key=_natural)
              if name.startswith("lag/share_")}  # fmt: skip
    course: Spec = {
        "mark": {"type": "rect"},
        "encoding": {
            "x": {**_x(), "scale": {"nice": False, "zero": False}},
            "x2": {"field": "x2"},
            "y": {"field": "low", "type": "quantitative", "title": "lag (versions)"},
            "y2": {"field": "high"},
            "color": {
                "field": "share",
                "type": "quantitative",
                "title": "share of trajectories",
                "scale": {"scheme": "viridis", "reverse": "@light", "domain": [0, 1]},
            },
            "tooltip": _tips([("x", "@x"), ("lag", "lag"), ("share", "share")]),
        },
    }
    histogram: Spec = {
        "mark": {"type": "bar"},
        "encoding": {
            "x": {"field": "lag", "type": "ordinal", "title": "lag (versions)",
                  "axis": {"labelAngle": 0, "labelOverlap": True}},
            "y": {"field": "share", "type": "quantitative", "title": "share of trajectories"},
            "color": {"value": "@first"},
            "tooltip": _tips([("lag", "lag"), ("share", "share")]),
        },
    }  # fmt: skip
    return [
        Chart("lag_course", "Lag", "Lag over the run",
              "Share of each batch's trajectories at each lag (learner version − version of the "
              "oldest token).", "lag_course", shares, course, one_run=True),
        Chart("lag_histogram", "Lag", "Lag histogram",
              "The same, averaged over the steps shown.", "lag_histogram", shares, histogram,
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
    spec: Spec = {
        "mark": {"type": "bar"},
        "encoding": {
            "x": _x(),
            "x2": {"field": "x2"},
            "y": {"field": "low", "type": "quantitative", "title": "seconds a step"},
            "y2": {"field": "high"},
            "color": {
                "field": "series",
                "type": "nominal",
                "title": None,
                "scale": {"range": "@series"},
                "sort": None,
            },
            "tooltip": _tips(
                [("x", "@x"), ("series", "phase"), ("seconds", "seconds"), ("part", "share")]
            ),
        },
    }
    return [
        Chart("seconds", "Time", "Where the learner's time went",
              "Seconds a step by phase, averaged over neighbouring steps in long runs; the rest "
              "is `other`.", "seconds", {**known, **others, "time/step_s": "other"}, spec,
              one_run=True),
        Chart("engine_seconds", "Time", "Where the engines' time went",
              "Seconds a step, summed over engines; sampling means that at least one call is "
              "open.", "seconds", _ENGINE, spec, one_run=True),
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
              _comparison(title))
        for name, (title, help) in COMPARED.items()
    ]  # fmt: skip


def _comparison(title: str) -> Spec:
    """One point for each method and lag, with a bar where there is a standard error."""
    value = {"field": "mean", "type": "quantitative", "title": title.lower()}
    shared = {
        "x": {
            "field": "lag",
            "type": "ordinal",
            "title": "lag",
            "sort": "@lags",
            "axis": {"labelAngle": 0},
        },
        "xOffset": {"field": "method", "sort": "@methods", "scale": {"domain": "@methods"}},
        "color": {
            "field": "method",
            "type": "nominal",
            "title": None,
            "scale": {"domain": "@methods", "range": "@series"},
        },
    }
    tips = [("method", "method"), ("lag", "lag"), ("meanText", "mean"), ("runs", "runs")]
    return {
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {**shared, "y": {**value, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {
                    **shared,
                    "y": value,
                    "shape": {
                        "field": "method",
                        "title": None,
                        "scale": {"domain": "@methods"},
                    },
                    "tooltip": _tips(tips),
                },
            },
        ]
    }


def _lines(title: str, *, many: bool, several: bool, scale: Spec | None, sparse: bool) -> Spec:
    y: Spec = {"field": "value", "type": "quantitative", "title": title}
    if several:
        y["title"] = None
    if scale:
        y["scale"] = scale
    encoding: Spec = {
        "x": _x(),
        "y": y,
        **_colour("key" if many else "series" if several else None),
    }
    dashed = "series" if several else "key" if many else None
    if dashed:
        # Beside colour, so that no line is told apart by colour alone.
        encoding["strokeDash"] = {
            "field": dashed,
            "type": "nominal",
            "title": None,
            "sort": None,
            "legend": {} if several else None,
            "scale": {"range": "@dashes", **({} if several else {"domain": "@keys"})},
        }
    mark: Spec = {"type": "line", "strokeWidth": 2}
    if sparse:
        mark["point"] = {"size": 25}
    tips = [("series", "metric"), ("valueText", "value")]
    return {
        "layer": [
            {"mark": mark, "encoding": {**encoding, **_detail()}},
            _hover(_x(), y, _colour("key" if many else None), tips),
        ]
    }


def _hover(x: Spec, y: Spec, colour: Spec, tips: Sequence[tuple[str, str]]) -> Spec:
    """A point that shows where the pointer is nearest, with its values."""
    return {
        "params": [
            {
                "name": "near",
                "select": {
                    "type": "point",
                    "on": "pointerover",
                    "nearest": True,
                    "clear": "pointerout",
                },
            }
        ],
        "mark": {"type": "point", "filled": True, "size": 70, "aria": False},
        "encoding": {
            "x": x,
            "y": y,
            **colour,
            "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
            "tooltip": _tips([("run", "run"), ("x", "@x"), *tips]),
        },
    }


def _x() -> Spec:
    return {"field": "x", "type": "quantitative", "title": "@x"}


def _detail() -> Spec:
    return {"detail": [{"field": "run"}, {"field": "series"}]}


def _colour(field: str | None) -> Spec:
    """By run or method (told by the page's own list), by series (told beside the chart), or one."""
    if field is None:
        return {"color": {"value": "@first"}}
    if field == "key":
        scale: Spec = {"domain": "@keys", "range": "@colours"}
        return {"color": {"field": "key", "type": "nominal", "scale": scale, "legend": None}}
    scale = {"range": "@series"}
    return {
        "color": {"field": field, "type": "nominal", "title": None, "scale": scale, "sort": None}
    }


def _tips(pairs: Iterable[tuple[str, str]]) -> list[Spec]:
    return [{"field": name, "title": title} for name, title in pairs]


def _powers() -> Spec:
    """Labels of an axis whose values are log10 of what is meant."""
    near, far = "format(pow(10, datum.value), '.3~g')", "format(pow(10, datum.value), '.0e')"
    return {"labelExpr": f"abs(datum.value) < 3 ? {near} : {far}"}


def _natural(name: str) -> tuple[int, str]:
    tail = name.rpartition("_")[2]
    return (int(tail) if tail.isdigit() else -1, name)
