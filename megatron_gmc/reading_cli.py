"""The subcommands that look at runs and checkpoints, of the command line in `cli`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_reading_commands(commands: Commands) -> None:
    """Add them to the parser's subcommands; heavy imports stand inside the functions below."""
    watch = commands.add_parser("watch", help="follow a run in the terminal by reading its files")
    watch.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    watch.add_argument("--once", action="store_true", help="show it once and return")
    watch.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="how often to look; default: 2"
    )
    watch.set_defaults(run=_watch)


def _watch(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.watch_command import watch

    return watch(options.folder, once=options.once, every_s=options.every)
