"""One short prompt, scored by every engine after every update: engines of a version must agree."""

from __future__ import annotations

import math

from pydantic import TypeAdapter

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_engine import CONTROL_TIMEOUT_S
from megatron_gmc.rollout.http_session import HttpSession, Wire

PROBE = (1, 2, 3, 1, 3, 2, 2, 1)  # ids that every vocabulary has
TOLERANCE = 0.1  # nats a token, on average: far above rounding, bf16's included


class _Meta(Wire):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Answer(Wire):
    meta_info: _Meta


_ANSWER = TypeAdapter(_Answer)


class Probes:
    """What the engines of one fleet said, by version; the first to take a version is compared with.

    This finds the odd one out, not which of two is right.
    """

    def __init__(self) -> None:
        self._version = -1
        self._first = ""
        self._log_probs: list[float] = []

    def check(self, version: int, name: str, log_probs: list[float]) -> None:
        """Raises EngineError for log-probs that are not finite or differ from the first ones."""
        if not all(map(math.isfinite, log_probs)):
            raise EngineError(f"{name} gives log-probs {log_probs} with version {version}")
        if version != self._version or name == self._first:
            self._version, self._first, self._log_probs = version, name, log_probs
            return
        pairs = zip(log_probs, self._log_probs, strict=True)
        difference = sum(abs(own - other) for own, other in pairs) / len(log_probs)
        if difference > TOLERANCE:
            raise EngineError(
                f"{name} scores a probe {difference:.3g} nats a token apart from {self._first}, "
                f"with version {version} on both: one of them serves another model"
            )


async def score(session: HttpSession) -> list[float]:
    """Log-probs of PROBE's tokens after its first, float [7]."""
    body = {
        "input_ids": list(PROBE),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await session.post(_ANSWER, "/generate", CONTROL_TIMEOUT_S, body)
    found = [log_prob for log_prob, _, _ in answer.meta_info.input_token_logprobs[1:]]
    if len(found) != len(PROBE) - 1:
        raise EngineError(f"{session.name} scored {len(found)} tokens of a probe of {len(PROBE)}")
    return [math.nan if log_prob is None else log_prob for log_prob in found]
