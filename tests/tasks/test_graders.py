"""Graders on right, wrong and hostile responses; the worker processes really run."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import psutil
import pytest

from megatron_gmc.rollout.types import FinishReason, Prompt
from megatron_gmc.tasks.config import (
    ExactGrader,
    FunctionGrader,
    GraderConfig,
    MathVerifyGrader,
    NumericGrader,
    ReasoningGymGrader,
    ReasoningGymSource,
)
from megatron_gmc.tasks.graders import REASONS, GradeJob, Grader, check_answers
from megatron_gmc.tasks.sources import read_source

HOSTILE = "tests.tasks.hostile"


def job(
    response: str, answer: str = "a", metadata: str = "", reason: FinishReason = "stop"
) -> GradeJob:
    return GradeJob(response, answer, metadata, reason)


def grade(config: GraderConfig, jobs: Sequence[GradeJob]) -> tuple[list[float], dict[str, int]]:
    with closing(Grader(config, workers=2)) as grader:
        rewards = grader.grade(jobs)
        return rewards, {reason: n for reason, n in grader.counts().items() if n}


def worker_pids() -> set[int]:
    """Grader processes of this test run: spawned children, without multiprocessing's tracker."""
    children = psutil.Process().children()
    return {child.pid for child in children if "spawn_main" in " ".join(child.cmdline())}


@pytest.fixture(scope="module")
def hostile() -> Iterator[Grader]:
    config = FunctionGrader(path=f"{HOSTILE}:by_command", timeout_s=2)
    with closing(Grader(config, workers=2)) as grader:
        yield grader


@pytest.mark.parametrize(
    ("response", "answer", "config", "reward"),
    [
        ("0932", "0932", ExactGrader(), 1),
        (" 0932\n", "0932", ExactGrader(), 1),
        (" 0932", "0932", ExactGrader(strip=False), 0),
        ("75012;>0932", "0932", ExactGrader(), 0),
        ("75012;>0932", "0932", ExactGrader(after=">"), 1),
        (">0932>0933", "0932", ExactGrader(after=">"), 0),
        (">0933>0932", "0932", ExactGrader(after=">"), 1),
        ("0932", "0932", ExactGrader(after=">"), 0),
        ("09_32", "0932", ExactGrader(), 0),
        (">", "0932", ExactGrader(after=">"), 0),
        ("", "0932", ExactGrader(), 0),
        ("so 10 and 12.", "12", NumericGrader(), 1),
        ("so 12 and 10", "12", NumericGrader(), 0),
        ("10-5", "5", NumericGrader(), 1),
        ("x = -5", "-5", NumericGrader(), 1),
        ("x = \u22125", "-5", NumericGrader(), 1),
        ("1,234,567.5 km", "1234567.5", NumericGrader(), 1),
        ("1,2345", "2345", NumericGrader(), 1),
        ("1.5e3", "1500", NumericGrader(), 1),
        (".5", "0.5", NumericGrader(), 1),
        ("007", "7", NumericGrader(), 1),
        ("no number, x2", "2", NumericGrader(), 0),
        ("1e999", "5", NumericGrader(), 0),
        ("", "5", NumericGrader(), 0),
        ("5.04", "5", NumericGrader(tolerance=0.01), 1),
        ("5.06", "5", NumericGrader(tolerance=0.01), 0),
        ("5.0000001", "5", NumericGrader(tolerance=0), 0),
    ],
)
def test_exact_and_numeric(
    response: str, answer: str, config: ExactGrader | NumericGrader, reward: float
) -> None:
    before = worker_pids()
    assert grade(config, [job(response, answer)]) == ([reward], {})
    assert worker_pids() == before, "a cheap grader starts no process"


def test_a_cut_off_response_scores_nothing_where_a_stop_is_required() -> None:
    jobs = [job("7", "7", reason="stop"), job("7", "7", reason="length")]
    assert grade(ExactGrader(require_stop=True), jobs)[0] == [1, 0]
    assert grade(ExactGrader(), jobs)[0] == [1, 1]


def test_math_verify_knows_equal_from_different() -> None:
    cases = [
        ("The answer is $0.5$.", "1/2", 1),
        ("The answer is 1/2", "0.5", 1),
        (r"so \boxed{\frac{2}{4}}", r"\frac12", 1),
        (r"\boxed{2x+x^2}", "x(x+2)", 1),
        (r"\boxed{3\pi}", r"3\pi", 1),
        (r"\boxed{3}", r"3\pi", 0),
        (r"$\{2, 1\}$", "{1,2}", 1),
        ("The answer is 0.51", "1/2", 0),
        ("no idea", "1/2", 0),
        ("", "1/2", 0),
        (r"\frac{1}{", "1/2", 0),
    ]
    rewards, failures = grade(MathVerifyGrader(), [job(text, answer) for text, answer, _ in cases])
    assert rewards == [reward for _, _, reward in cases]
    assert failures == {}


def test_math_verify_on_a_response_without_end_is_stopped() -> None:
    slow = job(r"\boxed{(9^{9^{9^{9}}})!}", "1")
    rewards, failures = grade(MathVerifyGrader(timeout_s=2), [slow, job("$2$", "2")])
    assert rewards == [0, 1]
    assert failures == {"grader/timeout": 1}


@pytest.mark.parametrize("dataset", ["chain_sum", "graph_color", "countdown"])
def test_reasoning_gym_scores_with_the_datasets_own_rule(dataset: str) -> None:
    """countdown takes any expression that gives the target; graph_color has no single answer."""
    source = ReasoningGymSource(dataset=dataset, size=3, seed=1)
    records = read_source(source)
    check_answers(ReasoningGymGrader(), records)
    jobs = []
    for record in records:
        right = record.answer or colour(json.loads(record.metadata)["entry"]["metadata"]["puzzle"])
        jobs += [job(right, record.answer, record.metadata)]
        jobs += [job("[]", record.answer, record.metadata)]
    rewards, failures = grade(ReasoningGymGrader(), jobs)
    assert rewards[::2] == [1, 1, 1]
    assert all(0 <= reward < 0.5 for reward in rewards[1::2])
    assert failures == {}


def colour(puzzle: dict[str, Any]) -> str:
    """A right answer for reasoning-gym's graph_color, found by trying every colouring."""
    vertices, edges, options = puzzle["vertices"], puzzle["edges"], puzzle["color_options"]
    for choice in itertools.product(options, repeat=len(vertices)):
        colours = dict(zip(vertices, choice, strict=True))
        if all(colours[a] != colours[b] for a, b in edges):
            return json.dumps({str(vertex): colour for vertex, colour in colours.items()})
    raise AssertionError("the puzzle has no solution")


def test_reasoning_gym_answer_tag() -> None:
    (record,) = read_source(ReasoningGymSource(dataset="chain_sum", size=1))
    texts = [f"It is <answer> {record.answer} </answer>.", f"It is {record.answer}", "<answer>"]
    jobs = [job(text, record.answer, record.metadata) for text in texts]
    assert grade(ReasoningGymGrader(answer_tag="answer"), jobs)[0] == [1, 0, 0]


def test_a_dataset_that_json_cannot_hold_is_refused() -> None:
    records = read_source(ReasoningGymSource(dataset="arc_agi", size=1))
    with pytest.raises(ValueError, match=r"reasoning_gym:0: .* scores its own answer 0\.05"):
        check_answers(ReasoningGymGrader(), records)


def test_function_gets_response_answer_and_metadata() -> None:
    jobs = [job("abc", "de", "f"), job("", "", "")]
    assert grade(FunctionGrader(path=f"{HOSTILE}:length"), jobs) == ([123, 0], {})


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "grader/raised"),
        ("raise unpicklable", "grader/raised"),
        ("raise unprintable", "grader/raised"),
        ("exit", "grader/raised"),
        ("die", "grader/died"),
        ("die quietly", "grader/died"),
        ("hang", "grader/timeout"),
        ("spin", "grader/timeout"),
        ("text", "grader/not_a_number"),
        ("none", "grader/not_a_number"),
        ("list", "grader/not_a_number"),
        ("lambda", "grader/not_a_number"),
    ],
)
def test_hostile_function_scores_nothing_and_hurts_no_neighbour(
    hostile: Grader, response: str, reason: str
) -> None:
    before = hostile.counts()
    rewards = hostile.grade([job("fine"), job(response), job("fine"), job("true")])
    assert rewards == [0.25, 0, 0.25, 1]
    after = hostile.counts()
    assert after == {**before, reason: before[reason] + 1}


def test_rewards_that_are_not_finite_reach_the_caller(hostile: Grader) -> None:
    """G4: the caller refuses that trajectory by id; turning NaN into 0 here would hide it."""
    before = hostile.counts()
    rewards = hostile.grade([job("nan"), job("fine"), job("inf")])
    assert math.isnan(rewards[0])
    assert rewards[1:] == [0.25, math.inf]
    assert hostile.counts() == before


def test_the_first_failure_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = FunctionGrader(path=f"{HOSTILE}:by_command")
    with caplog.at_level(logging.WARNING):
        grade(config, [job("raise"), job("raise"), job("text")])
    assert [record.getMessage() for record in caplog.records] == [
        "the function grader failed, its reward is 0 (grader/raised; later ones are only counted): "
        "KeyError: 'broken grader'",
        "the function grader failed, its reward is 0 (grader/not_a_number; later ones are only "
        "counted): returned str, must be a number",
    ]


def test_long_responses_and_many_jobs_keep_their_order() -> None:
    jobs = [job("x" * (n * 1000)) for n in range(100)]
    rewards, _ = grade(FunctionGrader(path=f"{HOSTILE}:length"), jobs)
    assert rewards == [n * 1000 + 10 for n in range(100)]


def test_several_threads_share_one_grader(hostile: Grader) -> None:
    results: dict[int, list[float]] = {}

    def run(thread: int) -> None:
        results[thread] = hostile.grade([job("fine"), job("die" if thread == 1 else "true")])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [0.25, 1], 1: [0.25, 0], 2: [0.25, 1]}


def test_killed_idle_workers_are_replaced() -> None:
    """The kernel kills for memory at any moment; a new one takes its place."""
    before = worker_pids()
    with closing(Grader(FunctionGrader(path=f"{HOSTILE}:by_command"), workers=2)) as grader:
        assert grader.grade([job("fine")]) == [0.25]
        for pid in worker_pids() - before:
            os.kill(pid, signal.SIGKILL)
        assert grader.grade([job("fine"), job("true")]) == [0.25, 1]
        assert grader.counts() == dict.fromkeys(REASONS, 0)


def test_a_busy_worker_that_is_killed_costs_no_response() -> None:
    before = worker_pids()
    with closing(Grader(FunctionGrader(path=f"{HOSTILE}:length"), workers=2)) as grader:
        jobs = [job("x" * 100_000)] * 2000
        grader.grade(jobs[:2])
        victim = min(worker_pids() - before)
        killer = threading.Timer(0.05, os.kill, (victim, signal.SIGKILL))
        killer.start()
        rewards = grader.grade(jobs)
        killer.join()
        assert rewards == [100_010] * 2000
        assert grader.counts() == dict.fromkeys(REASONS, 0)


def test_close_while_a_response_hangs() -> None:
    before = worker_pids()
    grader = Grader(FunctionGrader(path=f"{HOSTILE}:by_command", timeout_s=600), workers=1)
    grader.grade([job("fine")])
    errors: list[str] = []

    def run() -> None:
        try:
            grader.grade([job("hang"), job("fine")])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    grader.close()
    thread.join()
    assert len(errors) == 1
    assert "closed" in errors[0]
    assert worker_pids() == before


def test_close_ends_the_workers_and_the_grader() -> None:
    before = worker_pids()
    grader = Grader(FunctionGrader(path=f"{HOSTILE}:by_command"), workers=2)
    grader.grade([job("fine")])
    assert len(worker_pids() - before) == 1, "no more workers than jobs"
    grader.close()
    grader.close()
    assert worker_pids() == before
    with pytest.raises(RuntimeError, match="grader is closed"):
        grader.grade([job("fine")])


def test_workers_end_when_their_parent_is_killed() -> None:
    """A worker inside a response that hangs must not outlive a killed training run."""
    code = (
        "import sys, threading, time\n"
        "from megatron_gmc.tasks.config import FunctionGrader\n"
        "from megatron_gmc.tasks.graders import GradeJob, Grader\n"
        "if __name__ == '__main__':\n"
        f"    g = Grader(FunctionGrader(path='{HOSTILE}:by_command', timeout_s=999), workers=2)\n"
        "    g.grade([GradeJob('fine', 'a', '', 'stop')])\n"
        "    hang = [GradeJob('hang', 'a', '', 'stop')]\n"
        "    threading.Thread(target=g.grade, args=(hang,), daemon=True).start()\n"
        "    time.sleep(0.5)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "cannot import 'no_such_module'"),
        (f"{HOSTILE}:missing", "has no function 'missing'"),
        (f"{HOSTILE}:NOT_CALLABLE", "has no function 'NOT_CALLABLE'"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused_at_once(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grader(FunctionGrader(path=path), workers=1)


def test_worker_count_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Grader(ExactGrader(), workers=0)


@pytest.mark.parametrize(
    ("config", "answer", "message"),
    [
        (NumericGrader(), "many", "prompt p: answer 'many' has no number"),
        (ExactGrader(), "", "prompt p has no answer, which the exact grader needs"),
        (MathVerifyGrader(), "", "prompt p has no answer, which the math_verify grader needs"),
    ],
)
def test_answers_are_checked_against_the_grader(
    config: GraderConfig, answer: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_answers(config, [Prompt("p", "text", (1,), answer)])
    check_answers(FunctionGrader(path="a:b"), [Prompt("p", "text", (1,), "")])


def test_the_worker_module_starts_light() -> None:
    """A spawned worker imports this module first: it must not pull the training stack in."""
    code = (
        "import sys, megatron_gmc.tasks.grade_worker\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'transformers', 'megatron'}"
        " & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
