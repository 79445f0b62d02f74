"""A SLURM batch script for one run, rendered from the run's own config.

srun starts the ranks itself, one task each, so that SLURM's warning reaches every rank and a
rank's exit code comes back to the script: under torchrun the agent would end its ranks 30 seconds
after a signal and hide their code. A run that was warned writes a checkpoint and exits with
`EXIT_REQUEUE`; the script then puts the job back into the queue, where it resumes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

from megatron_gmc.config import Config
from megatron_gmc.failures import EXIT_REQUEUE

# SLURM reads #SBATCH lines itself: a value that could end the line or start an option is refused.
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_/][A-Za-z0-9_.,:@+=/-]*$")]
Duration = Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$")]
Container = Literal["pyxis", "apptainer"]


class SlurmJob(BaseModel):
    """What the cluster needs to know beyond the run's config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: PositiveInt
    """Nodes that hold the learner's ranks."""
    engine_nodes: Annotated[int, Field(ge=0)] = 0
    """Further nodes, that hold SGLang servers and nothing else."""
    servers_per_node: PositiveInt = 1
    """SGLang servers on each engine node, which share its GPUs."""
    ranks_per_node: PositiveInt = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs that a node is asked for; 0 asks for none."""
    cpus_per_rank: PositiveInt | None = None
    time: Duration | None = None
    """Time limit as SLURM writes it: minutes, hours:minutes:seconds or days-hours:minutes."""
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    name: Word = "megatron-gmc"
    warn_s: PositiveInt = 300
    """Seconds before the time limit at which the ranks are told to write a checkpoint."""
    interface: Word | None = None
    """Network interface of NCCL and gloo."""
    container: Word | None = None
    """Image that the ranks run in: a name for pyxis, a file for apptainer."""
    container_runtime: Container = "pyxis"
    mounts: tuple[Word, ...] = ()
    """Folders that the container sees, as source:target."""
    python: str = sys.executable
    """Interpreter on the nodes, or in the container."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def render(
    job: SlurmJob, config: Config, path: Path, overrides: Sequence[str], folder: Path
) -> str:
    """The batch script that trains `config`, which was read from `path` with `overrides`.

    The ranks run in `folder`, to which the config's relative paths belong. Raises ValueError
    where the mesh does not fit the job's ranks.
    """
    _check(job, config)
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    template = environment.from_string(
        files("megatron_gmc.launch").joinpath("train.sbatch.jinja").read_text(encoding="utf-8")
    )
    program = [*_prefix(job), job.python, "-m", "megatron_gmc"]
    config_arguments = [str(path.resolve()), *overrides]
    logs = folder.resolve() / "slurm" / job.name
    on_all_gpus = job.gpus_per_node // job.servers_per_node
    return template.render(
        job=job,
        requeue=EXIT_REQUEUE,
        folder=folder.resolve(),
        logs=logs,
        servers=job.engine_nodes * job.servers_per_node,
        tasks_per_node=max(job.ranks_per_node, job.servers_per_node if job.engine_nodes else 0),
        placement='--nodelist="$learners"' if job.engine_nodes else "",
        engine_gpus=f"--gpus-per-task={on_all_gpus}" if on_all_gpus else "",
        command=shlex.join([*program, "train", *config_arguments, "--train.resume", "auto"]),
        serve=shlex.join([*program, "serve", *config_arguments]),
        container=_container_options(job),
    )


def _check(job: SlurmJob, config: Config) -> None:
    mesh = config.mesh
    product = mesh.tensor * mesh.context * mesh.pipeline
    if job.ranks % product:
        raise ValueError(
            f"nodes {job.nodes} × ranks_per_node {job.ranks_per_node} = {job.ranks} ranks are no "
            f"multiple of mesh.tensor {mesh.tensor} × mesh.context {mesh.context} × mesh.pipeline "
            f"{mesh.pipeline} = {product}"
        )
    if job.engine_nodes and config.rollout.sglang is None:
        raise ValueError(
            f"engine_nodes: {job.engine_nodes}, and rollout.engine is {config.rollout.engine}, "
            "which runs beside rank 0; set engine sglang, or leave engine_nodes out"
        )
    if job.engine_nodes and job.gpus_per_node % job.servers_per_node:
        raise ValueError(
            f"servers_per_node: {job.servers_per_node} does not divide gpus_per_node "
            f"{job.gpus_per_node}"
        )


def _prefix(job: SlurmJob) -> list[str]:
    """What stands before the command where the container is a command of its own."""
    if job.container is None or job.container_runtime != "apptainer":
        return []
    binds = [part for mount in job.mounts for part in ("--bind", mount)]
    gpus = ["--nv"] if job.gpus_per_node else []
    return ["apptainer", "exec", *gpus, *binds, job.container]


def _container_options(job: SlurmJob) -> str:
    """Options of srun where the container is a plugin of SLURM."""
    if job.container is None or job.container_runtime != "pyxis":
        return ""
    options = [f"--container-image={job.container}"]
    if job.mounts:
        options.append(f"--container-mounts={','.join(job.mounts)}")
    return shlex.join(options)
