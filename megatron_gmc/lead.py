"""What global rank 0 does beside learning: it drives the engines, evaluates and keeps the log."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from pyarrow import Table

from megatron_gmc.config import Config
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.engines import build_engines
from megatron_gmc.errors import NonFiniteError, blamed_on
from megatron_gmc.estimators import mismatch_warning
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.learner.policy_step import StepRecord
from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.evaluation import EvaluationResult
from megatron_gmc.rollout.staleness import lag_shares
from megatron_gmc.rollout.state import RolloutState
from megatron_gmc.rollout.types import FinishReason, Group, Prompt, SamplingParams
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.run_log import RunLog
from megatron_gmc.setup_checks import Task
from megatron_gmc.signals import StopRequest
from megatron_gmc.storage import writing
from megatron_gmc.tasks.graders import GradeJob
from megatron_gmc.tasks.prompts import PromptStream, response_text
from megatron_gmc.trajectory_record import NON_FINITE, table_of, write_table

NO_CHECKPOINT = -1
# How soon a wait for samples notices that the run is asked to stop.
_STOP_CHECK_S = 0.2


class Lead:
    """Rank 0's side of a run. `close` ends the engine, the graders and the log."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        task: Task,
        folder: RunFolder,
        checkpoint: Path | None,
    ) -> None:
        self._config = config
        self._task = task
        self._folder = folder
        self._grader = task.grader
        stream = PromptStream(task.prompts.train, config.train.seed)
        with blamed_on("--resume"):
            state = RolloutState.load(checkpoint / "rollout") if checkpoint else None
            engines = build_engines(config, shape, folder)
            self._driver = RolloutDriver(
                engines=engines.engines,
                scheduler=config.scheduler(),
                prompt_at=stream.prompt,
                prompt_fingerprint=stream.fingerprint,
                grade=self._grade,
                decode=self._decode,
                params=SamplingParams(
                    temperature=config.rollout.temperature,
                    max_response_tokens=config.rollout.max_response_tokens,
                    stop_token_ids=task.stop_token_ids,
                ),
                group_size=config.rollout.group_size,
                vocabulary=shape.vocab_size,
                seed=config.train.seed,
                state=state,
                request_groups=engines.request_groups,
                calls_per_engine=engines.calls_per_engine,
                fleet=engines.fleet,
                attempts=config.rollout.max_attempts,
            )
        self.resumes_at = state.next_step if state else NO_CHECKPOINT
        """The version to load, NO_CHECKPOINT where the run starts from the policy's weights."""
        self._warned = False
        self._evaluations: list[Future[EvaluationResult]] = []
        # Of the batch under way, by step.
        self._groups: dict[int, list[Group]] = {}
        self._consumed: StepRecord | None = None
        self._asker = ThreadPoolExecutor(1, "next batch")
        self._log = RunLog(
            folder.path,
            title=f"{config.estimator.name}, {config.scheduler().lag}",
            steps=config.train.steps,
            start=state.next_step if state else 0,
            wandb=config.train.wandb,
        )
        if engines.choice:
            self.say(engines.choice)

    def start(self) -> None:
        """Start the engine; returns before it is ready."""
        shutil.rmtree(self._folder.weights, ignore_errors=True)
        self._driver.start()

    def next_batch(self, step: int, stop: StopRequest) -> Batch | None:
        """Block until the groups of `step` are there, and those of its whole batch.

        None once the run is asked to stop.
        """
        asked = self._asker.submit(self._driver.next_batch, step)
        while not wait([asked], timeout=_STOP_CHECK_S).done and not stop.asked:
            pass
        if stop.asked:
            return None
        groups = self._groups[step] = asked.result()
        return Batch.from_rows(rows_of(groups))

    def take_device(self) -> None:
        """Have a colocated engine give the device's memory to the learner, once it is idle."""
        self._write_evaluations(wait=True)
        self._driver.release_memory()

    def publish(self, version: int, folder: Path) -> None:
        """Hand the weights under `folder` to the engine, which takes them when the lag allows.

        The folder is removed once no engine needs it.
        """
        taken = self._driver.publish(version, folder)
        taken.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))

    def evaluate(self, version: int, *, fresh: bool) -> None:
        """Ask for held-out accuracy at `version`, if it is due; `write` logs it once it is there.

        `fresh` says that this version was not evaluated by an earlier run of the same folder.
        """
        ends = version in (0, self._config.train.steps)
        settings = self._config.evaluation
        prompts = self._task.prompts.held_out
        if not prompts or not fresh or not (ends or version % settings.every == 0):
            return
        chosen = prompts if ends else prompts[: settings.prompts]
        self._evaluations.append(self._driver.evaluate(chosen, version, 1))

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Log what the step to `version` measured, and every evaluation that is ready."""
        groups = self._groups.pop(version - 1)
        rewards = np.array([t.reward for group in groups for t in group.trajectories])
        samples = [t.sample for group in groups for t in group.trajectories]
        prompts = sum(len(g.prompt.tokens) * len(g.trajectories) for g in groups)
        tokens = prompts + sum(len(sample.tokens) for sample in samples)
        truncated = [sample.finish_reason == "length" for sample in samples]
        rollout = {f"rollout/{name}": v for name, v in self._driver.metrics().items()}
        self._log.write(
            version,
            {
                "reward/mean": float(rewards.mean()),
                "throughput/tokens_per_s": tokens / metrics["time/step_s"],
                "response/mean_tokens": float(np.mean([len(s.tokens) for s in samples])),
                "response/truncated_share": float(np.mean(truncated)),
                **metrics,
                **lag_shares(groups, version - 1),
                **rollout,
                **{name: float(count) for name, count in self._grader.counts().items()},
            },
        )
        warning = mismatch_warning(metrics)
        if warning and not self._warned:
            self._warned = True
            self.say(warning)
        self._write_evaluations(wait=False)

    def write_aside(self, version: int, metrics: Mapping[str, float]) -> None:
        """Log more about `version`, after `write`."""
        self._log.write_aside(version, metrics)

    def checkpoint_state(self, version: int) -> RolloutState:
        """The rollout's part of a checkpoint, once every evaluation up to it is logged.

        In exact mode it also waits for all samples that older versions must give.
        """
        self._write_evaluations(wait=True)
        return self._driver.checkpoint_state(version)

    def saw(self, consumed: StepRecord) -> None:
        """Keep what the learner made of the groups that `next_batch` gave it."""
        self._consumed = consumed

    def save_trajectories(self, step: int) -> None:
        """Write the groups that step `step` consumed to trajectories/, if it is due."""
        every = self._config.train.save_trajectories
        if every is not None and step % every == 0:
            path = self._folder.trajectories / f"step_{step:06d}.parquet"
            with writing(path):
                write_table(self._record(step), path)

    def save_non_finite(self, error: NonFiniteError, step: int) -> Path:
        """Write the trajectories that stopped step `step` into a file for inspection.

        Where none alone is at fault, the file holds the whole batch.
        """
        record = self._record(step)
        path = self._folder.path / NON_FINITE.format(step)
        write_table(record.take(list(error.trajectories)) if error.trajectories else record, path)
        return path

    def _record(self, step: int) -> Table:
        assert self._consumed is not None, "no step was taken"
        groups = self._groups[step]
        return table_of(groups, self._consumed, step=step, version=step, decode=self._decode)

    def say(self, text: str) -> None:
        self._log.say(text)

    def close(self) -> None:
        self._driver.close()
        self._asker.shutdown()
        self._grader.close()
        self._log.close()
        shutil.rmtree(self._folder.weights, ignore_errors=True)

    def _write_evaluations(self, *, wait: bool) -> None:
        while self._evaluations and (wait or self._evaluations[0].done()):
            result = self._evaluations.pop(0).result()
            self._log.write_aside(
                result.version,
                {
                    "evaluation/accuracy": result.mean_reward,
                    "evaluation/prompts": float(len(result.rewards)),
                    "evaluation/mean_tokens": float(result.lengths.mean()),
                    "evaluation/truncated_share": float(result.truncated.mean()),
                },
            )

    def _grade(self, jobs: Sequence[tuple[Prompt, str, FinishReason]]) -> list[float]:
        return self._grader.grade(
            [GradeJob(text, prompt.answer, prompt.metadata, why) for prompt, text, why in jobs]
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        ended = tokens[-1] in self._task.stop_token_ids
        return response_text(self._task.tokenizer, tokens, "stop" if ended else "length")


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """The learner's rows of `groups`: the engine's own ids and log-probs, never re-tokenised."""
    return [
        Row(
            id=group.id * len(group.trajectories) + member,
            group=group.id,
            prompt_tokens=group.prompt.tokens,
            response_tokens=trajectory.sample.tokens.tolist(),
            loss_mask=trajectory.mask.tolist(),
            behaviour_log_probs=trajectory.sample.log_probs.tolist(),
            reward=trajectory.reward,
            oldest_version=trajectory.oldest_version,
        )
        for group in groups
        for member, trajectory in enumerate(group.trajectories)
    ]
