"""Kill a run again and again, resume it each time, and count what it consumed.

`python -m tests.recovery.kills` trains a small policy on two ranks at an exact lag, once without
interruption and once with ten kills (SIGKILL) of rank 0, of another rank, of the engine, of a
grader's worker, during the writing of a checkpoint and during publishing, in an order and at steps
drawn from the seed. It prints what happened and the ledger, and ends with 1 where a prompt was not
consumed exactly once or the final weights differ by a bit. `--bounded` does it at a bounded lag,
where runs do not repeat, and leaves the weights out.

The ledger counts the groups of every step that the final weights have behind them, from the run's
own record of trajectories: a step that a kill undid is taken again, and its record written again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.runs import (
    TIMEOUT_S,
    Tree,
    assert_same_weights,
    engine_of,
    make_task,
    start_ranks,
    train_tree,
    trajectories,
    wait_until,
    write_config,
)

RANKS = 2
PROMPTS = 64
PROMPTS_PER_STEP = 2
KINDS = ("rank 0", "rank 1", "engine", "grader worker", "checkpoint", "publishing")
Ranks = list[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Kill:
    """What to kill (one of KINDS), once the run is `steps` steps further than when it started."""

    kind: str
    steps: int


def random_kills(count: int, seed: int) -> list[Kill]:
    """Every kind before any comes again; each one or two steps on."""
    rng = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += rng.sample(KINDS, len(KINDS))
    return [Kill(kind, rng.randint(1, 2)) for kind in kinds[:count]]


def run_with_kills(config: Path, run: Path, kills: Sequence[Kill]) -> list[str]:
    """Run a config that resumes by itself to its end, with `kills`; say what each one did."""
    waiting, said = list(kills), []
    while True:
        ranks = start_ranks(RANKS, run.with_name("log"), "train", config)
        helpers: list[psutil.Process] = []
        try:
            ended = False
            while waiting and not ended:
                kill = waiting.pop(0)
                _wait_for(run, kill, ranks)
                helpers = psutil.Process(ranks[0].pid).children(recursive=True)
                ended = _strike(kill, ranks)
                said.append(f"{kill.kind:14} after version {_version(run):3}")
            if not ended:
                assert [rank.wait(timeout=TIMEOUT_S) for rank in ranks] == [0] * RANKS
                return said
            # What a launcher does once one rank has failed.
            if kill.kind != "engine":
                time.sleep(0.2)
        except AssertionError as error:
            error.add_note(_logs(run))
            raise
        finally:
            _end(ranks)
        # The engine notices by itself that its run is gone.
        _, alive = psutil.wait_procs(helpers, timeout=60)
        assert alive == []


def _wait_for(run: Path, kill: Kill, ranks: Ranks) -> None:
    """Wait for the moment of `kill`."""
    goal = _version(run) + kill.steps
    wait_until(lambda: _version(run) >= goal, ranks)
    if kill.kind == "grader worker":
        wait_until(lambda: bool(_graders(ranks)), ranks)
    folders = {"checkpoint": ("checkpoints", "*.partial"), "publishing": ("weights", "version_*")}
    if kill.kind in folders:
        folder, pattern = folders[kill.kind]
        before = set((run / folder).glob(pattern))
        wait_until(lambda: bool(set((run / folder).glob(pattern)) - before), ranks)


def _graders(ranks: Ranks) -> list[psutil.Process]:
    children = psutil.Process(ranks[0].pid).children()
    return [one for one in children if "spawn_main" in " ".join(one.cmdline())]


def _strike(kill: Kill, ranks: Ranks) -> bool:
    """Kill it; returns whether the run ends of it."""
    if kill.kind == "grader worker":
        _graders(ranks)[0].kill()
        return False
    if kill.kind == "engine":
        engine_of(ranks[0]).kill()
        codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
        assert 0 not in codes
        return True
    ranks[1 if kill.kind == "rank 1" else 0].kill()
    return True


def _end(ranks: Ranks) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def _version(run: Path) -> int:
    """The newest version in the run's metrics."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [line.partition('"step": ')[2].partition(",")[0] for line in lines]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def _logs(run: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(run.parent.glob("log.rank*")))


def ledger(run: Path, steps: int) -> Counter[str]:
    """Prompt → how many of the run's steps consumed it; each as a whole group."""
    times: Counter[str] = Counter()
    for step in range(steps):
        members = Counter(row["group"] for row in trajectories(run, step))
        assert set(members.values()) == {4}, f"step {step}: {members}"
        times.update({row["group"]: row["prompt_id"] for row in trajectories(run, step)}.values())
    return times


def kill_tree(task: Path, run: Path, steps: int, **rollout: object) -> Tree:
    train = {"steps": steps, "save_every": 1, "keep_checkpoints": 2, "resume": "auto"}
    return train_tree(task, run, train=train, rollout=rollout, mesh={"tensor": RANKS})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bounded", action="store_true", help="at lag ≤ 2 instead of exactly 2")
    options = parser.parse_args()
    kills = random_kills(options.kills, options.seed)
    lag = {"bounded": 2} if options.bounded else {"exact": 2}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task, steps = make_task(folder / "task"), PROMPTS // PROMPTS_PER_STEP
        runs = folder / "uninterrupted", folder / "killed"
        configs = [
            write_config(run.with_suffix(".yaml"), kill_tree(task, run, steps, lag=lag))
            for run in runs
        ]
        if not options.bounded:
            run_with_kills(configs[0], runs[0], [])
        for number, line in enumerate(run_with_kills(configs[1], runs[1], kills), start=1):
            print(f"kill {number:2}: {line}")
        times = ledger(runs[1], steps)
        print(f"\n{'prompt':10} times consumed")
        for prompt, count in sorted(times.items()):
            print(f"{prompt:10} {count}")
        once = len(times) == PROMPTS and set(times.values()) == {1}
        print(f"\n{len(times)} prompts, each consumed exactly once: {'yes' if once else 'NO'}")
        if not options.bounded:
            assert_same_weights(*runs)
            print("final weights equal the uninterrupted run's, bit for bit: yes")
        return 0 if once else 1


if __name__ == "__main__":
    sys.exit(main())
