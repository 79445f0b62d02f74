"""What a checkpoint keeps of the rollout: the cursor and every finished group, without pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from megatron_gmc.rollout.ledger import Ledger
from megatron_gmc.rollout.scheduler import LagScheduler
from megatron_gmc.rollout.staleness import Completed
from megatron_gmc.rollout.types import Group, Prompt, Sample, Trajectory

FORMAT = 2
ARRAYS = "rollout.safetensors"
RECORD = "rollout.json"


@dataclass(frozen=True, eq=False)
class RolloutState:
    """The rollout at the moment when the learner stands before step `next_step`.

    submitted: every submission below it was sent once; groups: the finished ones that no step
    consumed yet, by submission; consumed_ahead: those consumed before an earlier one, which is
    still to come; prompt_fingerprint: which prompts the numbers mean.
    """

    next_step: int
    submitted: int
    groups: tuple[Group, ...]
    groups_per_step: int
    prompt_fingerprint: str
    consumed_ahead: tuple[int, ...] = ()

    @property
    def first_open(self) -> int:
        """The first submission that was not consumed."""
        return self.next_step * self.groups_per_step - len(self.consumed_ahead)

    @property
    def in_flight(self) -> list[int]:
        """The submissions that were sent but not finished; a restart samples them again."""
        done = {group.id for group in self.groups} | set(self.consumed_ahead)
        return [number for number in range(self.first_open, self.submitted) if number not in done]

    def save(self, folder: Path) -> None:
        """Write two files into `folder`, which must exist; the round trip is exact to the bit.

        rollout.safetensors holds the ragged arrays end to end, rollout.json the rest.
        """
        trajectories = [one for group in self.groups for one in group.trajectories]
        samples = [one.sample for one in trajectories]
        arrays = {
            "lengths": np.array([len(one.tokens) for one in samples], dtype=np.int64),
            "rewards": np.array([one.reward for one in trajectories], dtype=np.float64),
            "tokens": _joined([one.tokens for one in samples], np.dtype(np.int64)),
            "log_probs": _joined([one.log_probs for one in samples], np.dtype(np.float32)),
            "versions": _joined([one.versions for one in samples], np.dtype(np.int64)),
            "mask": _joined([one.mask for one in trajectories], np.dtype(np.bool_)),
        }
        save_file(arrays, folder / ARRAYS)
        record = {
            "format": FORMAT,
            "next_step": self.next_step,
            "submitted": self.submitted,
            "groups_per_step": self.groups_per_step,
            "prompt_fingerprint": self.prompt_fingerprint,
            "consumed_ahead": self.consumed_ahead,
            "groups": [
                {
                    "id": group.id,
                    "prompt": asdict(group.prompt),
                    "finish_reasons": [one.sample.finish_reason for one in group.trajectories],
                }
                for group in self.groups
            ],
        }
        (folder / RECORD).write_text(json.dumps(record))

    @classmethod
    def load(cls, folder: Path) -> RolloutState:
        """Read what `save` wrote. Raises ValueError, naming the file, when it is damaged."""
        try:
            record = json.loads((folder / RECORD).read_text())
            arrays = load_file(folder / ARRAYS)
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']}, this version reads {FORMAT}")
            trajectories = _trajectories(record["groups"], arrays)
            groups = tuple(
                Group(
                    id=entry["id"],
                    prompt=Prompt(**entry["prompt"] | {"tokens": tuple(entry["prompt"]["tokens"])}),
                    trajectories=tuple(next(trajectories) for _ in entry["finish_reasons"]),
                )
                for entry in record["groups"]
            )
            return cls(
                next_step=record["next_step"],
                submitted=record["submitted"],
                groups=groups,
                groups_per_step=record["groups_per_step"],
                prompt_fingerprint=record["prompt_fingerprint"],
                consumed_ahead=tuple(record["consumed_ahead"]),
            )
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"cannot read the rollout state under {folder}: {error!r}; "
                "resume from an older checkpoint"
            ) from error


def check_state(
    state: RolloutState, scheduler: LagScheduler, group_size: int, prompt_fingerprint: str
) -> None:
    """Raise ValueError when a run with these settings cannot go on from `state`."""
    if state.prompt_fingerprint != prompt_fingerprint:
        raise ValueError(
            f"the checkpoint was made with prompts {state.prompt_fingerprint!r}, this run has "
            f"{prompt_fingerprint!r}; resume with the same prompts or start a new run"
        )
    if state.groups_per_step != scheduler.groups_per_step:
        raise ValueError(
            f"the checkpoint has {state.groups_per_step} prompts a step, this run has "
            f"{scheduler.groups_per_step}; keep the number when resuming"
        )
    if state.next_step != scheduler.batch_start(state.next_step):
        raise ValueError(
            f"the checkpoint was made after {state.next_step} steps, inside a batch of "
            f"{scheduler.steps_per_batch}; keep the optimizer steps of a batch when resuming"
        )
    for group in state.groups:
        _check_group(group, state, scheduler, group_size)
    finished = {group.id for group in state.groups}
    for number in range(state.first_open, scheduler.complete_before(state.next_step)):
        if number not in finished:
            raise ValueError(
                f"the checkpoint at version {state.next_step} lacks submission {number}, which "
                f"{scheduler.lag} wants from an older version; keep the lag and the number of "
                "steps of the run that wrote it"
            )
    due = [scheduler.due(group.id, group.oldest_version) for group in state.groups]
    due += [scheduler.due(number, state.next_step) for number in state.in_flight]
    if not scheduler.fits(state.next_step, due):
        raise ValueError(
            f"not all groups of the checkpoint can be consumed in time at {scheduler.lag}; keep "
            "the lag and its order when resuming"
        )


def ledger_of(state: RolloutState | None, scheduler: LagScheduler) -> Ledger[Completed]:
    """The books of a run that goes on from `state`, or of a new one."""
    if state is None:
        return Ledger(scheduler)
    # What the learner had reached when a group became complete is not kept; its newest token's
    # version is the nearest that is.
    finished = {
        group.id: (group.oldest_version, Completed(group, group.newest_version))
        for group in state.groups
    }
    return Ledger(scheduler, state.next_step, state.submitted, finished, state.consumed_ahead)


def _check_group(
    group: Group, state: RolloutState, scheduler: LagScheduler, group_size: int
) -> None:
    if group.id < state.first_open or group.id in state.consumed_ahead:
        raise ValueError(f"the checkpoint holds submission {group.id}, which was consumed already")
    if len(group.trajectories) != group_size:
        raise ValueError(
            f"the checkpoint has groups of {len(group.trajectories)}, this run of {group_size}; "
            "keep the group size when resuming"
        )
    oldest, newest = group.oldest_version, group.newest_version
    if not scheduler.keeps_lag(group.id, oldest, newest):
        raise ValueError(
            f"submission {group.id} of the checkpoint was sampled by versions {oldest} to "
            f"{newest}, which {scheduler.lag} does not allow; keep the lag when resuming"
        )


Ragged = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def _joined(arrays: Sequence[Ragged], dtype: np.dtype[np.generic]) -> Ragged:
    """Concatenate 1-d arrays; no array gives an empty one of `dtype`."""
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _trajectories(
    groups: Sequence[dict[str, list[str]]], arrays: dict[str, Ragged]
) -> Iterator[Trajectory]:
    lengths = [int(length) for length in arrays["lengths"]]
    reasons = [reason for group in groups for reason in group["finish_reasons"]]
    ragged = ("tokens", "log_probs", "versions", "mask")
    if any(len(arrays[name]) != sum(lengths) for name in ragged):
        raise ValueError("the arrays' sizes do not add up")
    if not len(reasons) == len(lengths) == len(arrays["rewards"]):
        raise ValueError("the number of trajectories differs between the two files")
    ends = np.cumsum(lengths)
    parts = {name: np.split(arrays[name], ends[:-1]) for name in ragged}
    for place, reason in enumerate(reasons):
        sample = Sample(
            tokens=parts["tokens"][place].astype(np.int64, copy=False),
            log_probs=parts["log_probs"][place].astype(np.float32, copy=False),
            versions=parts["versions"][place].astype(np.int64, copy=False),
            finish_reason="stop" if reason == "stop" else "length",
        )
        mask = parts["mask"][place].astype(np.bool_, copy=False)
        yield Trajectory(sample, mask, float(arrays["rewards"][place]))
