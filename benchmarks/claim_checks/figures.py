"""One figure for each claim, from the series that the checks recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from claim_checks.table import CLAIMS, Run

Series = dict[str, list[float]]


def _curves(x_label: str, y_label: str, *, log_y: bool = True) -> Callable[[Axes, Series], None]:
    def draw(axes: Axes, series: Series) -> None:
        for name, values in series.items():
            if name != "x":
                axes.plot(series["x"], values, marker="o", label=name)
        axes.set_xscale("log")
        axes.set_yscale("log" if log_y else "linear")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(fontsize=8)

    return draw


def _bars(y_label: str, *, log_y: bool = False) -> Callable[[Axes, Series], None]:
    def draw(axes: Axes, series: Series) -> None:
        named = {name: values[0] for name, values in series.items() if name != "x"}
        axes.bar(list(named), list(named.values()))
        axes.set_yscale("log" if log_y else "linear")
        axes.set_ylabel(y_label)
        axes.tick_params(axis="x", rotation=30)

    return draw


FIGURES: dict[int, list[tuple[str, Callable[[Axes, Series], None]]]] = {
    1: [("claim1", _bars("terms of Theorem R, bandit, lag 8", log_y=True))],
    2: [("claim2", _curves("lag", "v², the delay term"))],
    3: [("claim3", _bars("share of groups where the bound is worse than GMC's"))],
    4: [("claim4", _curves("ε", "worst-case squared deficit"))],
    5: [
        ("claim5", _curves("group size G", "tuned delay term")),
        ("claim5b", _curves("‖Δθ‖", "χ²")),
    ],
    6: [
        ("claim6", _curves("group size G", "deficit, log-normal ratios")),
        ("claim6b", _curves("group size G", "bias norm, bandit", log_y=False)),
    ],
    7: [
        ("claim7", _curves("step size η", "last-50 J", log_y=False)),
        ("claim7b", _curves("step size η", "retained weight, Σ|wA| / Σ|A|", log_y=True)),
    ],
}


def write_figures(run: Run, folder: Path) -> list[Path]:
    """Draw the claims whose checks ran; returns the files."""
    written = []
    for claim, panels in FIGURES.items():
        drawn = [(run.series[name], draw) for name, draw in panels if name in run.series]
        if not drawn:
            continue
        figure, axes = pyplot.subplots(
            1, len(drawn), figsize=(6 * len(drawn), 4), squeeze=False, layout="constrained"
        )
        for (series, draw), one in zip(drawn, axes[0], strict=True):
            draw(one, _positive(series))
        title = f"{claim}. {CLAIMS[claim]}"
        if claim == 7:
            title = "Claim 7 (Qwen3) was not run. Shown: a small environment, lag 32, SGD, 16 seeds"
        figure.suptitle(title, fontsize=9)
        written.append(folder / f"claim{claim}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def _positive(series: Series) -> Series:
    """A curve that is 0 up to rounding has no place on a logarithmic axis."""
    return {n: v for n, v in series.items() if n == "x" or not v or max(v) > 1e-12}
