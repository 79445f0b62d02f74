"""What packing costs: padding among the tokens computed, and the slowest data-parallel rank's work.

`python benchmarks/packing.py` prints a table; `--json FILE` writes it, `--check` exits with 1 and
names the bounds that were missed. Batches of 64 groups of 8 with Pareto-distributed response
lengths (α = 1.2, from 100 to 4,096 tokens), 40 batches a row, the shape of Qwen3-0.6B. The plan is
a pure function, so nothing is timed: shares are counted. Work counts attention's cost. The slowest
rank is the mean over the batches of the largest share of work over the mean one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_gmc.estimators import Scope
from megatron_gmc.learner.pack import Padding
from megatron_gmc.learner.plan import Limits, Plan, plan_micro_batches

GROUPS, GROUP_SIZE, BATCHES = 64, 8, 40
ALPHA, SHORTEST, LONGEST, PROMPT = 1.2, 100, 4096, 200
PADDING_BOUND, BALANCE_BOUND = 0.05, 1.05

# 2 · heads · head size, over the multiply-adds of a token's matrix products: Qwen3-0.6B.
ATTENTION_COST = 28 * 2 * 16 * 128 / (28 * 15.7e6 + 151_936 * 1024)

NO_PADDING = Padding()
CONTEXT_2 = Padding.of(tensor=1, context=2, sequence_parallel=False)
TENSOR_4_CONTEXT_2 = Padding.of(tensor=4, context=2, sequence_parallel=True)
# Data-parallel ranks, what the mesh pads to, what a weight depends on, micro-batch tokens.
CASES: tuple[tuple[int, str, Padding, Scope, int], ...] = (
    (2, "", NO_PADDING, "group", 40_960),
    (4, "", NO_PADDING, "group", 40_960),
    (8, "", NO_PADDING, "group", 40_960),
    (8, "", NO_PADDING, "group", 8_192),
    (8, "", NO_PADDING, "trajectory", 8_192),
    (4, "CP2", CONTEXT_2, "group", 40_960),
    (4, "TP4×SP×CP2", TENSOR_4_CONTEXT_2, "group", 40_960),
)


@dataclass(frozen=True)
class Row:
    """One way of packing, over all batches."""

    ranks: int
    mesh: str
    scope: str
    token_limit: int
    micro_batches: float
    """Of each rank, the mean over batches."""
    passes: str
    padding_share: float
    """Of all tokens computed, all batches together."""
    slowest_over_mean: float

    def missed(self) -> list[str]:
        """Which bounds, in words."""
        found = []
        if self.padding_share > PADDING_BOUND:
            found.append(f"padding share {self.padding_share:.3f}, bound {PADDING_BOUND}")
        if self.slowest_over_mean > BALANCE_BOUND:
            found.append(f"slowest rank {self.slowest_over_mean:.3f}, bound {BALANCE_BOUND}")
        return found


def lengths(seed: int) -> list[int]:
    """Prompt and response of each trajectory of a batch."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(GROUPS * GROUP_SIZE, generator=generator, dtype=torch.float64)
    response = (SHORTEST * (1 - uniform) ** (-1 / ALPHA)).clamp(max=LONGEST).long()
    prompt = torch.randint(20, PROMPT, (GROUPS,), generator=generator)
    both: list[int] = (response + prompt.repeat_interleave(GROUP_SIZE)).tolist()
    return both


def measure(ranks: int, mesh: str, padding: Padding, scope: Scope, token_limit: int) -> Row:
    limits = Limits(data_size=ranks, padding=padding, attention_cost=ATTENTION_COST)
    group_N = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE)
    own = computed = 0
    slowest, counts, two_pass = [], [], set()
    for seed in range(BATCHES):
        batch = lengths(seed)
        plan = plan_micro_batches(
            torch.tensor(batch),
            group_N,
            limits=limits,
            token_limit=token_limit,
            scope=scope,
            passes="auto",
        )
        own += sum(batch)
        computed += sum(padded_tokens(plan, batch))
        work = [
            sum(limits.work(batch[i]) for micro_batch in rank for i in micro_batch)
            for rank in plan.micro_batches
        ]
        slowest.append(max(work) / statistics.mean(work))
        counts.append(len(plan.micro_batches[0]))
        two_pass.add(plan.two_pass)
    passes = " and ".join({True: "two", False: "single"}[two] for two in sorted(two_pass))
    return Row(
        ranks,
        mesh,
        scope,
        token_limit,
        statistics.mean(counts),
        passes,
        1 - own / computed,
        statistics.mean(slowest),
    )


def padded_tokens(plan: Plan, batch: Sequence[int]) -> list[int]:
    """The tokens of every micro-batch, fillers too."""
    return [
        plan.padding.of_pack([batch[i] for i in micro_batch])
        for rank in plan.micro_batches
        for micro_batch in rank
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    rows = [measure(*case) for case in CASES]
    print(
        f"{'ranks':>5} {'mesh':11} {'whole':11} {'limit':>6} {'micro-batches':>13} {'pass':15} "
        f"{'padding':>8} {'slowest/mean':>12}"
    )
    for row in rows:
        print(
            f"{row.ranks:5} {row.mesh:11} {row.scope:11} {row.token_limit:6} "
            f"{row.micro_batches:13.1f} {row.passes:15} {row.padding_share:8.2%} "
            f"{row.slowest_over_mean:12.3f}"
        )
    print(f"bounds: padding {PADDING_BOUND:.0%}, slowest rank / mean {BALANCE_BOUND}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [(row, what) for row in rows for what in row.missed()]
    for row, what in missed:
        print(f"missed: {row.ranks} ranks {row.mesh} {row.scope} {row.token_limit}: {what}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
