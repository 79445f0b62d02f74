"""Helpers for tests on the embedded engine's real process."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path

import httpx
import numpy as np

from megatron_gmc.rollout.embedded.engine import EmbeddedEngine
from megatron_gmc.rollout.types import Sample, SampleRequest, SamplingParams
from tests.rollout.models import VOCABULARY, oracle_log_probs, oracle_model

PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11))
REQUESTS = [
    SampleRequest(group_id=place, prompt_tokens=prompt, count=4, seed=100 + place)
    for place, prompt in enumerate(PROMPTS)
]
PARAMS = SamplingParams(temperature=1.0, max_response_tokens=12, stop_token_ids=(0, 7))
# long enough to be still running when the test does something else
LONG = [SampleRequest(group_id=9, prompt_tokens=(1,), count=2000, seed=1)]
LONG_PARAMS = SamplingParams(temperature=1.0, max_response_tokens=60, stop_token_ids=())


def new_engine(folder: Path, log: Path, *, version: int = 0, **changes: float) -> EmbeddedEngine:
    limits = {"start_timeout_s": 120.0, "sample_timeout_s": 120.0} | changes
    return EmbeddedEngine(
        "embedded-0", folder, version=version, vocabulary=VOCABULARY, log=log, **limits
    )


async def samples_of(
    engine: EmbeddedEngine, requests: list[SampleRequest], params: SamplingParams = PARAMS
) -> list[list[Sample]]:
    results = await engine.sample(requests, params)
    for result in results:
        for sample in result:
            assert isinstance(sample, Sample), sample
    return results  # type: ignore[return-value]


def same_bits(left: list[list[Sample]], right: list[list[Sample]]) -> bool:
    pairs = zip(chain.from_iterable(left), chain.from_iterable(right), strict=True)
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.log_probs, b.log_probs)
        for a, b in pairs
    )


def worst_log_prob_error(
    folder: Path, results: list[list[Sample]], temperature: float, requests: list[SampleRequest]
) -> float:
    oracle = oracle_model(folder)
    worst = 0.0
    for request, samples in zip(requests, results, strict=True):
        for sample in samples:
            expected = oracle_log_probs(
                oracle, request.prompt_tokens, sample.tokens.tolist(), temperature
            )
            worst = max(worst, float(np.abs(sample.log_probs - expected.numpy()).max()))
    return worst


def client_of(engine: EmbeddedEngine, token: str | None = None) -> httpx.AsyncClient:
    """A client of its own, to send what `HttpEngine` would not."""
    assert engine._http is not None
    headers = {"Authorization": f"Bearer {engine._token if token is None else token}"}
    return httpx.AsyncClient(base_url=engine._http.session.address, headers=headers, timeout=60)


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its parent"
        time.sleep(0.1)
