"""What SGLang's `/generate` answers, and the sample or refusal that each answer comes to."""

from __future__ import annotations

from typing import Annotated, get_args

import numpy as np
from pydantic import Field, TypeAdapter

from megatron_gmc.rollout.http_session import Wire
from megatron_gmc.rollout.types import FinishReason, IntArray, Refusal, Sample

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _FinishReason(Wire):
    type: str


class _VersionSpan(Wire):
    version: str
    start: int
    end: int


class _MetaInfo(Wire):
    finish_reason: _FinishReason | None
    completion_tokens: int
    weight_versions: list[_VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, Int64, str | None]] | None = None


class GenerateAnswer(Wire):
    """One response; fields and nesting are SGLang's."""

    output_ids: list[Int64]
    meta_info: _MetaInfo


GENERATE_ANSWERS = TypeAdapter(list[GenerateAnswer])
_FINISH_REASONS: dict[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}


def to_sample(answer: GenerateAnswer) -> Sample | Refusal:
    """The sample of an answer, each token with its log-prob and version, or why there is none."""
    ids, meta = answer.output_ids, answer.meta_info
    reason = meta.finish_reason.type if meta.finish_reason else None
    if reason == "abort":
        return Refusal("aborted", f"the engine aborted after {len(ids)} tokens")
    if reason not in _FINISH_REASONS:
        return Refusal("finish_reason", f"finish reason {reason!r}")
    if meta.completion_tokens != len(ids):
        return Refusal(
            "length_mismatch", f"{len(ids)} tokens, {meta.completion_tokens} were announced"
        )
    entries = meta.output_token_logprobs
    if entries is None:
        return Refusal("log_prob_missing", "the answer carries no log-probs")
    if len(entries) != len(ids):
        return Refusal("length_mismatch", f"{len(ids)} tokens, {len(entries)} log-probs")
    log_probs: list[float] = []
    for position, (token, (log_prob, log_prob_token, _)) in enumerate(
        zip(ids, entries, strict=True)
    ):
        if log_prob is None:
            return Refusal("log_prob_missing", f"token {position} has no log-prob")
        if log_prob_token != token:
            return Refusal(
                "log_prob_missing",
                f"token {position} is {token}, its log-prob is that of token {log_prob_token}",
            )
        log_probs.append(log_prob)
    versions = _token_versions(meta.weight_versions, len(ids))
    if isinstance(versions, Refusal):
        return versions
    with np.errstate(over="ignore"):  # beyond float32 it becomes infinite, which is refused
        log_prob_array = np.array(log_probs, dtype=np.float32)
    return Sample(
        tokens=np.array(ids, dtype=np.int64),
        log_probs=log_prob_array,
        versions=versions,
        finish_reason=_FINISH_REASONS[reason],
    )


def _token_versions(spans: list[_VersionSpan] | None, length: int) -> IntArray | Refusal:
    """Version of each token, int64 [length], from spans [start, end) that must cover all tokens."""
    versions: IntArray = np.empty(length, dtype=np.int64)
    covered = 0
    for span in spans or []:
        version = as_version(span.version)
        if version is None:
            return Refusal("version_unknown", f"version {span.version!r} is not a number")
        if span.start != covered or not span.start <= span.end <= length:
            return Refusal("version_missing", f"span {span.start}:{span.end} after {covered}")
        versions[span.start : span.end] = version
        covered = span.end
    if covered != length:
        return Refusal("version_missing", f"{covered} of {length} tokens carry a version")
    return versions


def as_version(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
