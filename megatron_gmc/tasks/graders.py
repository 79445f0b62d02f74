"""Turns responses into rewards: cheap graders here, the others in worker processes."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from megatron_gmc.rollout.types import FinishReason
from megatron_gmc.tasks import grade_worker
from megatron_gmc.tasks.config import (
    ExactGrader,
    FunctionGrader,
    GraderConfig,
    MathVerifyGrader,
    NumericGrader,
    ReasoningGymGrader,
)
from megatron_gmc.tasks.text import after_last, last_number
from megatron_gmc.tasks.worker_process import ScoringFailed, WorkerProcess

logger = logging.getLogger(__name__)

WorkerGrader = MathVerifyGrader | ReasoningGymGrader | FunctionGrader
REASONS = ("grader/raised", "grader/timeout", "grader/died", "grader/not_a_number")


@dataclass(frozen=True)
class GradeJob:
    """One response to grade. `response` is its text without the final end-of-sequence token."""

    response: str
    answer: str
    metadata: str
    finish_reason: FinishReason


class Answered(Protocol):
    """What has an answer to check: a record or a prompt."""

    @property
    def id(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def metadata(self) -> str: ...


class Grader:
    """Grades responses with one grader; safe to call from several threads.

    A grader that raises, runs longer than its `timeout_s`, ends its process or returns something
    that is no number gives reward 0 and is counted; the first of each kind is logged. A NaN or
    infinite reward is returned as it is: the caller refuses that trajectory.

    `workers` processes are started at the first job that needs one; `exact` and `numeric` need
    none. Raises ValueError if a function grader cannot be imported.
    """

    def __init__(self, config: GraderConfig, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"grader workers must be at least 1, got {workers}")
        if isinstance(config, FunctionGrader):
            grade_worker.load_function(config.path)
        self._config = config
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(REASONS, 0)
        self._closed = False
        self._workers: list[WorkerProcess] = []
        if isinstance(config, WorkerGrader):
            self._workers = [WorkerProcess(config.type, _option(config)) for _ in range(workers)]
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # One thread waits for each worker; none starts before the first job.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")

    def grade(self, jobs: Sequence[GradeJob]) -> list[float]:
        """Return the reward of each job, in order. Blocks until all are graded.

        Raises RuntimeError if a worker process cannot be started, or if the grader is closed.
        """
        config = self._config
        if isinstance(config, ExactGrader):
            return [_exact(config, job) for job in jobs]
        if isinstance(config, NumericGrader):
            return [_numeric(config, job) for job in jobs]
        if self._closed:
            raise RuntimeError("the grader is closed")
        return list(self._threads.map(lambda job: self._score(config, job), jobs))

    def counts(self) -> dict[str, int]:
        """How many responses got 0 because their grader failed, by reason, since the start."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Stop the worker processes, whatever they are doing."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()

    def _score(self, config: WorkerGrader, job: GradeJob) -> float:
        if self._closed:
            raise RuntimeError("the grader is closed")
        worker = self._idle.get()
        try:
            return worker.score(job.response, job.answer, job.metadata, config.timeout_s)
        except ScoringFailed as failure:
            if self._closed:
                raise RuntimeError("the grader was closed while it graded") from None
            self._count(f"grader/{failure.reason}", str(failure))
            return 0.0
        finally:
            self._idle.put(worker)

    def _count(self, reason: str, detail: str) -> None:
        with self._lock:
            self._counts[reason] += 1
            first = self._counts[reason] == 1
        if first:
            logger.warning(
                "the %s grader failed, its reward is 0 (%s; later ones are only counted): %s",
                self._config.type,
                reason,
                detail,
            )


def check_answers(config: GraderConfig, prompts: Sequence[Answered]) -> None:
    """Raise ValueError, naming the prompt, for an answer that the grader cannot compare with."""
    if isinstance(config, ReasoningGymGrader):
        _check_entries(prompts)
        return
    for prompt in prompts:
        if isinstance(config, NumericGrader) and last_number(prompt.answer) is None:
            raise ValueError(
                f"prompt {prompt.id}: answer {prompt.answer!r} has no number, which the numeric "
                "grader needs"
            )
        if not prompt.answer and not isinstance(config, FunctionGrader):
            raise ValueError(
                f"prompt {prompt.id} has no answer, which the {config.type} grader needs"
            )


def _check_entries(prompts: Sequence[Answered]) -> None:
    # A few datasets compare with Python objects that do not survive being written as JSON.
    known = next((prompt for prompt in prompts if prompt.answer), None)
    if known is None:
        return
    reward = grade_worker.score_entry(None, known.answer, known.answer, known.metadata)
    if reward != 1:
        raise ValueError(
            f"prompt {known.id}: the dataset scores its own answer {reward}, not 1: its entries "
            "cannot be stored as JSON, so it cannot be used with the reasoning_gym grader"
        )


def _option(config: WorkerGrader) -> str | None:
    if isinstance(config, FunctionGrader):
        return config.path
    return config.answer_tag if isinstance(config, ReasoningGymGrader) else None


def _exact(config: ExactGrader, job: GradeJob) -> float:
    if config.require_stop and job.finish_reason != "stop":
        return 0.0
    part = job.response if config.after is None else after_last(job.response, config.after)
    if part is None:
        return 0.0
    if config.strip:
        return float(part.strip() == job.answer.strip())
    return float(part == job.answer)


def _numeric(config: NumericGrader, job: GradeJob) -> float:
    found, wanted = last_number(job.response), last_number(job.answer)
    if found is None or wanted is None:
        return 0.0
    return float(math.isclose(found, wanted, rel_tol=config.tolerance, abs_tol=config.tolerance))
