"""The subcommands that look at runs and checkpoints, of the command line in `cli`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_reading_commands(commands: Commands) -> None:
    """Add them to the parser's subcommands; heavy imports stand inside the functions below."""
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
