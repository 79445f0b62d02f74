"""A real SLURM cluster of two nodes on this machine, from Debian's packages; needs root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.distributed import free_port

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_NODES = ("n1", "n2")
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.%n.pid
SlurmctldLogFile={folder}/log/controller.log
SlurmdLogFile={folder}/log/node.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
MpiDefault=none
KillWait=30
MinJobAge=300
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}; `make system` installs them" if absent else None


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, their state in `folder`; yields the environment of SLURM's commands."""
    for name in ("state", "spool", "log"):
        (folder / name).mkdir(parents=True)
    host, conf = socket.gethostname(), folder / "slurm.conf"
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 "
        "RealMemory=2000 State=UNKNOWN"
        for name in _NODES
    )
    conf.write_text(_CONF.format(host=host, controller=free_port(), folder=folder, nodes=nodes))
    _start_munge()
    environment = os.environ | {"SLURM_CONF": str(conf)}
    daemons = [subprocess.Popen(["slurmctld", "-D"], env=environment, stderr=subprocess.DEVNULL)]
    daemons += [
        subprocess.Popen(["slurmd", "-D", "-N", name], env=environment, stderr=subprocess.DEVNULL)
        for name in _NODES
    ]
    try:
        _wait_for_nodes(environment)
        yield environment
    finally:
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=environment)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=20)


def _start_munge() -> None:
    if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
        return
    os.makedirs("/run/munge", exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["munged", "--force"], user="munge", group="munge", check=True)


def _wait_for_nodes(environment: dict[str, str], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    states: list[str] = []
    while time.monotonic() < deadline:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=environment,
            capture_output=True,
            text=True,
        )
        states = answer.stdout.split()
        if states == ["idle"] * len(_NODES):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the nodes are {states} after {timeout_s:g} s")
