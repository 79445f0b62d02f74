"""Engines that die, hang, refuse weights and come back, under the real driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.fleet import FleetDownError, FleetPolicy
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams
from tests.rollout.scripted import (
    FOLDER,
    ScriptedEngine,
    check_lag,
    content,
    flatten,
    learn,
    make_driver,
    prompt_at,
    running,
)

pytestmark = pytest.mark.timeout(60)

LAGS = [ExactLag(0), ExactLag(2), BoundedLag(2)]
POLICY = FleetPolicy(attempts=1000, pause_s=0.001, all_down_timeout_s=30.0)


class Mortal(ScriptedEngine):
    """Dies in every n-th sampling call or load; comes back empty when it is started again."""

    def __init__(self, name: str, *, call: int = 10**9, load: int = 10**9) -> None:
        super().__init__(name)
        self.die_at_call, self.die_at_load = call, load
        self.starts = self.asked = self.deaths = 0
        self.alive = False

    async def start(self) -> None:
        await super().start()
        self.starts += 1
        self.held = 0
        self.alive = True

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        self._check_alive()
        self.asked += 1
        if self.asked % self.die_at_call == 0:
            await asyncio.sleep(0)
            self._die()
        answers = await super().sample(requests, params)
        self._check_alive()
        return answers

    async def update_weights(self, folder: Path, version: int) -> None:
        self._check_alive()
        if (len(self.loads) + 1) % self.die_at_load == 0:
            self.loads.append(version)
            self._die()
        await super().update_weights(folder, version)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineError("the connection broke")

    def _die(self) -> None:
        self.alive = False
        self.deaths += 1
        raise EngineError("it was killed by signal 9")


def fleet_driver(
    engines: Sequence[ScriptedEngine], lag: Lag, policy: FleetPolicy = POLICY, **changes: object
) -> RolloutDriver:
    settings = {"request_groups": 1, "calls_per_engine": 2, "fleet": policy} | changes
    return make_driver(engines, LagScheduler(lag, 4), **settings)


@pytest.mark.parametrize("lag", LAGS, ids=str)
def test_work_of_a_dead_engine_goes_to_others_and_it_comes_back(lag: Lag) -> None:
    """The lag holds, every group is whole and consumed once, and what the engines sample without
    failures is what is consumed with them."""
    mortal, healthy = Mortal("mortal", call=7), Mortal("healthy")
    driver = fleet_driver([mortal, healthy], lag)
    with running(driver):
        ledger = learn(driver, range(15))
        figures = driver.metrics()
    assert figures["engine_faults"] == mortal.deaths > 0
    assert figures["resubmitted"] >= mortal.deaths
    check_lag(ledger, lag)
    assert [group.id for group in flatten(ledger)] == list(range(60))
    assert mortal.starts >= 2
    if isinstance(lag, ExactLag):
        calm = make_driver([ScriptedEngine()], LagScheduler(lag, 4), request_groups=1)
        with running(calm):
            assert content(flatten(learn(calm, range(15)))) == content(flatten(ledger))


@pytest.mark.parametrize("lag", LAGS, ids=str)
def test_an_only_engine_that_dies_again_and_again_still_serves(lag: Lag) -> None:
    """Sampling and loading; the version it needs after its return is still on disk."""
    mortal = Mortal("mortal", call=9, load=4)
    driver = fleet_driver([mortal], lag)
    with running(driver):
        ledger = learn(driver, range(12))
    check_lag(ledger, lag)
    assert mortal.deaths >= 3


@pytest.mark.parametrize("lag", LAGS, ids=str)
def test_an_engine_is_readmitted_with_current_weights_alone(lag: Lag) -> None:
    mortal, healthy = Mortal("mortal", call=5), Mortal("healthy")
    driver = fleet_driver([mortal, healthy], lag)
    with running(driver):
        learn(driver, range(10))
    # Between two starts versions rise, and the first after a start is the one in use then.
    assert mortal.starts > 1
    assert mortal.loads.count(0) <= mortal.starts


@pytest.mark.parametrize("lag", LAGS, ids=str)
def test_an_engine_that_only_answers_garbage_is_worked_around(lag: Lag) -> None:
    """T6 for a whole engine: refused by reason and counted, and its groups sampled elsewhere."""

    def without_log_probs(request: SampleRequest, member: int, sample: Sample) -> Refusal:
        return Refusal("log_prob_missing", "the answer carries no log-probs")

    garbage = Mortal("garbage")
    garbage.tamper = without_log_probs
    healthy = Mortal("healthy")
    policy = FleetPolicy(attempts=2, pause_s=0.001, all_down_timeout_s=30.0)
    driver = fleet_driver([garbage, healthy], lag, policy)
    with running(driver):
        ledger = learn(driver, range(10))
        figures = driver.metrics()
    check_lag(ledger, lag)
    assert [group.id for group in flatten(ledger)] == list(range(40))
    # four attempts at both members of every group that it was given
    assert figures["refused/log_prob_missing"] >= 8 * figures["resubmitted"] > 0
    assert figures["engines_excluded"] == 1


def test_evaluations_survive_their_engine() -> None:
    mortal = Mortal("mortal", call=3)
    driver = fleet_driver([mortal, Mortal("healthy")], ExactLag(1))
    with running(driver):
        future = driver.evaluate([prompt_at(n) for n in range(20)], 0, 2)
        learn(driver, range(4))
        result = future.result(30)
    assert result.rewards.shape == (20, 2) and result.version == 0


def test_an_engine_that_never_comes_back_is_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Buried(Mortal):
        async def start(self) -> None:
            if self.starts:
                raise EngineError("port 30000 is taken")
            await super().start()

    buried = Buried("buried", call=2)
    policy = FleetPolicy(attempts=3, pause_s=0.001, all_down_timeout_s=30.0)
    driver = fleet_driver([buried, Mortal("healthy")], BoundedLag(1), policy)
    with running(driver):
        learn(driver, range(10))
    assert "buried is left out from now on: buried: port 30000 is taken" in caplog.text


@pytest.mark.parametrize("attempts", [1, 10**6])
def test_without_any_engine_the_run_ends_by_name_and_can_be_saved(attempts: int) -> None:
    class Dying(Mortal):
        async def start(self) -> None:
            if self.starts:
                raise EngineError("the machine is gone")
            await super().start()

    engines = [Dying("first", call=9), Dying("second", call=9)]
    policy = FleetPolicy(attempts=attempts, pause_s=0.001, all_down_timeout_s=0.2)
    driver = fleet_driver(engines, BoundedLag(1), policy)
    with running(driver):
        reached = [0]
        with pytest.raises(FleetDownError, match=r"first: the machine is gone; second: the mach"):
            for step in range(100):
                driver.next_batch(step)
                driver.publish(step + 1, FOLDER)
                reached.append(step + 1)
        state = driver.checkpoint_state(reached[-1])
    assert state.next_step == reached[-1]
    assert all(len(group.trajectories) == 2 for group in state.groups)


def test_a_grader_that_gives_no_reward_is_not_the_engines_fault() -> None:
    """G4: another engine would not cure it, so the run ends and no engine is restarted."""

    def refuse(jobs: Sequence[object]) -> list[float]:
        return [float("nan")] * len(jobs)

    engine = Mortal("blameless")
    driver = fleet_driver([engine], ExactLag(0), grade=refuse)
    with running(driver), pytest.raises(EngineError, match="reward_not_finite"):
        driver.next_batch(0)
    assert engine.starts == 1


def test_answers_of_an_earlier_life_change_nothing() -> None:
    """A call that hangs in a dead engine fails long after the engine is back."""

    class Slow(Mortal):
        async def sample(
            self, requests: Sequence[SampleRequest], params: SamplingParams
        ) -> list[list[Sample | Refusal]]:
            if self.starts == 1 and requests[0].group_id == 0:
                await asyncio.sleep(0.2)
                raise EngineError("did not answer within 0.2 s")
            return await super().sample(requests, params)

    slow = Slow("slow", call=10)
    driver = fleet_driver([slow], BoundedLag(60))
    with running(driver):
        learn(driver, range(12))
    assert slow.deaths >= 1
    # step 0 waited for the echo; the last death may have come too late for its start
    assert slow.deaths <= slow.starts <= slow.deaths + 1


def test_counts_add_up() -> None:
    """Submitted groups are consumed, finished or under way, whatever failed between."""
    mortal = Mortal("mortal", call=6)
    driver = fleet_driver([mortal, Mortal("healthy")], BoundedLag(2))
    with running(driver):
        learn(driver, range(9))
        while driver.metrics()["in_flight_groups"]:
            time.sleep(0.01)
        state = driver.checkpoint_state(9)
    assert mortal.deaths > 0
    assert state.submitted == 9 * 4 + len(state.groups)
    assert len(state.groups) > 0
