"""The rollout's part of a checkpoint: an exact round trip, and refusals of what cannot go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, LagScheduler
from megatron_gmc.rollout.state import ARRAYS, RECORD, RolloutState, check_state
from megatron_gmc.rollout.types import Group, Prompt, Sample, Trajectory
from tests.rollout.scripted import content

texts = st.text(max_size=8)
int64s = st.integers(-(2**63), 2**63 - 1)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 5))
    sample = Sample(
        tokens=np.array(draw(st.lists(int64s, min_size=length, max_size=length)), dtype=np.int64),
        # Any bit pattern: a subnormal or a negative zero must come back as it was.
        log_probs=np.array(
            draw(st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length)),
            dtype=np.uint32,
        ).view(np.float32),
        versions=np.array(draw(st.lists(int64s, min_size=length, max_size=length)), dtype=np.int64),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
    )
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=np.bool_)
    return Trajectory(sample, mask, draw(st.floats(allow_nan=False)))


prompts = st.builds(
    Prompt,
    id=texts,
    text=texts,
    tokens=st.lists(st.integers(0, 2**40)).map(tuple),
    answer=texts,
    metadata=texts,
)
states = st.builds(
    RolloutState,
    next_step=st.integers(0, 9),
    submitted=st.integers(0, 99),
    groups=st.lists(
        st.builds(
            Group,
            id=st.integers(0, 99),
            prompt=prompts,
            trajectories=st.lists(trajectories(), min_size=1, max_size=3).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    groups_per_step=st.integers(1, 9),
    prompt_fingerprint=texts,
    consumed_ahead=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@given(states)
@settings(max_examples=100, deadline=None)
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, state: RolloutState) -> None:
    """D1: bits of log-probs and rewards, masks, versions and prompts all come back."""
    folder = tmp_path_factory.mktemp("state")
    state.save(folder)
    loaded = RolloutState.load(folder)
    assert content(loaded.groups) == content(state.groups)
    assert replace(loaded, groups=()).__dict__ == replace(state, groups=()).__dict__
    dtypes = {
        (one.sample.tokens.dtype.str, one.sample.log_probs.dtype.str, one.mask.dtype.str)
        for group in loaded.groups
        for one in group.trajectories
    }
    assert dtypes <= {("<i8", "<f4", "|b1")}


def group(number: int, versions: list[int], members: int = 2) -> Group:
    length = len(versions)
    sample = Sample(
        tokens=np.arange(length),
        log_probs=np.full(length, -0.5, dtype=np.float32),
        versions=np.array(versions),
        finish_reason="stop",
    )
    one = Trajectory(sample, np.ones(length, dtype=np.bool_), 1.0)
    return Group(number, Prompt("p", "t", (1,), "a"), (one,) * members)


def state(*groups: Group, next_step: int = 3) -> RolloutState:
    return RolloutState(next_step, 12, groups, groups_per_step=2, prompt_fingerprint="mine")


def exact_state() -> RolloutState:
    return state(group(6, [2, 2]), group(7, [2, 2]))


EXACT = LagScheduler(ExactLag(1), groups_per_step=2)


def test_what_is_in_flight_is_what_was_sent_and_is_not_finished() -> None:
    assert state(group(6, [2]), group(9, [2])).in_flight == [7, 8, 10, 11]


def test_a_state_of_this_run_is_accepted() -> None:
    check_state(exact_state(), EXACT, 2, "mine")
    bounded = LagScheduler(BoundedLag(1), groups_per_step=2)
    check_state(state(group(7, [2, 3])), bounded, 2, "mine")


@pytest.mark.parametrize(
    ("changed", "scheduler", "group_size", "message"),
    [
        (replace(exact_state(), prompt_fingerprint="other"), EXACT, 2, "made with prompts 'other'"),
        (exact_state(), LagScheduler(ExactLag(1), 3), 2, "2 prompts a step, this run has 3"),
        (exact_state(), EXACT, 4, "groups of 2, this run of 4"),
        (exact_state(), LagScheduler(ExactLag(2), 2), 2, "versions 2 to 2, which lag 2 .exact."),
        (state(group(6, [1, 2])), LagScheduler(BoundedLag(1), 2), 2, "versions 1 to 2, which lag"),
        (state(group(5, [2, 2])), EXACT, 2, "submission 5, which was consumed already"),
        (state(group(6, [2, 2])), EXACT, 2, "lacks submission 7"),
        (
            replace(state(group(7, [2, 3])), consumed_ahead=(6, 7)),
            LagScheduler(BoundedLag(1, order="earliest_deadline"), 2),
            2,
            "submission 7, which was consumed already",
        ),
        (
            replace(state(group(4, [2, 2])), consumed_ahead=(5, 6)),
            LagScheduler(BoundedLag(1), 2),
            2,
            "can be consumed in time at lag ≤ 1 .bounded.; keep the lag and its order",
        ),
    ],
)
def test_a_state_that_cannot_go_on_is_refused(
    changed: RolloutState, scheduler: LagScheduler, group_size: int, message: str
) -> None:
    """D4, L3: other prompts, sizes or lag would break what the run promises."""
    with pytest.raises(ValueError, match=message):
        check_state(changed, scheduler, group_size, "mine")


def truncate(folder: Path) -> None:
    data = (folder / ARRAYS).read_bytes()
    (folder / ARRAYS).write_bytes(data[: len(data) // 2])


def remove_array_file(folder: Path) -> None:
    (folder / ARRAYS).unlink()


def break_json(folder: Path) -> None:
    (folder / RECORD).write_text("{")


def other_format(folder: Path) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(record | {"format": 9}))


def drop_trajectory(folder: Path) -> None:
    record = json.loads((folder / RECORD).read_text())
    record["groups"][0]["finish_reasons"].pop()
    (folder / RECORD).write_text(json.dumps(record))


def shorten_log_probs(folder: Path) -> None:
    arrays = load_file(folder / ARRAYS)
    save_file(arrays | {"log_probs": arrays["log_probs"][:-1]}, folder / ARRAYS)


@pytest.mark.parametrize(
    "damage",
    [truncate, remove_array_file, break_json, other_format, drop_trajectory, shorten_log_probs],
)
def test_damage_is_named(tmp_path: Path, damage: object) -> None:
    exact_state().save(tmp_path)
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(ValueError, match=f"cannot read the rollout state under {tmp_path}"):
        RolloutState.load(tmp_path)
