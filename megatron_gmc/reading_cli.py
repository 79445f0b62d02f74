"""The subcommands that look at runs and checkpoints, of the command line in `cli`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_ORDERS = ("largest-weights", "most-capped", "oldest")


def add_reading_commands(commands: Commands) -> None:
    """Add them to the parser's subcommands; heavy imports stand inside the functions below."""
    theory = commands.add_parser(
        "theory", help="what a cap costs at a measured sd of the log-ratios, and what to change"
    )
    theory.add_argument("run_folder", type=Path, nargs="?", metavar="RUN", help="folder of a run")
    theory.add_argument("--sd", type=float, help="sd of the log-ratios ℓ; default: the run's")
    theory.add_argument("--group-size", type=int, help="G; default: the run's, or 8")
    theory.add_argument("--epsilon", type=float, help="ε of the cap 1 + ε; the run's, or 0.2")
    theory.set_defaults(run=_theory)

    inspect = commands.add_parser(
        "inspect", help="show the recorded groups with the largest weights, most capped, oldest"
    )
    inspect.add_argument("record", type=Path, metavar="RUN_OR_FILE")
    for order in _ORDERS:
        inspect.add_argument(
            f"--{order}", dest="orders", action="append_const", const=order, help="this table alone"
        )
    inspect.add_argument("--step", type=int, help="groups of this step alone")
    inspect.add_argument("--groups", type=int, default=10, help="rows of a table; default: 10")
    inspect.set_defaults(run=_inspect)

    report = commands.add_parser("report", help="one HTML page about runs or a sweep")
    report.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run or sweep folder")
    report.add_argument("--output", type=Path, help="file to write; default: report.html in RUN")
    report.add_argument(
        "--tokens", type=int, help="tokens of recorded trajectories to include; default: 60000"
    )
    report.set_defaults(run=_report)

    evaluate = commands.add_parser(
        "evaluate",
        help="a checkpoint or a running engine on one or more tasks",
        epilog="Any field of the config can be overridden: --sampling.samples 16",
    )
    evaluate.add_argument("config", type=Path, metavar="CONFIG.yaml")
    evaluate.set_defaults(run=_evaluate)

    watch = commands.add_parser("watch", help="follow a run in the terminal by reading its files")
    watch.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    watch.add_argument("--once", action="store_true", help="show it once and return")
    watch.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="how often to look; default: 2"
    )
    watch.set_defaults(run=_watch)

    sweep = commands.add_parser(
        "sweep",
        help="a grid of training runs, on this machine or as a SLURM array",
        epilog="Any field of the sweep's config can be overridden: --output_dir runs/again",
    )
    sweep.add_argument("config", type=Path, metavar="CONFIG.yaml")
    sweep.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    sweep.add_argument("--retry-failed", action="store_true", help="run failed ones again")
    sweep.add_argument("--slurm", action="store_true", help="write an array script, run nothing")
    sweep.set_defaults(run=_sweep)


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.report_command import report

    return report(options.folders, output=options.output, tokens=options.tokens)


def _evaluate(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.evaluate.config import EvaluateConfig
    from megatron_gmc.settings import load_config

    config = load_config(EvaluateConfig, options.config, rest)
    from megatron_gmc.evaluate_command import evaluate

    return evaluate(config)


def _watch(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.watch_command import watch

    return watch(options.folder, once=options.once, every_s=options.every)


def _sweep(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.settings import load_config
    from megatron_gmc.sweep.config import SweepConfig

    config = load_config(SweepConfig, options.config, rest)
    from megatron_gmc.sweep_command import sweep

    return sweep(config, jobs=options.jobs, retry_failed=options.retry_failed, slurm=options.slurm)


def _theory(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.theory_command import theory

    return theory(
        options.run_folder,
        sd=options.sd,
        group_size=options.group_size,
        epsilon=options.epsilon,
    )


def _inspect(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.inspect_command import inspect

    return inspect(
        options.record, orders=options.orders or _ORDERS, step=options.step, count=options.groups
    )
