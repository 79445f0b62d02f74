"""A rank that hangs is named, with its phase, by all ranks; a long wait for samples is none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gmc.failures import EXIT_FAILED
from megatron_gmc.watchdog import Beat, Heard, Judge
from tests.distributed import ROOT, free_port, run_ranks
from tests.runs import (
    TIMEOUT_S,
    engine_of,
    environment,
    start_ranks,
    train_tree,
    wait_until,
    write_config,
)

LEARNING = Heard(Beat(9, 3, "learn", 0.1, False, "policy_step:7", ""), ago_s=0.1)
LIMIT_S = 5.0


def at(phase: str, step: int = 3, collective: bool = False, ago_s: float = 0.1) -> Heard:
    beat = replace(LEARNING.beat, phase=phase, step=step, in_collective=collective)
    return Heard(beat, ago_s)


def verdict(*looks: list[Heard]) -> str | None:
    """What is said at the last of some looks at the ranks, a little over half the limit apart."""
    judge = Judge(LIMIT_S)
    *before, last = (judge.verdict(look, 0.6 * LIMIT_S * n) for n, look in enumerate(looks))
    assert set(before) <= {None}
    return last


@pytest.mark.parametrize(
    "looks",
    [
        [[at("learn"), at("learn")]] * 2,
        # Others wait for one that gets on, slowly.
        [[at("begin"), at("publish")], [at("begin"), at("publish")], [at("learn"), at("publish")]],
        # The last one has only just come to where another has waited for it.
        [[at("wait"), at("receive", collective=True)]] * 2 + [[at("receive"), at("receive")]] * 2,
        [[at("wait"), at("receive")]] * 3 + [[at("learn"), at("receive")]],
        # Rank 0 waits for samples, of the batch or of a checkpoint, and the others for it.
        [[at("wait"), at("receive")]] * 9,
        [[at("drain"), at("checkpoint")]] * 9,
    ],
)
def test_nobody_hangs(looks: list[list[Heard]]) -> None:
    assert verdict(*looks) is None


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        # The one that the others wait for is earlier in the step, or in an earlier step.
        ([at("publish"), at("learn")], [1]),
        ([at("wait"), at("checkpoint", step=2)], [1]),
        # All are in one phase, and one of them does not wait for the others.
        ([at("learn", collective=True), at("learn")], [1]),
        ([at("learn"), at("learn")], [0, 1]),
    ],
)
def test_who_is_behind(ranks: list[Heard], named: list[int]) -> None:
    said = verdict(ranks, ranks, ranks)
    assert said is not None
    assert [int(rank) for rank in re.findall(r"rank (\d+) hangs", said)] == named
    assert f"in phase {ranks[named[0]].beat.phase} of step" in said
    assert "at policy_step:7" in said
    assert "train.stall_timeout_s: 5" in said


@pytest.mark.parametrize("phase", ["learn", "wait", "receive"])
def test_who_is_silent(phase: str) -> None:
    """Whatever the phase, and at once."""
    said = verdict([at("wait"), at(phase, ago_s=6.0)])
    assert said is not None
    assert said.startswith(f"rank 1 hangs, silent for 6.0 s, last in phase {phase} of step 3 (")


def outcomes(module: str, *words: str) -> list[tuple[int, str]]:
    """Exit code and standard error of two ranks."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=environment(rank, 2, port),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
        return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


def test_all_ranks_name_the_one_that_hangs() -> None:
    """The one that does not come to the collective in which the other waits."""
    for code, said in outcomes("tests.watchdog_workers", "steps", "4", "1", "waiting"):
        assert code == EXIT_FAILED
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: rank 1 hangs, in phase learn of step 2 for ")
        assert "at threading:" in line


def test_a_sound_run_is_left_alone() -> None:
    """Although waiting takes longer than the timeout. And a stop request reaches rank 0."""
    said = run_ranks("tests.watchdog_workers", "steps", 2, "4", "-1", "waiting")
    assert said[0].splitlines()[-1] == "SIGTERM to rank 1"


def test_a_frozen_rank_of_a_run(task: Path, tmp_path: Path) -> None:
    """Rank 0, whose store all talk to: the other names it and its phase, and ends by itself."""
    tree = train_tree(
        task,
        tmp_path / "run",
        train={"steps": 10_000, "save_every": None, "stall_timeout_s": 8.0},
        mesh={"tensor": 2},
    )
    config = write_config(tmp_path / "train.yaml", tree)
    ranks = start_ranks(2, tmp_path / "log", "train", config)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 2,' in metrics.read_text(), ranks)
    engine = engine_of(ranks[0])
    # The watchdog has told where the ranks are.
    time.sleep(2)
    ranks[0].send_signal(signal.SIGSTOP)
    try:
        assert ranks[1].wait(timeout=TIMEOUT_S) == EXIT_FAILED
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        engine.wait(timeout=60)
    said = (tmp_path / "log.rank1").read_text()
    pattern = r"error: rank 0 hangs, silent for [\d.]+ s, last in phase \w+ of step \d+"
    assert re.search(pattern, said), said
