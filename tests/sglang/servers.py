"""Helpers for tests on real SGLang servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.rollout.sglang.engine import (
    InFlight,
    RunningServer,
    SglangEngine,
    WeightPlan,
)
from megatron_gmc.rollout.sglang.probe import Probes
from megatron_gmc.rollout.sglang.server import ServerPlan, SglangServer
from megatron_gmc.rollout.sglang.transports import TransportName
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams
from tests.distributed import ROOT
from tests.rollout.models import CONTEXT, VOCABULARY, oracle_log_probs, oracle_model

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
PARAMS = SamplingParams(temperature=0.8, max_response_tokens=16, stop_token_ids=(0, 7))
REQUESTS = [
    SampleRequest(group_id=place, prompt_tokens=prompt, count=4, seed=100 + place)
    for place, prompt in enumerate(((1, 2, 3), (4,), (5, 6, 8, 9, 10, 11)))
]
# runs for a second or so: many samples; SGLang ends at the model's own token 0 in any case
LONG = [SampleRequest(group_id=9, prompt_tokens=(1, 2), count=64, seed=1)]
LONG_PARAMS = SamplingParams(temperature=1.0, max_response_tokens=CONTEXT - 4, stop_token_ids=(0,))


def need_sglang() -> None:
    """Skip where SGLang's own environment is not installed, unless CI asked for it."""
    if PYTHON.exists():
        return
    if os.environ.get("REQUIRE_SGLANG") == "1":
        pytest.fail(f"REQUIRE_SGLANG=1 and there is no {PYTHON}; run make sglang-cpu")
    pytest.skip(f"SGLang is not installed ({PYTHON}); run make sglang-cpu")


def new_server(folder: Path, log: Path, name: str = "sglang-0", **changes: object) -> SglangServer:
    settings: dict[str, object] = {
        "python": PYTHON,
        "folder": folder,
        "log": log,
        "start_timeout_s": 180.0,
        "cpu": True,
    }
    return SglangServer(name, ServerPlan(**(settings | changes)))  # type: ignore[arg-type]


def new_engine(
    server: SglangServer | RunningServer,
    folder: Path,
    *,
    name: str = "sglang-0",
    transport: TransportName = "disk",
    in_flight: InFlight = "wait",
    bucket_bytes: int = 2**14,
    sample_timeout_s: float = 120.0,
    timeout_s: float = 60.0,
    probes: Probes | None = None,
) -> SglangEngine:
    return SglangEngine(
        name,
        server,
        folder,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        sample_timeout_s=sample_timeout_s,
        weights=WeightPlan(transport, in_flight, bucket_bytes, timeout_s, stream_tensors),
        probes=probes or Probes(),
    )


async def samples_of(
    engine: SglangEngine,
    requests: Sequence[SampleRequest] = REQUESTS,
    params: SamplingParams = PARAMS,
) -> list[list[Sample]]:
    return only_samples(await engine.sample(requests, params))


def only_samples(results: Sequence[Sequence[Sample | Refusal]]) -> list[list[Sample]]:
    for result in results:
        for sample in result:
            assert isinstance(sample, Sample), sample
    return results  # type: ignore[return-value]


def worst_error(
    folder: Path,
    results: Sequence[Sequence[Sample]],
    requests: Sequence[SampleRequest] = REQUESTS,
    params: SamplingParams = PARAMS,
) -> float:
    """Largest difference of a log-prob from transformers' with the weights of `folder`."""
    oracle = oracle_model(folder)
    worst = 0.0
    for request, samples in zip(requests, results, strict=True):
        for sample in samples:
            expected = oracle_log_probs(
                oracle, request.prompt_tokens, sample.tokens.tolist(), params.temperature
            )
            worst = max(worst, float(np.abs(sample.log_probs - expected.numpy()).max()))
    return worst
