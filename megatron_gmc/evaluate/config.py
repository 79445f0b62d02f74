"""The config of `megatron-gmc evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gmc.section import PositiveFloat, Section
from megatron_gmc.tasks.config import TaskConfig

Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class ModelConfig(Section):
    """What is evaluated."""

    path: Path
    """Hugging Face folder, or a Megatron checkpoint (of a run, or from `convert`). With a running
    engine: the folder whose tokenizer and shape its model has."""
    like: Path | None = None
    """Hugging Face folder whose config and tokenizer a Megatron checkpoint belongs to."""


class EmbeddedConfig(Section):
    """The engine in a process of its own on this machine."""

    type: Literal["embedded"] = "embedded"
    start_timeout_s: PositiveFloat = 120.0


class HttpConfig(Section):
    """An engine that is running and keeps its weights."""

    type: Literal["http"] = "http"
    address: str
    """http://host:port or https://…"""
    token_env: str | None = None
    """Environment variable with the engine's bearer token; a token has no place in a file."""

    @model_validator(mode="after")
    def _an_address(self) -> Self:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address: {self.address!r} is no address such as http://host:30000")
        return self


class SamplingConfig(Section):
    """How each prompt is sampled; by default as in training."""

    samples: PositiveInt = 1
    """n: responses of each prompt."""
    k: tuple[PositiveInt, ...] = (1,)
    """pass@k is reported for these k, at most n each."""
    pass_reward: float = 1.0
    """A response passes from this reward on."""
    temperature: PositiveFloat = 1.0
    max_response_tokens: PositiveInt
    seed: NonNegativeInt = 0
    prompts_per_call: PositiveInt = 16
    calls: PositiveInt = 4
    """Calls open at the engine at a time."""
    attempts: PositiveInt = 4
    """How often a refused sample is sampled again before the evaluation stops."""
    request_timeout_s: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.k, default=1) > self.samples:
            raise ValueError(f"k: {max(self.k)} needs as many samples, got {self.samples}")
        return self


class EvaluateConfig(Section):
    """An evaluation: `megatron-gmc evaluate`."""

    output_dir: Path
    """Folder of the evaluation; one that was interrupted goes on in it."""
    model: ModelConfig
    engine: Annotated[EmbeddedConfig | HttpConfig, Field(discriminator="type")] = EmbeddedConfig()
    tasks: Annotated[dict[Name, TaskConfig], Field(min_length=1)]
    """By name. A task's held-out prompts are evaluated, or all of its prompts where it holds none
    out."""
    sampling: SamplingConfig
    grader_workers: PositiveInt = 1

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        if self.model.like is not None and isinstance(self.engine, HttpConfig):
            raise ValueError(
                f"model.like: {self.model.like} with a running engine, which has its weights; name "
                "the Hugging Face folder in model.path alone"
            )
        return self
