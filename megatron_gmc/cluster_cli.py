"""The subcommands about machines and clusters, of the command line in `cli`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_cluster_commands(commands: Commands) -> None:
    """Add them to the parser's subcommands; heavy imports stand inside the functions below."""
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

    simulate = commands.add_parser(
        "simulate",
        help="steps per hour, idle time and lag of a cluster, from its numbers alone",
        epilog="Any field of the cluster can be given or overridden: --engines 8 --lags '[0, 1]'",
    )
    simulate.add_argument("--cluster", type=Path, metavar="FILE.yaml", help="fields as YAML")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the table here")
    simulate.set_defaults(run=_simulate)


def _add_slurm(commands: Commands) -> None:
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


def _slurm(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.launch.command import slurm

    given = vars(options)
    fields = {k: v for k, v in given.items() if k not in ("command", "config", "output", "run")}
    return slurm(options.config, rest, fields, options.output)


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


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.launch.doctor import doctor

    return doctor(options.config, rest)


def _simulate(options: argparse.Namespace, rest: list[str]) -> int:
    from megatron_gmc.simulate_command import simulate

    return simulate(options.cluster, rest, target=options.json)
