"""How long a checkpoint keeps the learner from training, against copying its tensors.

`python benchmarks/checkpoint_stall.py` prints a table; `--json FILE` writes it, `--check` exits
with 1 and names the bound where it was missed. One rank, one thread, AdamW. In turns, in one
process: the learner's tensors (weights and moments) are copied into memory that is there already; a
checkpoint is begun, which is all that the learner waits for; and it is waited for until it is
committed. A ratio is the median over the turns. The first checkpoint of a run also makes the
memory, and is shown apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_gmc.checkpoints import Checkpoints
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import initialise
from megatron_gmc.optim_config import OptimConfig
from megatron_gmc.run_folder import RunFolder

BOUND = 1.5
"""Most that the learner may wait, in units of copying its tensors."""


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn."""

    copy: float
    stall: float
    commit: float
    """From the beginning of the checkpoint to its commit."""


def learner_of(layers: int, hidden: int) -> Learner:
    """A policy with random weights that has taken one step, so that its moments are there."""
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        ffn=3 * hidden,
        heads=8,
        query_groups=4,
        head_size=hidden // 8,
        vocab_size=1024,
        max_positions=128,
        rope_theta=10_000.0,
        norm_epsilon=1e-6,
        initializer_range=0.02,
        tied=True,
    )
    learner = Learner(shape, Mesh.create(1, 1), OptimConfig(lr=1e-4), steps=100)
    initialise(learner.chunks, shape, learner.mesh, seed=0)
    for parameter in learner.chunks[0].parameters():
        parameter.main_grad.fill_(1e-3)
    learner.apply()
    return learner


def tensors_of(learner: Learner) -> Iterator[Tensor]:
    """Weights and moments, found without what checkpoints are made of."""
    yield from learner.chunks[0].parameters()
    for state in learner.optimizer.optimizer.state.values():
        yield from (value for value in state.values() if value.numel() > 1)


def measure(learner: Learner, folder: Path, turns: int) -> list[Turn]:
    """The turns, the first one included."""
    tensors = [tensor.detach() for tensor in tensors_of(learner)]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    measured = []
    with Checkpoints(RunFolder(folder), learner, keep=1) as checkpoints:
        for _ in range(turns + 1):
            began = time.perf_counter()
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            copied = time.perf_counter()
            checkpoints.begin(None)
            stalled = time.perf_counter()
            checkpoints.finish()
            committed = time.perf_counter()
            measured.append(Turn(copied - began, stalled - copied, committed - copied))
            learner.version += 1
    return measured


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    learner = learner_of(options.layers, options.hidden)
    size = sum(tensor.nbytes for tensor in tensors_of(learner)) / 2**20
    with tempfile.TemporaryDirectory() as name:
        first, *turns = measure(learner, Path(name), options.turns)
    ratios = {
        "stall": statistics.median(turn.stall / turn.copy for turn in turns),
        "commit": statistics.median(turn.commit / turn.copy for turn in turns),
        "first stall": first.stall / statistics.median(turn.copy for turn in turns),
    }
    bounds = {"stall": BOUND}
    copy = statistics.median(turn.copy for turn in turns)
    print(
        f"{size:.0f} MiB of tensors, {options.turns} checkpoints; copying them: {1e3 * copy:.0f} ms"
    )
    print(f"{'':12} {'× copy':>8} {'bound':>6}")
    for name, ratio in ratios.items():
        print(f"{name:12} {ratio:8.2f} {bounds.get(name, ''):>6}")
    if options.json is not None:
        table = {"mebibytes": size, "ratios": ratios, "turns": [asdict(turn) for turn in turns]}
        options.json.write_text(json.dumps(table, indent=2) + "\n")
    missed = [name for name, bound in bounds.items() if ratios[name] > bound]
    for name in missed:
        print(f"missed: {name} takes {ratios[name]:.2f} × copying, bound {bounds[name]}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
