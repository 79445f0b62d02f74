"""Time of a policy step, against a plain cross-entropy step of the same model on the same tokens.

`python benchmarks/policy_step.py` prints a table; `--json FILE` writes it, `--check` exits with 1
and names the bounds that were missed. Forward, backward and AdamW on one rank, one thread, float32.
The model is a small Qwen3 whose output layer has the share of the multiplications that it has in
Qwen3-0.6B, about a quarter; a batch is 4 groups of 8 trajectories of 64 to 96 tokens, an eighth of
them prompt, in micro-batches of whole groups.

`cross-entropy` is megatron-core's own way: logits of every token, whole, and its
vocab_parallel_cross_entropy. All kinds of step run in turns in one process, and a ratio is the
median over the turns of one step's time to the other's in the same turn; time is the process's own,
so that a busy machine does not show.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_gmc.config import LearnerConfig, ObjectiveConfig
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.estimators import ESTIMATORS
from megatron_gmc.learner import output_head
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.micro_batch import MicroBatch, micro_batches_of
from megatron_gmc.learner.model_weights import initialise
from megatron_gmc.learner.plan import plan_micro_batches
from megatron_gmc.learner.policy_step import Objective, policy_step
from megatron_gmc.optim_config import OptimConfig
from megatron_gmc.sft import imitation_gradient

GROUPS, GROUP_SIZE = 4, 8
PROMPT, RESPONSE = 10, (54, 86)
MICRO_BATCH = LearnerConfig(micro_batch_tokens=1600)
SHAPE = ModelShape(
    layers=8,
    hidden=256,
    ffn=768,
    heads=4,
    query_groups=2,
    head_size=64,
    vocab_size=8192,
    max_positions=128,
    norm_epsilon=1e-6,
    rope_theta=1e6,
    tied=True,
    initializer_range=0.02,
)
# Step → what it is compared with, and the largest ratio allowed.
BOUNDS = {
    "gmc, single pass": ("cross-entropy", 1.10),
    "gmc over grpo": ("grpo, token clip", 1.02),
    "gmc, two pass": ("gmc, single pass", 1.45),
}


@dataclass(frozen=True)
class Comparison:
    """One comparison."""

    step: str
    over: str
    seconds: float
    ratio: float
    bound: float | None

    @property
    def missed(self) -> bool:
        return self.bound is not None and self.ratio > self.bound


def batch(seed: int) -> Batch:
    rng = random.Random(seed)

    def row(place: int) -> Row:
        length = rng.randint(*RESPONSE)
        return Row(
            id=place,
            group=place // GROUP_SIZE,
            prompt_tokens=[rng.randrange(SHAPE.vocab_size) for _ in range(PROMPT)],
            response_tokens=[rng.randrange(SHAPE.vocab_size) for _ in range(length)],
            loss_mask=[True] * length,
            # About what fresh weights give.
            behaviour_log_probs=[-9.05 + rng.gauss(0, 0.05) for _ in range(length)],
            reward=rng.random(),
            oldest_version=0,
        )

    return Batch.from_rows([row(place) for place in range(GROUPS * GROUP_SIZE)])


def cross_entropy_step(learner: Learner, batch: Batch) -> None:
    """Megatron's own: whole logits of every token, the loss of each next token, one update."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    plan = plan_micro_batches(
        batch.length_N,
        batch.group_N,
        limits=learner.limits,
        token_limit=MICRO_BATCH.micro_batch_tokens,
        scope="group",
        passes="auto",
    )
    micro_batches = micro_batches_of(batch, plan, learner.mesh)
    [chunk], [wrapped] = learner.chunks, learner.model
    tokens = int(batch.length_N.sum())

    def forward_step(iterator: Iterator[MicroBatch], stage: torch.nn.Module) -> object:
        micro_batch = next(iterator)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logits = output_head.logits(chunk, hidden)
            labels = micro_batch.tokens_T.roll(-1)[None]
            share = vocab_parallel_cross_entropy(logits, labels).sum() / tokens
            return share, torch.zeros((), dtype=torch.int), {}

        hidden = stage(micro_batch.tokens_T[None], None, None, packed_seq_params=micro_batch.pack)
        return hidden, loss

    wrapped.zero_grad_buffer()
    learner.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=wrapped,
        num_microbatches=len(micro_batches),
        seq_length=0,
        micro_batch_size=1,
        forward_only=False,
    )
    learner.apply()


def imitation_step(learner: Learner, batch: Batch) -> None:
    imitation_gradient(learner, batch, MICRO_BATCH.micro_batch_tokens)
    learner.apply()


def policy(name: str, passes: str, learner: Learner, batch: Batch) -> None:
    objective = Objective(ESTIMATORS[name](), ObjectiveConfig(), 1.0)
    settings = MICRO_BATCH.model_copy(update={"passes": passes})
    metrics = policy_step(learner, batch, objective, settings)
    assert metrics["step/two_pass"] == (passes == "two_pass"), "not the pass that was asked for"


def measure(learner: Learner, repeats: int) -> list[Comparison]:
    """Every kind of step in turns, on a batch of each turn's own."""
    steps: dict[str, Callable[[Learner, Batch], None]] = {
        "cross-entropy": cross_entropy_step,
        "imitation": imitation_step,
        "gmc, single pass": partial(policy, "gmc", "single_pass"),
        "grpo, token clip": partial(policy, "grpo", "auto"),
        "gmc, two pass": partial(policy, "gmc", "two_pass"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        of_turn, names = batch(turn), list(steps)
        # Each kind of step comes first, second, … in turn.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            steps[name](learner, of_turn)
            if turn > 0:
                seconds[name].append(time.process_time() - start)
    compared = [
        ("cross-entropy", "cross-entropy", None),
        ("imitation", "cross-entropy", None),
        ("gmc, single pass", *BOUNDS["gmc, single pass"]),
        ("gmc, single pass", *BOUNDS["gmc over grpo"]),
        ("gmc, two pass", *BOUNDS["gmc, two pass"]),
    ]
    return [
        Comparison(
            step,
            over,
            statistics.median(seconds[step]),
            statistics.median(a / b for a, b in zip(seconds[step], seconds[over], strict=True)),
            bound,
        )
        for step, over, bound in compared
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    torch.set_num_threads(1)
    mesh = Mesh.create(1, 1)
    learner = Learner(SHAPE, mesh, OptimConfig(lr=1e-5), steps=10_000)
    initialise(learner.chunks, SHAPE, mesh, seed=0)
    rows = measure(learner, options.repeats)
    mesh.close()
    print(f"{GROUPS} groups × {GROUP_SIZE} trajectories, {int(batch(0).length_N.sum()):,} tokens")
    print(f"{'step':20} {'s':>6} {'over':20} {'ratio':>6} {'bound':>6}")
    for row in rows:
        bound = "" if row.bound is None else f"{row.bound:.2f}"
        print(f"{row.step:20} {row.seconds:6.2f} {row.over:20} {row.ratio:6.3f} {bound:>6}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [row for row in rows if row.missed]
    for row in missed:
        print(f"missed: {row.step} takes {row.ratio:.3f} × {row.over}, bound {row.bound}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
