"""The driver when engines, graders or prompts fail: named errors, no hang."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.sampling import GradeJob
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.types import (
    Prompt,
    Refusal,
    Sample,
    SampleRequest,
    SamplingParams,
)
from tests.rollout.scripted import (
    FOLDER,
    DyingEngine,
    ScriptedEngine,
    flatten,
    grade,
    learn,
    make_driver,
    prompt_at,
    running,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("lag", [ExactLag(2), BoundedLag(2)], ids=str)
def test_a_dead_engine_is_raised_from_everything(lag: Lag) -> None:
    mortal = DyingEngine("mortal")
    engines = [ScriptedEngine("healthy"), mortal]
    driver = make_driver(engines, LagScheduler(lag, 4), request_groups=1)
    with running(driver):
        evaluation = driver.evaluate([prompt_at(0)] * 500, 0, 1)
        mortal.doomed = True
        with pytest.raises(EngineError, match="mortal: the process is gone; restart it"):
            learn(driver, range(1000))
        with pytest.raises(EngineError, match="mortal"):
            evaluation.result(10)
        questions: list[Callable[[], object]] = [
            lambda: driver.next_batch(0),
            lambda: driver.publish(1, FOLDER),
            lambda: driver.evaluate([prompt_at(0)], 0, 1),
            lambda: driver.checkpoint_state(0),
        ]
        for question in questions:
            with pytest.raises(EngineError, match="mortal"):
                question()
        assert driver.metrics()["sampled_tokens"] >= 0
    assert all(engine.closed for engine in engines)


def test_futures_of_published_folders_fail_with_the_engine() -> None:
    class Stubborn(ScriptedEngine):
        async def update_weights(self, folder: Path, version: int) -> None:
            if version == 1:
                await asyncio.sleep(0)
                raise EngineError("stubborn refuses version 1: wrong shape")
            await super().update_weights(folder, version)

    engines = [ScriptedEngine("willing"), Stubborn("stubborn")]
    driver = make_driver(engines, LagScheduler(ExactLag(0), 2))
    with running(driver):
        driver.next_batch(0)
        future = driver.publish(1, FOLDER)
        # L6: a named error, and no sample of the refusing engine carries version 1.
        with pytest.raises(EngineError, match=r"^stubborn refuses version 1: wrong shape$"):
            driver.next_batch(1)
        with pytest.raises(EngineError, match="stubborn"):
            future.result(10)


def test_an_engine_that_only_says_it_took_the_weights() -> None:
    """L6: the version is asked for after the load; an acknowledgement alone is not believed."""

    class Liar(ScriptedEngine):
        async def update_weights(self, folder: Path, version: int) -> None:
            await asyncio.sleep(0)

    driver = make_driver([Liar("liar")], LagScheduler(BoundedLag(0), 2))
    with running(driver):
        driver.next_batch(0)
        driver.publish(1, FOLDER)
        with pytest.raises(EngineError, match="liar: acknowledged version 1 but holds 0"):
            driver.next_batch(1)


def test_an_engine_that_does_not_start() -> None:
    class Stillborn(ScriptedEngine):
        async def start(self) -> None:
            raise EngineError("port 30000 is taken")

    engine = Stillborn("stillborn")
    driver = make_driver([engine], LagScheduler(ExactLag(0), 2))
    driver.start()
    try:
        with pytest.raises(EngineError, match="stillborn: port 30000 is taken"):
            driver.publish(0, FOLDER)
            driver.next_batch(0)
    finally:
        driver.close()
    assert engine.closed


def test_an_answer_of_another_shape_is_not_the_protocol() -> None:
    class Short(ScriptedEngine):
        async def sample(
            self, requests: Sequence[SampleRequest], params: SamplingParams
        ) -> list[list[Sample | Refusal]]:
            return (await super().sample(requests, params))[:-1]

    driver = make_driver([Short("short")], LagScheduler(ExactLag(0), 2))
    with (
        running(driver),
        pytest.raises(EngineError, match=r"short: answered \[2\] samples for requests of \[2, 2\]"),
    ):
        driver.next_batch(0)


class Hanging(ScriptedEngine):
    """Never answers a sampling call, and never closes."""

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        await asyncio.Event().wait()


def test_a_hanging_engine_is_an_error_after_the_stated_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = make_driver([Hanging("deaf")], LagScheduler(ExactLag(0), 2), stall_timeout_s=0.5)
    with (
        running(driver),
        pytest.raises(EngineError, match=r"deaf: no answer to 1 sample call\(s\) for"),
    ):
        driver.next_batch(0)
    assert "deaf did not close within 0.5 s" in caplog.text


def test_closing_ends_a_wait_in_another_thread() -> None:
    driver = make_driver([Hanging("deaf")], LagScheduler(ExactLag(0), 2))
    errors: list[EngineError] = []

    def wait() -> None:
        try:
            driver.next_batch(0)
        except EngineError as error:
            errors.append(error)

    with running(driver):
        evaluation = driver.evaluate([prompt_at(0)], 0, 1)
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        driver.checkpoint_state(0)
    waiter.join(20)
    assert [str(error) for error in errors] == ["the rollout loop has ended"]
    with pytest.raises(EngineError, match="the rollout loop has ended"):
        evaluation.result(10)


def test_an_engine_whose_close_fails_does_not_hide_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Clumsy(ScriptedEngine):
        async def close(self) -> None:
            raise EngineError("the process does not end")

    engines = [Clumsy("clumsy"), ScriptedEngine("tidy")]
    with running(make_driver(engines, LagScheduler(ExactLag(0), 2))):
        pass
    assert engines[1].closed
    assert "clumsy did not close cleanly: clumsy: the process does not end" in caplog.text


# -- what the user hands in ----------------------------------------------------------------------


def broken_grade(jobs: Sequence[GradeJob]) -> list[float]:
    raise KeyError("answer")


def short_grade(jobs: Sequence[GradeJob]) -> list[float]:
    return [0.0]


def broken_prompt(number: int) -> Prompt:
    raise IndexError("no such prompt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grade": broken_grade}, "sampling submissions 0 to 1 on scripted: KeyError: 'answer'"),
        ({"grade": short_grade}, "ValueError: the grader returned 1 rewards for 4 responses"),
        ({"prompt_at": broken_prompt}, "IndexError: no such prompt"),
    ],
)
def test_a_failing_part_of_the_user_is_named(changes: dict[str, Any], message: str) -> None:
    driver = make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 2), **changes)
    with running(driver), pytest.raises(EngineError, match=message) as caught:
        driver.next_batch(0)
    # The traceback of the cause survives for whoever wants it.
    assert caught.value.__cause__ is not None


def test_a_grader_that_hangs_is_an_error_and_does_not_hold_the_process() -> None:
    release = threading.Event()

    def hang(jobs: Sequence[GradeJob]) -> list[float]:
        release.wait()
        return grade(jobs)

    driver = make_driver(
        [ScriptedEngine()], LagScheduler(ExactLag(0), 2), grade=hang, stall_timeout_s=0.5
    )
    with (
        running(driver),
        pytest.raises(EngineError, match=r"the grader: no answer to 1 grade call\(s\)"),
    ):
        driver.next_batch(0)
    assert all(
        thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()
    )
    release.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_dies_is_noticed() -> None:
    """The loop's thread itself ends; whoever waits, and whoever asks later, is told."""

    def leave(number: int) -> Prompt:
        sys.exit(3)

    driver = make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 2), prompt_at=leave)
    with running(driver):
        for _ in range(2):
            with pytest.raises(EngineError, match="the rollout loop has ended"):
                driver.next_batch(0)


# -- the facade's own edges ----------------------------------------------------------------------


def test_close_is_safe_at_any_time() -> None:
    engine = ScriptedEngine()
    make_driver([engine], LagScheduler(ExactLag(0), 2)).close()
    driver = make_driver([engine], LagScheduler(ExactLag(0), 2))
    with running(driver):
        driver.next_batch(0)
    driver.close()
    assert engine.closed
    with pytest.raises(EngineError, match="the rollout loop has ended"):
        driver.next_batch(0)


def test_asking_before_the_start() -> None:
    driver = make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 2))
    with pytest.raises(EngineError, match="not running; call start first"):
        driver.publish(0, FOLDER)
    driver.close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_waiting_loses_nothing() -> None:
    """An interrupt takes the question back; the same batch can be had afterwards."""
    held = threading.Event()
    engine = ScriptedEngine()

    async def wait_for_release(request: SampleRequest, member: int, position: int) -> None:
        while not held.is_set():
            await asyncio.sleep(0.001)

    engine.before_token = wait_for_release
    driver: RolloutDriver = make_driver([engine], LagScheduler(ExactLag(1), 2))

    asking = threading.Event()

    def interrupt() -> None:
        asking.wait()
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with running(driver):
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            asking.set()
            driver.next_batch(0)
        held.set()
        assert [group.id for group in flatten(learn(driver, range(3)))] == list(range(6))
