"""What two ranks run for test_watchdog.py: one of them hangs."""

from __future__ import annotations

import sys
import threading
import time

import torch
import torch.distributed as dist

from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.phases import Phases
from megatron_gmc.signals import StopRequest
from megatron_gmc.watchdog import Watchdog


def steps(timeout_s: str, hanging: str, waiting: str) -> None:
    """Go through steps; rank `hanging` sleeps in learn of step 2.

    With `waiting`, rank 0 first waits for samples for longer than the timeout. A `hanging` of -1
    is nobody: then the ranks end, and tell each other's stop request first.
    """
    mesh = Mesh.create(1, 1)
    phases, stop = Phases(0), StopRequest()
    with Watchdog(mesh, phases, stop, float(timeout_s)).watching():
        for step in range(4):
            phases.begin_step(step)
            with phases.during("wait"):
                if mesh.rank == 0 and waiting == "waiting" and step == 1:
                    time.sleep(2 * float(timeout_s))
            with phases.during("receive"):
                dist.broadcast(torch.zeros(1), src=0)
            with phases.during("learn"):
                if step == 2 and mesh.rank == int(hanging):
                    threading.Event().wait()
                dist.all_reduce(torch.zeros(1))
        if mesh.rank == 1:
            stop.ask("SIGTERM to rank 1")
        while mesh.rank == 0 and not stop.asked:
            time.sleep(0.01)
    print(stop.reason)
    mesh.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
