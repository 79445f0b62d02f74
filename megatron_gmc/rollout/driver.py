"""The rollout driver: keeps the engines busy in the background while the learner works.

It lives on the learner's rank 0. One daemon thread runs an event loop with all engine calls; the
training loop talks to it through the plain methods below. What may run when is the scheduler's
decision; see its docstring for the guarantee on the lag.

In exact mode a run is repeatable: every request to an engine has a fixed composition (submission
n belongs to call n // request_groups), its seed depends on the run's seed, the submission and the
attempt alone, and no engine changes weights before everything of the old version is complete,
resampled members included.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron_gmc.rollout.engine import Engine, EngineError
from megatron_gmc.rollout.evaluation import EvaluationResult
from megatron_gmc.rollout.fleet import FleetPolicy
from megatron_gmc.rollout.loop import RolloutLoop
from megatron_gmc.rollout.meter import LEARNER, Meter
from megatron_gmc.rollout.plan import RolloutPlan
from megatron_gmc.rollout.sampling import Decode, Grade, GroupSampler
from megatron_gmc.rollout.scheduler import LagScheduler
from megatron_gmc.rollout.state import RolloutState, check_state
from megatron_gmc.rollout.types import Group, Prompt, SamplingParams

log = logging.getLogger(__name__)
T = TypeVar("T")

# How often a waiting caller looks whether the loop's thread is alive.
ALIVE_CHECK_S = 0.5


class RolloutDriver:
    """Sync facade of the rollout.

    Order of calls: `start`, then `publish` the version that training starts at (0, or the one of
    `state`), then for each step t `next_batch(t)` and `publish(t + 1, …)`; with S optimizer steps
    a batch, `next_batch` for the S steps and then `publish(t + S, …)`. Engines sample nothing
    before the first `publish`.

    Every failure of the loop or of an engine ends the rollout: from then on each method except
    `metrics` and `close` raises it as an EngineError, and so do all futures.

    Args:
        prompt_at: the prompt of a submission number, for any number; same number, same prompt.
        decode: token ids to text, without special tokens; runs in the grader's thread.
        group_size: G, trajectories of a group.
        vocabulary: token ids must be below it.
        prompt_fingerprint: names the prompts and their order; a state made with others is refused.
        state: where to go on; None starts at step 0.
        request_groups: groups of one engine call; it must divide the groups of a step, and all of
            them are one call when None.
        calls_per_engine: sampling calls open at one engine at a time; None: all that the scheduler
            admits. An engine that works its calls off one by one should have 1 in bounded mode,
            so that newer weights do not queue behind calls.
        attempts: how often a place of a group is sampled before the run ends with an error.
        stall_timeout_s: an engine or grader that answers none of its calls for so long is taken
            for dead.
        fleet: brings engines that fail back while others do their work; None: the first failure
            of an engine ends the run.
        close_timeout_s: how long `close` waits for the engines.

    Raises ValueError for a setting out of range or a state that these settings cannot go on from.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        scheduler: LagScheduler,
        prompt_at: Callable[[int], Prompt],
        grade: Grade,
        decode: Decode,
        params: SamplingParams,
        group_size: int,
        vocabulary: int,
        seed: int,
        prompt_fingerprint: str,
        state: RolloutState | None = None,
        request_groups: int | None = None,
        calls_per_engine: int | None = None,
        attempts: int = 4,
        stall_timeout_s: float = 1800.0,
        fleet: FleetPolicy | None = None,
        close_timeout_s: float = 20.0,
    ) -> None:
        per_step = scheduler.groups_per_step
        request_groups = request_groups or per_step
        if per_step % request_groups:
            raise ValueError(
                f"request_groups must divide the {per_step} groups of a step, got {request_groups}"
            )
        if not engines or group_size < 1 or (calls_per_engine is not None and calls_per_engine < 1):
            raise ValueError(
                "engines, group_size and calls_per_engine must be 1 or above, got "
                f"{len(engines)}, {group_size} and {calls_per_engine}"
            )
        if state is not None:
            check_state(state, scheduler, group_size, prompt_fingerprint)
        self._close_timeout_s = close_timeout_s
        self._meter = Meter(len(engines))
        sampler = GroupSampler(params, grade, decode, vocabulary, attempts, self._meter)
        plan = RolloutPlan(
            scheduler=scheduler,
            prompt_at=prompt_at,
            prompt_fingerprint=prompt_fingerprint,
            group_size=group_size,
            seed=seed,
            request_groups=request_groups,
            calls_per_engine=calls_per_engine,
            stall_timeout_s=stall_timeout_s,
            fleet=fleet,
        )
        self._rollout = RolloutLoop(plan, engines, sampler, self._meter, state)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._started = self._closing = False

    def start(self) -> None:
        """Start the thread, which starts the engines; does not wait for them."""
        self._loop.call_soon(self._rollout.start)
        self._started = True
        self._thread.start()

    def next_batch(self, step: int) -> list[Group]:
        """Block until the whole batch that `step` lies in is there; return the groups of `step`.

        The steps of the batch may be asked for in any order and again, until `publish`,
        `next_batch` or `checkpoint_state` shows that the learner is past the batch. Raises
        EngineError as soon as the rollout has failed, ValueError for a step out of turn.
        """
        with self._meter.during("learner_wait", LEARNER):
            return self._ask(lambda: self._rollout.batch(step))

    def publish(self, version: int, folder: Path) -> concurrent.futures.Future[None]:
        """Announce the weights of `version` under `folder`; does not wait for the engines.

        Each version that ends a batch is published once, in order. The future is done when no
        engine needs the folder any more; it may be deleted then. Callbacks of the future run on
        the loop's thread.
        """

        async def publish() -> concurrent.futures.Future[None]:
            return self._rollout.publish(version, folder)

        return self._ask(publish)

    def evaluate(
        self, prompts: Sequence[Prompt], version: int, count: int
    ) -> concurrent.futures.Future[EvaluationResult]:
        """Sample `count` responses of each prompt wholly at `version`, and grade them.

        Engines go to `version` and do not pass it before the evaluation is complete. Raises
        ValueError when `version` was not published or an engine is past it already.
        """

        async def evaluate() -> concurrent.futures.Future[EvaluationResult]:
            return self._rollout.evaluate(prompts, version, count)

        return self._ask(evaluate)

    def checkpoint_state(self, version: int) -> RolloutState:
        """What a checkpoint of `version` needs to resume; the learner stands before that step.

        Exact mode: waits until everything that older versions must sample is complete, so that
        the resumed run repeats this one. Bounded mode: returns at once; submissions in flight are
        sampled again after a restart.
        """
        return self._ask(lambda: self._rollout.state(version))

    def release_memory(self) -> None:
        """Have the engines give their device's memory back until the next version is published.

        Only where nothing is sampled meanwhile: at exact lag 0, after the batch and evaluations.
        """
        self._ask(self._rollout.release_memory)

    def metrics(self) -> dict[str, float]:
        """Figures since the last call; their names are listed at `Meter.read`."""
        return self._meter.read()

    def close(self) -> None:
        """Stop sampling and close the engines; safe to call twice, never hangs."""
        if not self._started:
            self._loop.close()
            return
        if not self._closing:
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        # The tasks and the engines each get the timeout once.
        self._thread.join(2 * self._close_timeout_s + 1)
        if self._thread.is_alive():
            log.warning("the rollout thread did not end; an engine blocks its event loop")
        else:
            self._loop.close()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._rollout.fail(EngineError("the rollout loop has ended"))
            self._loop.run_until_complete(self._rollout.shut_down(self._close_timeout_s))

    def _ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop's thread and wait for its answer.

        An interrupt (Ctrl-C) takes the question back and changes nothing.
        """
        if not self._thread.is_alive():
            self._rollout.raise_failure()
            raise EngineError("the rollout driver is not running; call start first")
        asked = question()
        answer = asyncio.run_coroutine_threadsafe(asked, self._loop)
        try:
            while not concurrent.futures.wait([answer], timeout=ALIVE_CHECK_S).done:
                if not self._thread.is_alive() and not answer.done():
                    asked.close()  # nobody runs it any more
                    self._rollout.raise_failure()
            return answer.result()
        finally:
            answer.cancel()
