"""Two real servers under the real driver, one of them killed, stopped or robbed of its weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.fleet import FleetPolicy
from megatron_gmc.rollout.scheduler import BoundedLag, LagScheduler
from megatron_gmc.rollout.sglang.engine import SglangEngine
from megatron_gmc.rollout.sglang.probe import Probes
from megatron_gmc.rollout.sglang.server import SglangServer
from megatron_gmc.rollout.sglang.transports import TransportName
from megatron_gmc.rollout.types import Group, SampleRequest, SamplingParams
from tests.rollout.models import VOCABULARY
from tests.rollout.scripted import decode, grade, prompt_at
from tests.sglang.servers import need_sglang, new_engine, new_server, worst_error

pytestmark = pytest.mark.timeout(900)
PARAMS = SamplingParams(temperature=1.0, max_response_tokens=24, stop_token_ids=(0,))
STEPS = 12


@contextmanager
def fleet(
    folder: Path, other: Path, logs: Path, transport: TransportName
) -> Iterator[tuple[RolloutDriver, list[SglangEngine], Callable[[int], Path]]]:
    """A driver of two servers; version v has the weights of `folder` or `other` in turn."""
    need_sglang()
    probes = Probes()
    engines = [
        new_engine(
            new_server(folder, logs / f"{n}.log", f"sglang-{n}", start_timeout_s=300.0),
            folder,
            name=f"sglang-{n}",
            transport=transport,
            in_flight="retract",  # whose log-probs are each version's own
            sample_timeout_s=20.0,
            timeout_s=20.0,
            probes=probes,
        )
        for n in range(2)
    ]
    driver = RolloutDriver(
        engines=engines,
        scheduler=LagScheduler(BoundedLag(2), 4),
        prompt_at=prompt_at,
        grade=grade,
        decode=decode,
        params=PARAMS,
        group_size=4,
        vocabulary=VOCABULARY,
        seed=3,
        prompt_fingerprint="seven prompts",
        request_groups=1,
        calls_per_engine=4,
        fleet=FleetPolicy(attempts=5, pause_s=0.1, all_down_timeout_s=600.0),
    )
    try:
        driver.start()
        yield driver, engines, lambda version: (folder, other)[version % 2]
    finally:
        driver.close()


def pid_of(engine: SglangEngine) -> int:
    server = engine._server
    assert isinstance(server, SglangServer) and server.process.pid is not None
    return server.process.pid


def hurt(engine: SglangEngine, how: str) -> None:
    """Kill the server and its children, or stop them all for good."""
    os.killpg(pid_of(engine), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


@pytest.mark.parametrize(
    ("transport", "how"), [("disk", "kill"), ("distributed", "stop"), ("tensor", "kill")]
)
def test_the_run_goes_on_and_no_group_holds_a_wrong_sample(
    folder: Path, other_folder: Path, tmp_path: Path, transport: TransportName, how: str
) -> None:
    """One server is hurt while it samples and takes weights, its work goes to the other, and it
    comes back; every group is whole, within the lag, and single-version samples are Hugging
    Face's."""
    with fleet(folder, other_folder, tmp_path, transport) as (driver, engines, weights):
        driver.publish(0, weights(0))
        groups: list[Group] = []
        faults = 0.0
        victim = 0
        for step in range(STEPS):
            batch = driver.next_batch(step)
            for group in batch:
                assert len(group.trajectories) == 4
                assert all(0 <= step - v.oldest_version <= 2 for v in group.trajectories)
            groups += batch
            if step == 3:
                victim = pid_of(engines[0])
                # in the middle of sampling, and with new weights on their way
                threading.Timer(0.05, hurt, [engines[0], how]).start()
            driver.publish(step + 1, weights(step + 1))
            faults += driver.metrics().get("engine_faults", 0.0)
        assert [group.id for group in groups] == list(range(4 * STEPS))
        until = time.monotonic() + 400
        while faults == 0 or pid_of(engines[0]) == victim:
            assert time.monotonic() < until, "the server was not started again"
            time.sleep(0.5)
            faults += driver.metrics().get("engine_faults", 0.0)
        assert faults >= 1
        check_log_probs(groups, weights)
        while driver.metrics()["in_flight_groups"]:
            time.sleep(0.1)
        state = driver.checkpoint_state(STEPS)
        assert state.submitted == 4 * STEPS + len(state.groups)


def check_log_probs(groups: Sequence[Group], weights: Callable[[int], Path]) -> None:
    checked = 0
    for group in groups:
        samples = [one.sample for one in group.trajectories]
        versions = {int(v) for sample in samples for v in sample.versions}
        if len(versions) == 1:
            request = SampleRequest(group.id, group.prompt.tokens, len(samples), 0)
            error = worst_error(weights(versions.pop()), [samples], [request], PARAMS)
            assert error <= 1e-4, (group.id, error)
            checked += 1
    assert checked > 0
