"""The task section: what it accepts and what it refuses, before any file is read."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_gmc.tasks.config import (
    ExactGrader,
    FunctionGrader,
    HuggingFaceSource,
    JsonlSource,
    MathVerifyGrader,
    NumericGrader,
    ReasoningGymGrader,
    ReasoningGymSource,
    TaskConfig,
)

JSONL = {"type": "jsonl", "path": "prompts.jsonl"}
GYM = {"type": "reasoning_gym", "dataset": "chain_sum", "size": 3}


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (JSONL, JsonlSource),
        (GYM, ReasoningGymSource),
        ({"type": "hugging_face", "name": "openai/gsm8k", "subset": "main"}, HuggingFaceSource),
    ],
)
def test_source_is_chosen_by_type(source: dict[str, Any], kind: type) -> None:
    config = TaskConfig.model_validate({"source": source, "grader": {"type": "exact"}})
    assert type(config.source) is kind


@pytest.mark.parametrize(
    ("grader", "kind"),
    [
        ({"type": "exact", "after": ">"}, ExactGrader),
        ({"type": "numeric"}, NumericGrader),
        ({"type": "math_verify", "timeout_s": 2}, MathVerifyGrader),
        ({"type": "reasoning_gym"}, ReasoningGymGrader),
        ({"type": "function", "path": "a.b:c"}, FunctionGrader),
    ],
)
def test_grader_is_chosen_by_type(grader: dict[str, Any], kind: type) -> None:
    assert type(TaskConfig.model_validate({"source": GYM, "grader": grader}).grader) is kind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sorce": JSONL}, r"sorce\n.*not permitted"),
        ({"source": {"type": "csv", "path": "x"}}, "'jsonl', 'reasoning_gym', 'hugging_face'"),
        ({"source": {**JSONL, "pth": "x"}}, "source.jsonl.pth"),
        ({"source": {**GYM, "size": 0}}, "greater than 0"),
        ({"grader": {"type": "exact", "after": ""}}, "at least 1 character"),
        ({"grader": {"type": "exact", "timeout_s": 1}}, "not permitted"),
        ({"grader": {"type": "numeric", "tolerance": -1}}, "greater than or equal to 0"),
        ({"grader": {"type": "numeric", "tolerance": float("nan")}}, "tolerance"),
        ({"grader": {"type": "math_verify", "timeout_s": 0}}, "greater than 0"),
        ({"grader": {"type": "math_verify", "timeout_s": float("inf")}}, "finite number"),
        ({"grader": {"type": "function", "path": "module.function"}}, "match pattern"),
        ({"grader": {"type": "reasoning_gym"}}, "scores only reasoning_gym prompts"),
        ({"held_out": -1}, "greater than or equal to 0"),
        ({"held_out": 2, "held_out_source": JSONL}, "give only one of them"),
    ],
)
def test_refusals_name_the_field(change: dict[str, Any], message: str) -> None:
    config = {"source": JSONL, "grader": {"type": "exact"}, **change}
    with pytest.raises(ValidationError) as error:
        TaskConfig.model_validate(config)
    assert re.search(message, str(error.value)), str(error.value)


def test_the_section_cannot_be_changed() -> None:
    config = TaskConfig.model_validate({"source": JSONL, "grader": {"type": "exact"}})
    with pytest.raises(ValidationError, match="frozen"):
        config.held_out = 3


def test_every_field_is_documented() -> None:
    for section in (TaskConfig, JsonlSource, ReasoningGymSource, HuggingFaceSource, FunctionGrader):
        for name, field in section.model_fields.items():
            assert name == "type" or field.description, f"{section.__name__}.{name}"
