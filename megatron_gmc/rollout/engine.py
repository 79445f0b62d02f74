"""The protocol that every rollout engine fulfils; which one runs is one word in the config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams


class EngineError(RuntimeError):
    """The engine is gone, refused a call or answered something that is not its protocol."""


class NoEngineCanError(EngineError):
    """What failed would fail on every other engine as well."""


class Engine(Protocol):
    """A server that samples from the policy and takes new weights.

    Calls are coroutines of the driver's event loop. Every call raises `EngineError`, with the
    engine's name and the remedy, when the engine cannot do it.
    """

    @property
    def name(self) -> str:
        """How log lines and errors call this engine."""
        ...

    async def start(self) -> None:
        """Return once the engine can serve requests.

        Called again after a failure: what is left of the engine is ended first.
        """
        ...

    async def version(self) -> int:
        """The version of the weights that the engine samples from now."""
        ...

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        """Sample every request; the result has one list per request with `count` entries.

        An entry that cannot be trained on comes back as its `Refusal`, never as a padded sample.
        """
        ...

    async def update_weights(self, folder: Path, version: int) -> None:
        """Load the Hugging Face safetensors under `folder` and sample from them as `version`.

        Returns only after the engine acknowledged the version.
        """
        ...

    async def release_memory(self) -> None:
        """Give the device's memory to the learner until the next `update_weights`.

        Called while no sampling call is open.
        """
        ...

    async def close(self) -> None:
        """Stop the engine and everything it started."""
        ...
