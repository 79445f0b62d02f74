"""How old what a step consumes is, and what made it so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_gmc.rollout.types import Group


@dataclass(frozen=True, eq=False)
class Completed:
    """A complete group, and the version that the learner had reached by then."""

    group: Group
    version: int


def staleness(
    batch: Sequence[Sequence[Completed]], start: int, finished: Collection[Completed]
) -> dict[str, float]:
    """Figures of a batch, one list of groups a step, whose first step is `start`.

    lag_sampling: versions that the learner made between a trajectory's oldest token and the
    completion of its group; lag_waiting: those from there to the step that consumes it; means over
    trajectories, and their sum is the mean lag. consumed_length_ratio: mean response tokens of
    the batch over those of all `finished` groups, the batch's included; below 1 where short
    responses are taken first.
    """
    sampling, waiting = [], []
    for step, groups in enumerate(batch, start):
        for one in groups:
            for trajectory in one.group.trajectories:
                sampling.append(one.version - trajectory.oldest_version)
                waiting.append(step - one.version)
    taken = _mean_tokens(one.group for groups in batch for one in groups)
    return {
        "lag_sampling": float(np.mean(sampling)),
        "lag_waiting": float(np.mean(waiting)),
        "consumed_length_ratio": taken / _mean_tokens(one.group for one in finished),
    }


def lag_shares(groups: Sequence[Group], step: int) -> dict[str, float]:
    """The lags that step `step` sees, as shares: only those that occur, in rising order.

    lag/trajectories/<n>: of the trajectories, by the version of their oldest token;
    lag/tokens/<n>: of the response tokens, by the version that sampled each.
    """
    trajectories = [one for group in groups for one in group.trajectories]
    oldest = np.array([step - one.oldest_version for one in trajectories])
    tokens = np.concatenate([step - one.sample.versions for one in trajectories])
    shares = {}
    for name, lags in (("trajectories", oldest), ("tokens", tokens)):
        for lag, count in zip(*np.unique(lags, return_counts=True), strict=True):
            shares[f"lag/{name}/{lag}"] = float(count / len(lags))
    return shares


def _mean_tokens(groups: Iterable[Group]) -> float:
    return float(
        np.mean([len(one.sample.tokens) for group in groups for one in group.trajectories])
    )
