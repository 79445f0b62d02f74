"""Which answer a response gives, for majority votes: read as its grader reads it."""

from __future__ import annotations

import re

from megatron_gmc.rollout.types import FinishReason
from megatron_gmc.tasks.config import (
    ExactGrader,
    GraderConfig,
    NumericGrader,
    ReasoningGymGrader,
)
from megatron_gmc.tasks.text import after_last, last_number


def vote(grader: GraderConfig, response: str, reason: FinishReason) -> str | None:
    """The answer, as text that equal answers share; None where the response gives none."""
    if isinstance(grader, ExactGrader):
        if grader.require_stop and reason != "stop":
            return None
        part = response if grader.after is None else after_last(response, grader.after)
        return part.strip() if part is not None and grader.strip else part
    if isinstance(grader, NumericGrader):
        number = last_number(response)
        return None if number is None else repr(number)
    assert isinstance(grader, ReasoningGymGrader), grader
    if grader.answer_tag is None:
        return response.strip()
    tag = re.escape(grader.answer_tag)
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", response, re.DOTALL)
    return found[-1].strip() if found else None


def can_vote(grader: GraderConfig) -> bool:
    """Whether equal answers can be told from different ones without the grader's own judgement.

    math_verify and functions of the user's judge a response against the right answer alone.
    """
    return isinstance(grader, ExactGrader | NumericGrader | ReasoningGymGrader)
