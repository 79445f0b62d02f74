"""The command line: one command, one subcommand for each job.

Heavy imports stand inside the subcommands, so that `--help` and a faulty config answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_gmc.errors import UserError
from megatron_gmc.reading_cli import add_reading_commands

# Numerics and speed of this program depend on these, and libraries read them when they load.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_ORDERS = ("largest-weights", "most-capped", "oldest")
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
    convert.set_defaults(run=_convert)

    _add_slurm(commands)

    serve = commands.add_parser(
        "serve", help="serve a run's policy with SGLang on this machine, for a learner elsewhere"
    )
    serve.add_argument("config", type=Path, metavar="CONFIG.yaml")
    serve.add_argument("--host", help="address to listen at; default: this machine's name")
    serve.add_argument("--port", type=int, help="default: a free one")
    serve.add_argument("--log", type=Path, required=True, help="file for the server's output")
    serve.add_argument("--address-file", type=Path, help="gets http://host:port once it serves")
    serve.set_defaults(run=_serve)

    doctor = commands.add_parser(
        "doctor", help="check a machine, or every rank of an allocation, before a run"
    )
    doctor.add_argument("config", type=Path, nargs="?", metavar="CONFIG.yaml")
    doctor.set_defaults(run=_doctor)

    theory = commands.add_parser(
        "theory", help="what a cap costs at a measured sd of the log-ratios, and what to change"
    )
    theory.add_argument("run_folder", type=Path, nargs="?", metavar="RUN", help="folder of a run")
    theory.add_argument("--sd", type=float, help="sd of the log-ratios ℓ; default: the run's")
    theory.add_argument("--group-size", type=int, help="G; default: the run's, or 8")
    theory.add_argument("--epsilon", type=float, help="ε of the cap 1 + ε; the run's, or 0.2")
    theory.set_defaults(run=_theory)

    simulate = commands.add_parser(
        "simulate",
        help="steps per hour, idle time and lag of a cluster, from its numbers alone",
        epilog="Any field of the cluster can be given or overridden: --engines 8 --lags '[0, 1]'",
    )
    simulate.add_argument("--cluster", type=Path, metavar="FILE.yaml", help="fields as YAML")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the table here")
    simulate.set_defaults(run=_simulate)
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
    add_reading_commands(commands)
    return parser


def _add_slurm(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    slurm = commands.add_parser(
        "slurm",
        help="render the SLURM batch script of a training run",
        epilog="Any field of the config can be overridden: --train.output_dir /scratch/run",
    )
    slurm.add_argument("config", type=Path, metavar="CONFIG.yaml")
    slurm.add_argument("--nodes", type=int, required=True, help="nodes of the learner's ranks")
    slurm.add_argument("--engine-nodes", type=int, help="further nodes, for SGLang servers")
    slurm.add_argument("--servers-per-node", type=int, help="SGLang servers on an engine node")
    slurm.add_argument("--ranks-per-node", type=int, help="usually the GPUs of a node; default 1")
    slurm.add_argument("--gpus-per-node", type=int, help="GPUs to ask for on each node")
    slurm.add_argument("--cpus-per-rank", type=int, help="CPU cores to ask for, for each rank")
    slurm.add_argument("--time", help="time limit, as in 24:00:00")
    slurm.add_argument("--partition")
    slurm.add_argument("--account")
    slurm.add_argument("--qos")
    slurm.add_argument("--name", help="name of the job and of its log folder")
    slurm.add_argument("--warn-s", type=int, help="seconds before the limit to save at")
    slurm.add_argument("--interface", help="network interface of NCCL and gloo")
    slurm.add_argument("--container", help="image that the ranks run in")
    slurm.add_argument("--container-runtime", choices=["pyxis", "apptainer"])
    slurm.add_argument("--mount", action="append", dest="mounts", help="source:target; repeatable")
    slurm.add_argument("--python", help="interpreter on the nodes; default: this one")
    slurm.add_argument("--output", type=Path, help="file to write; default: standard output")
    slurm.set_defaults(run=_slurm)


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
    )


def _theory(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.theory_command import theory

    return theory(
        options.run_folder,
        sd=options.sd,
        group_size=options.group_size,
        epsilon=options.epsilon,
    )


def _simulate(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.simulate_command import simulate

    return simulate(options.cluster, rest, target=options.json)


def _inspect(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.inspect_command import inspect

    return inspect(
        options.record, orders=options.orders or _ORDERS, step=options.step, count=options.groups
    )


def _slurm(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.launch.command import slurm

    given = vars(options)
    fields = {k: v for k, v in given.items() if k not in ("command", "config", "output", "run")}
    return slurm(options.config, rest, fields, options.output)


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.launch.doctor import doctor

    return doctor(options.config, rest)


def _serve(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.serve_command import serve

    return serve(
        options.config,
        rest,
        host=options.host,
        port=options.port,
        log=options.log,
        address_file=options.address_file,
    )
