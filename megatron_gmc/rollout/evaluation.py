"""Evaluation on the rollout engines: prompts sampled wholly at one version."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_gmc.rollout.sampling import Wanted
from megatron_gmc.rollout.types import BoolArray, IntArray, Prompt, Refusal, Sample, Trajectory


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Rewards and lengths of `count` responses for each prompt, all sampled at `version`.

    rewards float64, lengths int64 (response tokens), truncated bool: each [prompts, count].
    """

    version: int
    rewards: npt.NDArray[np.float64]
    lengths: IntArray
    truncated: BoolArray

    @property
    def mean_reward(self) -> float:
        return float(self.rewards.mean())


@dataclass(eq=False)
class PendingEvaluation:
    """An evaluation under way; `calls` are the slices of prompts not sent yet."""

    version: int
    prompts: Sequence[Prompt]
    count: int
    calls: list[range]
    future: concurrent.futures.Future[EvaluationResult]
    filled: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)

    def wanted(self, indices: range, seed: int, first_number: int) -> list[Wanted]:
        """What to sample for the prompts `indices`; numbers go up from `first_number`.

        Seeds depend on the prompt's place alone, so evaluations of two versions share their
        random numbers.
        """
        return [
            Wanted(
                number=first_number + place,
                label=f"evaluation sample {index}",
                prompt=self.prompts[index],
                count=self.count,
                seed_key=(seed, "evaluation", index),
                refuse=self._refuse,
            )
            for place, index in enumerate(indices)
        ]

    def finish(self) -> bool:
        """Hand out the result once every prompt is filled; return whether that was now."""
        if len(self.filled) < len(self.prompts):
            return False
        rows = [self.filled[index] for index in range(len(self.prompts))]
        self.future.set_result(
            EvaluationResult(
                version=self.version,
                rewards=np.array([[one.reward for one in row] for row in rows]),
                lengths=np.array([[len(one.sample.tokens) for one in row] for row in rows]),
                truncated=np.array(
                    [[one.sample.finish_reason == "length" for one in row] for row in rows]
                ),
            )
        )
        return True

    def _refuse(self, sample: Sample) -> Refusal | None:
        if bool((sample.versions == self.version).all()):
            return None
        found = [int(version) for version in np.unique(sample.versions)]
        return Refusal(
            "version_not_exact", f"versions {found}, the evaluation is of version {self.version}"
        )
