"""Every way to bring weights to a real server, held to transformers' log-probs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.sglang.engine import InFlight, RunningServer
from megatron_gmc.rollout.sglang.server import SglangServer
from megatron_gmc.rollout.sglang.transports import TransportName
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest
from tests.rollout.models import oracle_log_probs, oracle_model
from tests.sglang.servers import (
    LONG,
    LONG_PARAMS,
    new_engine,
    samples_of,
    worst_error,
)

pytestmark = pytest.mark.anyio
Running = tuple[SglangServer, str]


def outside(server: Running) -> RunningServer:
    """The server as one that somebody else runs: closing an engine leaves it alone."""
    process, address = server
    return RunningServer(address, process.keys)


@pytest.mark.parametrize("transport", get_args(TransportName))
async def test_log_probs_follow_the_weights(
    server: Running, folder: Path, other_folder: Path, transport: TransportName
) -> None:
    """T1 and the hand-over: after each of three updates, samples are of the new weights alone."""
    engine = new_engine(outside(server), folder, transport=transport)
    await engine.start()
    for version, source in ((1, other_folder), (2, folder), (3, other_folder)):
        await engine.update_weights(source, version)
        assert await engine.version() == version
        results = await samples_of(engine)
        assert all(set(s.versions.tolist()) == {version} for group in results for s in group)
        assert worst_error(source, results) <= 1e-5
    await engine.close()


@pytest.mark.parametrize("in_flight", get_args(InFlight))
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_responses_under_way_when_weights_change(
    server: Running,
    folder: Path,
    other_folder: Path,
    in_flight: InFlight,
    transport: TransportName,
) -> None:
    """L7: the spans say which weights sampled each token, whatever becomes of the response."""
    engine = new_engine(outside(server), folder, in_flight=in_flight, transport=transport)
    await engine.start()
    await engine.update_weights(folder, 11)
    sampling = asyncio.create_task(engine.sample(LONG, LONG_PARAMS))
    await asyncio.sleep(0.3)
    await engine.update_weights(other_folder, 12)
    (samples,) = await sampling
    kept = [sample for sample in samples if isinstance(sample, Sample)]
    seen = {tuple(sorted(set(sample.versions.tolist()))) for sample in kept}
    refused = {sample.reason for sample in samples if isinstance(sample, Refusal)}
    if in_flight == "wait":
        assert (seen, refused) == ({(11,)}, set())
    elif in_flight == "abort":
        assert refused == {"aborted"}
    else:
        # some may have ended before
        assert (11, 12) in seen and seen <= {(11,), (11, 12), (12,)} and not refused
    if in_flight == "retract":  # which computes the prompt and what was sampled anew
        assert worst_span_error({11: folder, 12: other_folder}, kept) <= 1e-5
    after = await samples_of(engine)
    assert all(set(s.versions.tolist()) == {12} for group in after for s in group)
    assert worst_error(other_folder, after) <= 1e-5
    await engine.close()


def worst_span_error(sources: dict[int, Path], samples: list[Sample]) -> float:
    """Largest difference of a token's log-prob from its own version's, by transformers."""
    worst = 0.0
    for version, source in sources.items():
        oracle = oracle_model(source)
        for sample in samples:
            own = sample.versions == version
            expected = oracle_log_probs(
                oracle, LONG[0].prompt_tokens, sample.tokens.tolist(), LONG_PARAMS.temperature
            )
            worst = max(
                worst, float(np.abs(sample.log_probs - expected.numpy())[own].max(initial=0))
            )
    return worst


async def test_a_cache_that_outlives_its_weights_is_not_found_again(
    server: Running, folder: Path, other_folder: Path
) -> None:
    """pause_in_place keeps the cache of what is under way, and with it that of its prompt."""
    engine = new_engine(outside(server), folder, in_flight="pause_in_place")
    await engine.start()
    await engine.update_weights(folder, 51)
    sampling = asyncio.create_task(engine.sample(LONG, LONG_PARAMS))
    await asyncio.sleep(0.3)
    await engine.update_weights(other_folder, 52)
    same_prompt = [SampleRequest(1, LONG[0].prompt_tokens, 8, 2)]
    results = await samples_of(engine, same_prompt)
    assert worst_error(other_folder, results, same_prompt) <= 1e-5
    await sampling
    await engine.close()


async def test_refused_weights_put_the_engine_out_of_service_until_a_whole_version(
    server: Running, folder: Path, tmp_path: Path
) -> None:
    """L6: no sample may carry the version, and none is drawn before a whole one is there."""
    engine = new_engine(outside(server), folder)
    await engine.start()
    with pytest.raises(EngineError, match="sglang-0"):
        await engine.update_weights(tmp_path / "nowhere", 21)
    with pytest.raises(EngineError, match="sglang-0 holds no whole version"):
        await samples_of(engine)
    await engine.update_weights(folder, 22)
    assert worst_error(folder, await samples_of(engine)) <= 1e-5
    await engine.close()
