"""The command line: one command, one subcommand for each job.

Heavy imports stand inside the subcommands, so that `--help` and a faulty config answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_gmc.cluster_cli import add_cluster_commands
from megatron_gmc.errors import UserError
from megatron_gmc.reading_cli import add_reading_commands

# Numerics and speed of this program depend on these, and libraries read them when they load.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Their configs' fields can be overridden on the command line.
_OVERRIDABLE = ("train", "sft", "simulate", "evaluate", "sweep", "slurm", "serve", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code.

    0, 1 (the run failed), 2 (faulty input) or 75 (a signal stopped the run: start it again).
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in _OVERRIDABLE:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from megatron_gmc.failures import EXIT_FAILED, EXIT_USER, failure_message

    try:
        return int(options.run(options, rest))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        message = failure_message(error)
        if message is None:
            raise
        if os.environ.get("RANK", "0") == "0" or not isinstance(error, UserError):
            print(f"error: {message}", file=sys.stderr, flush=True)
        return EXIT_USER if isinstance(error, UserError) else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gmc",
        description="Reinforcement learning of language models at large rollout lag.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a policy with rollouts at a set lag (alone or under torchrun)",
        epilog="Any field of the config can be overridden: --estimator.epsilon 0.1",
    )
    train.add_argument("config", type=Path, metavar="CONFIG.yaml")
    train.add_argument(
        "--resume", action="store_true", help="continue the run in its folder; it must hold one"
    )
    train.set_defaults(run=_train)

    sft = commands.add_parser(
        "sft",
        help="supervised fine-tuning on demonstrations (alone or under torchrun)",
        epilog="Any field of the config can be overridden: --optim.lr 1e-3",
    )
    sft.add_argument("config", type=Path, metavar="CONFIG.yaml")
    sft.set_defaults(run=_sft)

    convert = commands.add_parser(
        "convert", help="convert a checkpoint between Hugging Face and Megatron"
    )
    convert.add_argument("source", type=Path, help="Hugging Face folder or Megatron checkpoint")
    convert.add_argument("target", type=Path, help="folder to write; must not exist")
    convert.add_argument(
        "--like",
        type=Path,
        help="Hugging Face folder whose config and tokenizer a Megatron checkpoint belongs to",
    )
    convert.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: the weights' own"
    )
    convert.add_argument(
        "--dry-run", action="store_true", help="check everything and write nothing"
    )
    convert.add_argument(
        "--verify", action="store_true", help="then compare logits with those of transformers"
    )
    convert.set_defaults(run=_convert)

    add_cluster_commands(commands)
    add_reading_commands(commands)
    return parser


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.config import Config
    from megatron_gmc.settings import load_config

    config = load_config(Config, options.config, rest)
    from megatron_gmc.train import train

    return train(config, resume=options.resume)


def _sft(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.config import SftConfig
    from megatron_gmc.settings import load_config

    config = load_config(SftConfig, options.config, rest)
    from megatron_gmc.sft import fine_tune

    return fine_tune(config)


def _convert(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.convert_command import convert

    return convert(
        options.source,
        options.target,
        like=options.like,
        dtype=options.dtype,
        dry_run=options.dry_run,
        verify=options.verify,
    )
