"""Attention over a pack, against the sum of attention over each of its trajectories alone.

`python benchmarks/attention.py` prints a table; `--json FILE` writes it, `--check` exits with 1 and
names the bounds that were missed. Forward and backward, float32, Pareto-distributed lengths; both
sides run in turns in one process, and a ratio is the median over turns of the pack's time to the
trajectories' in the same turn, so that a busy machine slows both. `block mask` is what a pack costs
without such a kernel: attention over all of it under a mask. On a CPU one thread is used; where
CUDA is, the same runs there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gmc.learner.core_attention import packed_attention, plan_rows

BOUND = 1.15
"""Largest time allowed of the pack, in units of the separate trajectories'."""

# Trajectories, shortest and longest; query heads, key and value heads, head size.
CASES = (
    (64, 16, 1024, 8, 8, 64),
    (64, 16, 1024, 8, 2, 64),
    (16, 64, 2048, 16, 8, 128),
    (200, 8, 200, 8, 4, 16),
)


@dataclass(frozen=True)
class Row:
    """One case's times, medians over turns."""

    trajectories: int
    tokens: int
    longest: int
    heads: str
    separate_ms: float
    packed_ms: float
    ratio: float
    block_mask_ratio: float | None
    """Of one turn; None where the mask would not fit."""


class Case:
    """One pack, and the same trajectories alone."""

    def __init__(self, case: tuple[int, int, int, int, int, int], device: torch.device) -> None:
        count, shortest, longest, heads, groups, size = case
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        lengths = (shortest * (1 - uniform) ** (-1 / 0.8)).clamp(max=longest).long()
        # As the learner packs them.
        self.lengths: list[int] = sorted(lengths.tolist(), reverse=True)
        self.tokens = sum(self.lengths)
        self.heads, self.groups = heads, groups
        self.scale = size**-0.5
        shapes = [(self.tokens, n, size) for n in (heads, groups, groups, heads)]
        *whole, self.gradient = (
            torch.randn(shape, generator=generator).to(device) for shape in shapes
        )
        self.whole = [part.requires_grad_() for part in whole]
        self.alone = [
            [part.detach().clone().requires_grad_() for part in one]
            for one in zip(*(part.split(self.lengths) for part in whole), strict=True)
        ]
        self.plan = plan_rows(self.lengths, size=1, rank=0, device=device)
        self.device = device

    def packed(self) -> list[Tensor]:
        query, key, value = self.whole
        output = packed_attention(query, key, value, self.plan, self.scale)
        return [output.detach(), *torch.autograd.grad(output, self.whole, self.gradient)]

    def separate(self) -> list[Tensor]:
        outputs = []
        gradients = self.gradient.split(self.lengths)
        for leaves, gradient in zip(self.alone, gradients, strict=True):
            output = self._attention(leaves, None)
            outputs.append([output.detach(), *torch.autograd.grad(output, leaves, gradient)])
        return [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def block_mask(self) -> list[Tensor]:
        of = torch.repeat_interleave(torch.tensor(self.lengths)).to(self.device)
        mask = (of[:, None] == of).tril()
        output = self._attention(self.whole, mask)
        return [output.detach(), *torch.autograd.grad(output, self.whole, self.gradient)]

    def _attention(self, parts: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=self.heads != self.groups,
        )
        return output[0].transpose(0, 1)


def measure(case: Case, repeats: int) -> Row:
    for found, wanted in zip(case.packed(), case.separate(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    packed, separate = [], []
    for _ in range(repeats):
        separate.append(_seconds(case.separate, case.device))
        packed.append(_seconds(case.packed, case.device))
    ratios = [p / s for p, s in zip(packed, separate, strict=True)]
    whole = _seconds(case.block_mask, case.device) if case.tokens < 10_000 else None
    return Row(
        len(case.lengths),
        case.tokens,
        max(case.lengths),
        f"{case.heads}/{case.groups} × {round(case.scale**-2)}",
        1e3 * statistics.median(separate),
        1e3 * statistics.median(packed),
        statistics.median(ratios),
        None if whole is None else whole / statistics.median(separate),
    )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [measure(Case(case, device), options.repeats) for case in CASES]
    print(f"forward and backward, float32, {device.type}; times in ms")
    print(
        f"{'trajectories':>12} {'tokens':>7} {'longest':>7} {'heads':>10} {'separate':>9} "
        f"{'packed':>8} {'ratio':>6} {'block mask':>10}"
    )
    for row in rows:
        mask = "" if row.block_mask_ratio is None else f"{row.block_mask_ratio:.1f}"
        print(
            f"{row.trajectories:12} {row.tokens:7} {row.longest:7} {row.heads:>10} "
            f"{row.separate_ms:9.1f} {row.packed_ms:8.1f} {row.ratio:6.2f} {mask:>10}"
        )
    print(f"bound of the ratio: {BOUND}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [row for row in rows if row.ratio > BOUND]
    for row in missed:
        print(f"missed: {row.tokens} tokens with {row.heads} take {row.ratio:.2f}, bound {BOUND}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
