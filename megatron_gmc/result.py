"""What a finished run says: result.json, a table, a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_gmc.config import Config
from megatron_gmc.metrics import read_metrics
from megatron_gmc.run_folder import RunFolder, write_atomically

_PHASES = ("wait", "learn", "publish", "checkpoint")


def finish_run(folder: RunFolder, config: Config, *, seconds: float) -> None:
    """Summarise the run's metrics into result.json, whose presence says that it finished."""
    series = read_metrics(folder.metrics)

    def values(name: str) -> list[float]:
        return [value for _, value in series.get(name, [])]

    def mean(name: str) -> float | None:
        """None for what no step could measure, as where no group of the run had a signal."""
        return statistics.fmean(values(name)) if values(name) else None

    accuracy = values("evaluation/accuracy")
    result = {
        "estimator": config.estimator.name,
        "method": describe_method(config),
        "steps": config.train.steps,
        "accuracy_before": accuracy[0] if accuracy else None,
        "accuracy_after": accuracy[-1] if accuracy else None,
        "lag_min": min(values("lag/min")),
        "lag_max": max(values("lag/max")),
        "retained_mass": mean("ratio/retained_mass"),
        "mass_mean": mean("ratio/mass_mean"),
        "log_ratio_sd": mean("ratio/log_ratio_sd"),
        "log_ratio_sd_lag0": next(iter(values("ratio/log_ratio_sd_lag0")), None),
        "grad_norm_max": max(values("grad_norm")),
        "seconds": {
            **{phase: sum(values(f"time/{phase}_s")) for phase in _PHASES},
            "steps": sum(values("time/step_s")),
            "command": seconds,
        },
        "seconds_per_step_median": statistics.median(values("time/step_s")),
    }
    plot_runs([folder.path], folder.path / "plot.png")
    write_atomically(folder.result, json.dumps(result, indent=2) + "\n")


def describe_method(config: Config) -> str:
    """Everything that a number of this run depends on, in one line."""
    epsilon = config.estimator.epsilon
    return ", ".join(
        [
            config.estimator.name + (f" ε={epsilon:g}" if epsilon is not None else ""),
            str(config.scheduler().lag),
            f"G={config.rollout.group_size}",
            f"P={config.train.prompts_per_step}",
            *([f"S={size}"] if (size := config.optim.steps_per_batch) > 1 else []),
            config.objective.aggregation,
            config.objective.advantage,
            f"{config.optim.name} {config.optim.lr:g}",
            f"clip {config.optim.clip_grad}" if config.optim.clip_grad else "no gradient clip",
            f"seed {config.train.seed}",
        ]
    )


def print_result(folder: RunFolder) -> None:
    """Print the table of one finished run, and where its files are."""
    print_results([folder.path])


def print_results(runs: Sequence[Path]) -> None:
    """Print a table with one column a finished run, and where their files are."""
    results = [json.loads(RunFolder(run).result.read_text()) for run in runs]
    table = Table(show_header=True)
    table.add_column("")
    for result in results:
        table.add_column(result["estimator"], justify="right")
    rows = (
        ("held-out accuracy before", "accuracy_before", "{:.3f}"),
        ("held-out accuracy after", "accuracy_after", "{:.3f}"),
        ("lag seen, min", "lag_min", "{:.0f}"),
        ("lag seen, max", "lag_max", "{:.0f}"),
        ("retained mass", "retained_mass", "{:.3f}"),
        ("mean group mass M", "mass_mean", "{:.3f}"),
        ("sd(ℓ)", "log_ratio_sd", "{:.3f}"),
        ("sd(ℓ) at lag 0", "log_ratio_sd_lag0", "{:.1e}"),
        ("largest gradient norm", "grad_norm_max", "{:.1f}"),
        ("seconds a step, median", "seconds_per_step_median", "{:.2f}"),
    )
    for label, key, form in rows:
        cells = ["–" if r[key] is None else form.format(r[key]) for r in results]
        table.add_row(label, *cells)
    for phase in (*_PHASES, "steps", "command"):
        label = {"steps": "seconds, all steps", "command": "seconds, whole command"}.get(
            phase, f"  seconds, {phase}"
        )
        table.add_row(label, *(f"{r['seconds'][phase]:.1f}" for r in results))
    console = Console()
    console.print(table)
    for run, result in zip(runs, results, strict=True):
        console.print(f"{result['method']}", highlight=False)
        console.print(
            f"  {run}: plot.png, metrics.jsonl, tensorboard/, checkpoints/, huggingface/",
            highlight=False,
        )


def plot_runs(runs: Sequence[Path], target: Path) -> None:
    """Draw held-out accuracy, retained mass and sd(ℓ) of some runs against steps, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("evaluation/accuracy", "held-out accuracy"),
        ("ratio/retained_mass", "retained mass"),
        ("ratio/log_ratio_sd", "sd of log-ratios"),
        ("grad_norm", "gradient norm"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.2))
    for axis, (name, label) in zip(axes, panels, strict=True):
        for run in runs:
            points = read_metrics(RunFolder(run).metrics).get(name, [])
            axis.plot([s for s, _ in points], [v for _, v in points], label=run.name)
        axis.set_xlabel("optimizer steps")
        axis.set_title(label)
    axes[0].set_ylim(0, 1)
    # A norm can be exactly 0, in a batch whose groups are all right or all wrong.
    axes[-1].set_yscale("symlog", linthresh=0.1)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
