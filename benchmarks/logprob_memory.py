"""Memory and time of log-probs and entropies from hidden states, against whole logits.

`python benchmarks/logprob_memory.py` prints a table; `--json FILE` writes it, `--check` exits with
1 and names the bounds that were missed. 2,048 tokens of hidden size 1,024 (Qwen3-0.6B's) through a
head of 151,936 columns in float32, forward and backward, one thread on a CPU. The plain way forms
all logits and lets autograd go through their log_softmax.

Memory is the highest the process (or the GPU) held during the pass above what it held before, less
the gradients that the pass leaves, over the size of the logits. Time is the median over turns of
one way's time to the other's in the same turn: on a CPU the process's own time, for a turn is so
long that whatever else the machine does would show. It takes a GPU where there is one, and has not
been run on one. Sizes far below these measure what allocators keep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.learner.log_probs import token_scores
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.output_head import head_weight

MEMORY_BOUND = 0.25
TIME_BOUND = 1.35


@dataclass(frozen=True)
class Row:
    """One way, with or without entropies."""

    way: str
    memory: float
    """Extra peak memory over the size of the logits, the largest over turns."""
    seconds: float
    time: float
    """Seconds over the plain way's, the median over turns."""
    memory_bound: float | None = None
    time_bound: float | None = None

    def missed(self) -> list[str]:
        """What is over its bound, in words."""
        found = []
        if self.memory_bound is not None and self.memory > self.memory_bound:
            found.append(f"{self.way}: memory {self.memory:.3f}, bound {self.memory_bound}")
        if self.time_bound is not None and self.time > self.time_bound:
            found.append(f"{self.way}: time {self.time:.2f}, bound {self.time_bound}")
        return found


class Head:
    """A policy's head, hidden states in front of it, and tokens behind it."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int, mesh: Mesh) -> None:
        self.mesh, self.vocabulary = mesh, vocabulary
        shape = ModelShape(
            layers=1,
            hidden=hidden,
            ffn=hidden,
            heads=hidden // 64,
            query_groups=hidden // 64,
            head_size=64,
            vocab_size=vocabulary,
            max_positions=tokens,
            norm_epsilon=1e-6,
            rope_theta=1e4,
            tied=True,
            initializer_range=0.02,
        )
        [self.chunk] = build_model(shape, mesh)
        self.weight = head_weight(self.chunk)
        generator = torch.Generator(mesh.device).manual_seed(0)
        torch.nn.init.normal_(self.weight, std=0.02, generator=generator)
        self.hidden = torch.randn(1, tokens, hidden, device=mesh.device, generator=generator)
        self.hidden.requires_grad_()
        self.at_K = torch.arange(tokens, device=mesh.device)
        self.target_K = torch.randint(
            vocabulary, (tokens,), device=mesh.device, generator=generator
        )

    def ours(self, entropy: bool) -> Tensor:
        scores = token_scores(
            self.chunk,
            self.hidden,
            self.at_K,
            self.target_K,
            temperature=1.0,
            vocab_size=self.vocabulary,
            mesh=self.mesh,
            entropy=entropy,
        )
        loss = scores.log_prob_K.sum()
        return loss if scores.entropy_K is None else loss + scores.entropy_K.sum()

    def plain(self, entropy: bool) -> Tensor:
        logits = self.hidden[0, self.at_K] @ self.weight[: self.vocabulary].t()
        log_p = logits.log_softmax(-1)
        loss = log_p.gather(-1, self.target_K[:, None]).sum()
        return loss - (log_p.exp() * log_p).sum() if entropy else loss

    def logit_bytes(self) -> int:
        return len(self.at_K) * self.vocabulary * 4

    def run(self, way: Callable[[bool], Tensor], entropy: bool) -> tuple[float, float]:
        """Seconds and extra peak bytes of one forward and backward pass."""
        self.weight.grad = self.hidden.grad = None
        before = _held(self.mesh.device)
        clock = time.perf_counter if self.mesh.device.type == "cuda" else time.process_time
        start = clock()
        way(entropy).backward()
        peak = _peak(self.mesh.device)
        seconds = clock() - start
        gradients = self.weight.nbytes + self.hidden.nbytes
        return seconds, peak - before - gradients


def _held(device: torch.device) -> int:
    """Bytes held now; the peak starts from here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(field: str) -> int:
    """A line of Linux's /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(head: Head, repeats: int) -> list[Row]:
    """Both ways in turns, with entropies and, a third as often and for comparison, without."""
    rows = []
    for entropy, turns in ((True, repeats), (False, max(1, repeats // 3))):
        runs = [(head.run(head.plain, entropy), head.run(head.ours, entropy)) for _ in range(turns)]
        for name, place in (("whole logits", 0), ("in blocks", 1)):
            ours = place == 1 and entropy
            rows.append(
                Row(
                    way=f"{name}, log-prob{' + entropy' if entropy else ''}",
                    memory=max(turn[place][1] for turn in runs) / head.logit_bytes(),
                    seconds=statistics.median(turn[place][0] for turn in runs),
                    time=statistics.median(turn[place][0] / turn[0][0] for turn in runs),
                    memory_bound=MEMORY_BOUND if ours else None,
                    time_bound=TIME_BOUND if ours else None,
                )
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    if min(options.tokens, options.vocabulary, options.repeats) < 1:
        parser.error("--tokens, --vocabulary and --repeats must be at least 1")
    if options.hidden < 64 or options.hidden % 64:
        parser.error("--hidden must be a multiple of 64")
    torch.set_num_threads(1)
    mesh = Mesh.create(1, 1)
    # The first pass sets up what the matrix library keeps; it is not measured.
    small = Head(64, options.hidden, 1000, mesh)
    small.run(small.ours, True)
    rows = measure(Head(options.tokens, options.hidden, options.vocabulary, mesh), options.repeats)
    mesh.close()
    print(
        f"{options.tokens:,} tokens × {options.vocabulary:,} columns, hidden size "
        f"{options.hidden:,}, float32, {mesh.device.type}, forward and backward"
    )
    print(f"{'way':35} {'memory/logits':>13} {'bound':>6} {'s':>7} {'× plain':>8} {'bound':>6}")
    for row in rows:
        bounds = ["" if b is None else f"{b:.2f}" for b in (row.memory_bound, row.time_bound)]
        print(
            f"{row.way:35} {row.memory:13.3f} {bounds[0]:>6} {row.seconds:7.2f} {row.time:8.2f} "
            f"{bounds[1]:>6}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [text for row in rows for text in row.missed()]
    for text in missed:
        print(f"missed: {text}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
