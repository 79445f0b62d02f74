"""What crosses the border between engines, the driver and the learner: prompts, samples, groups.

Everything here is plain data. A sample is what an engine returned and what `check_sample`
accepted; a trajectory is a graded sample; a group is all G trajectories of one prompt and is
only ever built whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length"]
RefusalReason = Literal[
    "aborted",
    "empty",
    "length_mismatch",
    "log_prob_missing",
    "log_prob_not_finite",
    "token_out_of_vocabulary",
    "version_missing",
    "version_unknown",
    "version_not_exact",
    "version_too_old",
    "finish_reason",
    "too_long",
    "reward_not_finite",
]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a task, tokenised; `answer` is what the grader compares with."""

    id: str
    text: str
    tokens: tuple[int, ...]
    answer: str
    metadata: str = ""
    """JSON text that a grader may need (a reasoning-gym entry); empty where there is none."""


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples. Log-probs are those of the tempered distribution."""

    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SampleRequest:
    """`count` samples of one prompt. `seed` makes the embedded engine's samples repeatable."""

    group_id: int
    prompt_tokens: tuple[int, ...]
    count: int
    seed: int


@dataclass(frozen=True, eq=False)
class Sample:
    """One response as an engine returned it; all arrays have one entry per response token.

    tokens int64 [T]; log_probs float32 [T], of the tempered distribution that sampled the token;
    versions int64 [T], the weights' version that sampled the token.
    """

    tokens: IntArray
    log_probs: FloatArray
    versions: IntArray
    finish_reason: FinishReason


@dataclass(frozen=True)
class Refusal:
    """Why an engine's answer may not join a group, and a sentence for the log."""

    reason: RefusalReason
    detail: str


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A graded sample. `mask` bool [T] selects the tokens that carry loss."""

    sample: Sample
    mask: BoolArray
    reward: float

    @property
    def oldest_version(self) -> int:
        return int(self.sample.versions.min())


@dataclass(frozen=True, eq=False)
class Group:
    """All trajectories of one submission, in sample order.

    `id` is the submission number: the n-th group that the driver ever submitted in this run.
    Two submissions of one prompt are two groups.
    """

    id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> int:
        return min(one.oldest_version for one in self.trajectories)

    @property
    def newest_version(self) -> int:
        return max(int(one.sample.versions.max()) for one in self.trajectories)


def check_sample(
    sample: Sample, *, vocabulary: int, max_response_tokens: int, versions: Sequence[int] | range
) -> Refusal | None:
    """Return why `sample` must not be trained on, or None.

    `versions` are the versions that were ever published to this engine.
    """
    length = len(sample.tokens)
    if length == 0:
        return Refusal("empty", "the response has no token")
    if len(sample.log_probs) != length or len(sample.versions) != length:
        return Refusal(
            "length_mismatch",
            f"{length} tokens, {len(sample.log_probs)} log-probs, {len(sample.versions)} versions",
        )
    if length > max_response_tokens:
        return Refusal("too_long", f"{length} tokens, at most {max_response_tokens} were asked for")
    if sample.finish_reason not in ("stop", "length"):
        return Refusal("finish_reason", f"finish reason {sample.finish_reason!r}")
    outside = (sample.tokens < 0) | (sample.tokens >= vocabulary)
    if outside.any():
        token = int(sample.tokens[outside][0])
        return Refusal("token_out_of_vocabulary", f"token id {token}, vocabulary {vocabulary}")
    if not np.isfinite(sample.log_probs).all():
        position = int(np.flatnonzero(~np.isfinite(sample.log_probs))[0])
        return Refusal(
            "log_prob_not_finite", f"log-prob {sample.log_probs[position]} at token {position}"
        )
    unknown = [int(v) for v in np.unique(sample.versions) if v not in versions]
    if unknown:
        return Refusal("version_unknown", f"version {unknown[0]} was never published")
    return None
