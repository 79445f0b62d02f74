"""One engine as the driver sees it: which version it holds and how much it was given to do."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_gmc.rollout.engine import Engine, EngineError
from megatron_gmc.rollout.meter import Meter
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams

log = logging.getLogger(__name__)

NO_VERSION = -1
"""Held by an engine that has loaded no weights of this run yet."""


class EngineChannel:
    """Wraps an engine; every error that comes out of it is an EngineError with its name.

    `version` is what the engine acknowledged, `asked` what it was last told to load (equal while
    it is not switching), `versions` all that it was ever told to load, newest first. `calls` are
    open, for at most `tokens` tokens. `fault` says why the engine was last out of service,
    `failures` how often in a row it failed, `excluded` that it is not brought back any more.
    `life` rises with each failure, so that what a call of an earlier life says can be told apart.
    """

    def __init__(
        self, engine: Engine, meter: Meter, limit: int | None, answered: Callable[[], None]
    ) -> None:
        self.name = engine.name
        self.started = False
        self.version = NO_VERSION
        self.asked = NO_VERSION
        self.versions: deque[int] = deque()
        self.calls = 0
        self.tokens = 0
        self.fault = "it has not started yet"
        self.failures = 0
        self.excluded = False
        self.life = 0
        self._engine = engine
        self._meter = meter
        self._limit = limit
        self._answered = answered

    @property
    def free(self) -> bool:
        """Whether one more sampling call may be opened."""
        return self.started and (self._limit is None or self.calls < self._limit)

    async def start(self) -> None:
        """Start the engine, or start it anew; it holds no version of this run after that."""
        with self._meter.during("start", self.name), self._named():
            await self._engine.start()
        self.started = True

    def leave(self, error: EngineError) -> None:
        """Take the engine out of service: it gets no call and no weights until `start`."""
        self.started = False
        self.version = self.asked = NO_VERSION
        self.fault = str(error)
        self.failures += 1
        self.life += 1

    def ask(self, version: int) -> None:
        """Note, before `load` runs, that the engine goes to `version`."""
        assert version > self.asked == self.version, (version, self.asked, self.version)
        self.asked = version
        if version not in self.versions:
            self.versions.appendleft(version)

    async def load(self, folder: Path, version: int) -> None:
        """Load the version asked for; return when the engine holds it."""
        life = self.life
        with self._meter.during("switch", self.name), self._named():
            await self._engine.update_weights(folder, version)
            held = await self._engine.version()
        if self.life != life:
            raise EngineError(f"{self.name} failed while it loaded version {version}")
        if held != version:
            raise EngineError(
                f"{self.name}: acknowledged version {version} but holds {held}; restart the engine"
            )
        self.version = version

    def reserve(self) -> None:
        """Count a call from the moment it is decided on; `sample` gives it back."""
        self.calls += 1

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        """Sample a reserved call; the answer has `count` entries for each request."""
        tokens = sum(
            one.count * (len(one.prompt_tokens) + params.max_response_tokens) for one in requests
        )
        self.tokens += tokens
        try:
            with self._meter.during("sample", self.name), self._named():
                answers = await self._engine.sample(requests, params)
        finally:
            self.calls -= 1
            self.tokens -= tokens
        self._answered()
        asked = [request.count for request in requests]
        got = [len(answer) for answer in answers]
        if got != asked:
            raise EngineError(
                f"{self.name}: answered {got} samples for requests of {asked}; "
                "check that the engine speaks this version's protocol"
            )
        return answers

    async def release_memory(self) -> None:
        """Give memory to the learner; the engine samples again after the next load."""
        assert self.calls == 0, f"{self.name} still samples"
        with self._named():
            await self._engine.release_memory()

    async def close(self) -> None:
        with self._named():
            await self._engine.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            if self.name in str(error):
                raise
            raise EngineError(f"{self.name}: {error}") from error


async def close_all(channels: Sequence[EngineChannel], timeout_s: float) -> None:
    """Close the engines side by side; what takes longer than `timeout_s` is given up."""
    closing = {asyncio.ensure_future(channel.close()): channel for channel in channels}
    done, _ = await asyncio.wait(closing, timeout=timeout_s)
    for task, channel in closing.items():
        if task not in done:
            log.warning("%s did not close within %g s", channel.name, timeout_s)
            task.cancel()
        elif not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s did not close cleanly: %s", channel.name, error)
