"""What a task is in a config file: where the prompts come from and who grades the responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scalar = bool | int | float | str
Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _RecordFields(_Section):
    """Which fields of a record hold what. A record has `prompt_field` or `messages_field`."""

    prompt_field: Name = "prompt"
    """Field with the prompt as plain text."""
    messages_field: Name = "messages"
    """Field with the prompt as a chat: a list of {"role": ..., "content": ...}."""
    answer_field: Name = "answer"
    """Field with the answer: a string or a whole number, not empty."""
    answer_after: Name | None = None
    """Keep only what stands after the last occurrence of this marker (GSM8K: "####")."""
    metadata_field: Name = "metadata"
    """Optional field handed to the grader: text as it is, anything else as JSON."""


class JsonlSource(_RecordFields):
    """A file with one JSON object per line. Blank lines are skipped."""

    type: Literal["jsonl"] = "jsonl"
    path: Path
    """The file; a relative path starts at the working directory."""


class ReasoningGymSource(_Section):
    """A procedural dataset of the reasoning-gym package."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: Name
    """Name in reasoning-gym's registry, such as "chain_sum"."""
    size: int = Field(gt=0)
    """How many prompts to generate."""
    seed: int = Field(default=0, ge=0)
    """The generator's seed."""
    params: dict[str, Scalar] = {}
    """The dataset's own parameters, such as {min_terms: 2}."""


class HuggingFaceSource(_RecordFields):
    """A dataset of the Hugging Face hub (needs a network or its cache), or a local folder."""

    type: Literal["hugging_face"] = "hugging_face"
    name: Name
    """Hub name such as "openai/gsm8k", or a folder with data files."""
    subset: str | None = None
    """The dataset's configuration, such as "main"."""
    split: Name = "train"
    """The split, such as "train" or "test"."""


class ExactGrader(_Section):
    """1 where the response says exactly the answer, else 0."""

    type: Literal["exact"] = "exact"
    after: Name | None = None
    """Compare what stands after the last occurrence of this marker; a response without the
    marker scores 0. Unset: compare the whole response."""
    strip: bool = True
    """Ignore white space at both ends of the response's part and of the answer."""
    require_stop: bool = False
    """A response that did not end with an end-of-sequence token scores 0."""


class NumericGrader(_Section):
    """1 where the last number in the response equals the answer, else 0."""

    type: Literal["numeric"] = "numeric"
    tolerance: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Allowed difference: relative to the larger number, absolute for numbers below 1."""


class MathVerifyGrader(_Section):
    """1 where math-verify finds response and answer mathematically equal, else 0."""

    type: Literal["math_verify"] = "math_verify"
    timeout_s: Seconds = 5.0
    """Seconds for one response; after that its reward is 0."""


class ReasoningGymGrader(_Section):
    """The score, 0 to 1, that the reasoning-gym dataset gives itself."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    answer_tag: Annotated[str, Field(pattern=r"^\w+$")] | None = None
    """Score what stands in the last <tag>...</tag>; a response without it scores 0. Unset: score
    the whole response."""
    timeout_s: Seconds = 5.0
    """Seconds for one response; after that its reward is 0."""


class FunctionGrader(_Section):
    """A function of yours: f(response: str, answer: str, metadata: str) -> float."""

    type: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """"module:function"; the module must be importable. It runs in daemon worker processes: it may
    start programs, but not use multiprocessing."""
    timeout_s: Seconds = 5.0
    """Seconds for one response; after that its reward is 0."""


SourceConfig = Annotated[
    JsonlSource | ReasoningGymSource | HuggingFaceSource, Field(discriminator="type")
]
GraderConfig = Annotated[
    ExactGrader | NumericGrader | MathVerifyGrader | ReasoningGymGrader | FunctionGrader,
    Field(discriminator="type"),
]


class TaskConfig(_Section):
    """Prompts and their grader."""

    source: SourceConfig
    """Where the training prompts come from."""
    grader: GraderConfig
    """How a response becomes a reward."""
    held_out: int = Field(default=0, ge=0)
    """How many different prompts of `source` are kept for evaluation and never trained on."""
    held_out_source: SourceConfig | None = None
    """A source of its own for the evaluation prompts, in place of `held_out`. Prompts of `source`
    that also stand there are not trained on."""
    split_seed: int = Field(default=0, ge=0)
    """Which prompts `held_out` picks; the training seed has no part in it."""
    chat: bool = False
    """Put each plain-text prompt through the tokenizer's chat template as one user message."""
    instruction: str = ""
    """Text added at the end of each plain-text prompt, such as how to mark the answer."""

    @model_validator(mode="after")
    def _agree(self) -> TaskConfig:
        if self.held_out and self.held_out_source is not None:
            raise ValueError(
                f"held_out is {self.held_out} and held_out_source is set: give only one of them"
            )
        for name, source in (("source", self.source), ("held_out_source", self.held_out_source)):
            if source is None or isinstance(source, ReasoningGymSource):
                continue
            if isinstance(self.grader, ReasoningGymGrader):
                raise ValueError(
                    f"grader reasoning_gym scores only reasoning_gym prompts, got {name}.type "
                    f"{source.type}: choose another grader or source"
                )
        return self
