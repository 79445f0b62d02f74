"""Vega-Lite specifications without data. Names that begin with @ are filled in by the page.

`key` is what colour stands for: the run, or its method where there are many runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Spec = dict[str, object]


def mass(many: bool) -> Spec:
    """Rows {run, key, x, p10, p50, p90, max, cap}, all but x in powers of ten."""
    x = _x()
    colour = _colour("key" if many else None)
    band = {"field": "p10", "type": "quantitative", "axis": _powers(), "title": "group mass M"}
    line = {**band, "field": "p50"}
    return {
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


def lag_course() -> Spec:
    """Rows {x2 … x, low … high, lag, share}: a rectangle for each step and lag."""
    return {
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


def lag_histogram() -> Spec:
    """Rows {lag, share}."""
    return {
        "mark": {"type": "bar"},
        "encoding": {
            "x": {"field": "lag", "type": "ordinal", "title": "lag (versions)",
                  "axis": {"labelAngle": 0, "labelOverlap": True}},
            "y": {"field": "share", "type": "quantitative", "title": "share of trajectories"},
            "color": {"value": "@first"},
            "tooltip": _tips([("lag", "lag"), ("share", "share")]),
        },
    }  # fmt: skip


def seconds() -> Spec:
    """Rows {x … x2, low … high, series}: bars that stand on each other."""
    return {
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


def comparison(title: str) -> Spec:
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


def lines(title: str, *, many: bool, several: bool, scale: Spec | None, sparse: bool) -> Spec:
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
