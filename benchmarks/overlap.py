"""How well sampling and learning overlap, what driving costs rank 0, and what scheduling costs.

`python benchmarks/overlap.py` prints a table; `--json FILE` writes it, `--check` exits with 1 and
names the bounds that were missed. Every figure is a ratio inside one run, the median over repeats:

- step time at bounded lag 1 over the longer of sampling and learning alone, and at lag 0 over their
  sum, with engines and a learner that sleep, and with the embedded engine in its own process beside
  a learner that computes (one core each: it needs two that nobody else uses);
- the learner's own time while rank 0 drives, over that of the same work while nothing is sampled:
  with engines that sleep what is left is the driver's share of rank 0, which has a bound; beside
  the embedded engine it also says whether both had a core, and is only shown;
- CPU time of scheduling 1,000,000 groups over 1/1000 of the time that sampling them would take at
  10,000 tokens/s and 1,000 tokens a group, and the memory that it gains on the way.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from simulate_check import GROUP, SleepingEngine

from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.embedded.engine import EmbeddedEngine
from megatron_gmc.rollout.engine import Engine
from megatron_gmc.rollout.ledger import Ledger
from megatron_gmc.rollout.scheduler import BoundedLag, LagScheduler
from megatron_gmc.rollout.simulation import Cluster
from megatron_gmc.rollout.types import Prompt, SamplingParams

STEPS, PROMPTS, TOKENS, VOCABULARY = 8, 4, 48, 64
SLEEPING = Cluster(1, PROMPTS * GROUP, 16_000, calls_per_engine=PROMPTS, learn_s=0.2)
"""200 tokens at 1,000 tokens/s each: 0.2 s a step."""
SCHEDULED = 1_000_000
# Groups × 1,000 tokens / (10,000 tokens/s), a thousandth of it.
SECONDS_A_GROUP = 1_000 / 10_000 / 1_000


@dataclass(frozen=True)
class Row:
    """A ratio and the largest that is allowed; None: it is only shown."""

    what: str
    ratio: float
    bound: float | None

    @property
    def missed(self) -> bool:
        return self.bound is not None and self.ratio > self.bound


@contextmanager
def driven(engine: Engine, lag: int, weights: Path) -> Iterator[RolloutDriver]:
    driver = RolloutDriver(
        engines=[engine],
        scheduler=LagScheduler(BoundedLag(lag), PROMPTS),
        prompt_at=lambda number: Prompt(str(number), "", (1, 2, 3), ""),
        grade=lambda jobs: [float(len(text) % 2) for _, text, _ in jobs],
        decode=lambda tokens: " ".join(map(str, tokens)),
        params=SamplingParams(1.0, 200, (0,))
        if isinstance(engine, SleepingEngine)
        else SamplingParams(1.0, TOKENS, (0,)),
        group_size=GROUP,
        vocabulary=VOCABULARY,
        seed=0,
        prompt_fingerprint="",
        calls_per_engine=1 if isinstance(engine, EmbeddedEngine) else None,
    )
    try:
        driver.start()
        driver.publish(0, weights)
        yield driver
    finally:
        driver.close()


def step_seconds(
    engine: Engine, lag: int, weights: Path, learn: Callable[[], None]
) -> tuple[float, float, float]:
    """Seconds of a whole step, of its wait for samples and of its learning; medians."""
    steps, waits, learns = [], [], []
    with driven(engine, lag, weights) as driver:
        began = time.perf_counter()
        for step in range(STEPS + 2):
            driver.next_batch(step)
            sampled = time.perf_counter()
            learn()
            learned = time.perf_counter()
            driver.publish(step + 1, weights)
            now = time.perf_counter()
            if step >= 2:  # The engine has started and the pipeline is full.
                steps.append(now - began)
                waits.append(sampled - began)
                learns.append(learned - sampled)
            began = now
    return tuple(map(statistics.median, (steps, waits, learns)))  # type: ignore[return-value]


def overlap(
    kind: str, engine: Callable[[], Engine], weights: Path, learn: Callable[[], None], repeats: int
) -> list[Row]:
    """Ratios at lag 0 and 1, against what sampling and learning take at lag 0 in the same turn."""
    after, overlapped, driving = [], [], []
    for _ in range(repeats):
        serial, sampling, learning = step_seconds(engine(), 0, weights, learn)
        step, _, busy = step_seconds(engine(), 1, weights, learn)
        after.append(serial / (sampling + learning))
        overlapped.append(step / max(sampling, learning))
        driving.append(busy / learning)
    longer, both = "step at lag 1 / max(sampling, learning)", "step at lag 0 / sum of both"
    slower = "learning while sampling / alone"
    return [
        Row(f"{kind}: {longer}", statistics.median(overlapped), 1.15),
        Row(f"{kind}: {both}", statistics.median(after), 1.15),
        Row(f"{kind}: {slower}", statistics.median(driving), None),
    ]


def sleeping_engine() -> Engine:
    return SleepingEngine("sleeping", SLEEPING, lambda number: [200] * GROUP)


def sleeping(repeats: int) -> list[Row]:
    """Engine and learner asleep: nothing but the driver's own order of things."""

    def learn() -> None:
        time.sleep(SLEEPING.learn_s)

    return overlap("asleep", sleeping_engine, Path("weights"), learn, repeats)[:2]


def driving(repeats: int) -> list[Row]:
    """The driver beside a learner that computes in the same process; the engine is asleep."""
    learn = work(SLEEPING.learn_s)
    row = overlap("rank 0", sleeping_engine, Path("weights"), learn, repeats)[2]
    return [replace(row, bound=1.1)]


def work(seconds: float) -> Callable[[], None]:
    """As many small matrix products as take about `seconds` now."""
    matrix = torch.randn(128, 128)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.tanh(matrix @ matrix)
        count += 1

    def learn() -> None:
        for _ in range(count):
            torch.tanh(matrix @ matrix)

    return learn


def computing(folder: Path, repeats: int) -> list[Row]:
    """The embedded engine beside matrix products that take about as long as it does."""
    write_model(folder)

    def engine() -> Engine:
        log = folder / "engine.log"
        return EmbeddedEngine(
            "embedded",
            folder,
            version=0,
            vocabulary=VOCABULARY,
            log=log,
            start_timeout_s=120,
            sample_timeout_s=120,
        )

    _, sampling, _ = step_seconds(engine(), 0, folder, lambda: None)
    return overlap("embedded engine", engine, folder, work(sampling), repeats)


def write_model(folder: Path) -> None:
    """A small random Qwen3 that hardly ever ends a response."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def scheduling(groups: int) -> list[Row]:
    """The books of `groups` groups that finish in random order."""
    rows = []
    for lag in (BoundedLag(4), BoundedLag(4, order="earliest_deadline")):
        chance, process = random.Random(0), psutil.Process()
        ledger: Ledger[None] = Ledger(LagScheduler(lag, groups_per_step=64))
        under_way: list[tuple[int, int]] = []
        half = 0
        began = time.process_time()
        while ledger.version * 64 < groups:
            while ledger.may_send(ledger.first_unsent(), ledger.version):
                (number,) = ledger.send(ledger.first_unsent() + 1, ledger.version)
                under_way.append((number, ledger.version))
            place = chance.randrange(len(under_way))
            under_way[place], under_way[-1] = under_way[-1], under_way[place]
            number, held = under_way.pop()
            ledger.finish(number, held, None)
            if ledger.batch() is not None:
                ledger.advance()
                if ledger.version == groups // 64 // 2:
                    half = process.memory_info().rss
        seconds = time.process_time() - began
        grown = process.memory_info().rss / half
        rows.append(
            Row(f"scheduling, {lag}, / 1/1000 of sampling", seconds / (groups * SECONDS_A_GROUP), 1)
        )
        rows.append(Row(f"memory, {lag}: at the end / half way", grown, 1.02))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=SCHEDULED, help="groups to schedule")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.groups < 1000:
        parser.error("--repeats must be at least 1, and --groups at least 1000")
    torch.set_num_threads(1)
    table = sleeping(options.repeats) + driving(options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        table += computing(Path(folder), options.repeats)
    table += scheduling(options.groups)
    print(f"{'':72} {'ratio':>6} {'bound':>6}")
    for row in table:
        print(f"{row.what:72} {row.ratio:6.3f} {'' if row.bound is None else row.bound:>6}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in table], indent=2) + "\n")
    missed = [row for row in table if row.missed]
    for row in missed:
        print(f"missed: {row.what} is {row.ratio:.3f}, bound {row.bound}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
