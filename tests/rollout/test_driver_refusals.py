"""Samples that must not be trained on: refused, counted, sampled again, and nothing mixed up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.sampling import GradeJob, derive_seed
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.types import (
    Group,
    Refusal,
    Sample,
    SampleRequest,
    SamplingParams,
)
from tests.rollout.scripted import (
    ScriptedEngine,
    content,
    flatten,
    grade,
    learn,
    make_driver,
    prompt_at,
    response_length,
    running,
)

pytestmark = pytest.mark.timeout(60)

Damage = Callable[[Sample], Sample | Refusal]
GROUP = 8


class Once:
    """Damages member `member` of submission `group` in its first `times` attempts."""

    def __init__(self, group: int, member: int, damage: Damage, times: int = 1) -> None:
        self.group, self.member, self.damage, self.times = group, member, damage, times

    def __call__(self, request: SampleRequest, member: int, sample: Sample) -> Sample | Refusal:
        wanted = self.member if request.count == GROUP else 0
        if request.group_id == self.group and member == wanted and self.times > 0:
            self.times -= 1
            return self.damage(sample)
        return sample


def two_steps(engine: ScriptedEngine, lag: Lag, **changes: Any) -> tuple[list[Group], Any]:
    driver = make_driver([engine], LagScheduler(lag, 2, steps=2), group_size=GROUP, **changes)
    with running(driver):
        groups = flatten(learn(driver, range(2)))
        return groups, driver.metrics()


def first(array: Any, value: object) -> Any:
    changed = array.copy()
    changed[0] = value
    return changed


DAMAGES: dict[str, Damage] = {
    "aborted": lambda sample: Refusal("aborted", "out of memory"),
    "log_prob_missing": lambda sample: Refusal("log_prob_missing", "token 0 has no log-prob"),
    "log_prob_not_finite": lambda s: replace(s, log_probs=first(s.log_probs, np.nan)),
    "length_mismatch": lambda s: replace(s, log_probs=s.log_probs[:-1]),
    "empty": lambda s: replace(
        s, tokens=s.tokens[:0], log_probs=s.log_probs[:0], versions=s.versions[:0]
    ),
    "token_out_of_vocabulary": lambda s: replace(s, tokens=first(s.tokens, 50)),
    "version_unknown": lambda s: replace(s, versions=first(s.versions, 9)),
}


@pytest.mark.parametrize("lag", [ExactLag(1), BoundedLag(1)], ids=str)
@pytest.mark.parametrize("reason", DAMAGES)
def test_one_of_eight_is_refused_and_sampled_again(reason: str, lag: Lag) -> None:
    """G7, T6, T7: seven are kept as they are, one is sampled again, and the reason is counted."""
    clean, _ = two_steps(ScriptedEngine(), lag)
    engine = ScriptedEngine(tamper=Once(1, 5, DAMAGES[reason]))
    groups, figures = two_steps(engine, lag)
    assert figures[f"refused/{reason}"] == figures["resampled"] == 1
    # The versions of the kept ones may differ in bounded mode, their seeds' lengths may not.
    for ours, theirs in zip(groups, clean, strict=True):
        pairs = zip(ours.trajectories, theirs.trajectories, strict=True)
        lengths = [(len(a.sample.tokens), len(b.sample.tokens)) for a, b in pairs]
        again = 5 if ours.id == 1 else None
        assert all(a == b for place, (a, b) in enumerate(lengths) if place != again)
    retries = [call for call in engine.calls if call[0].count != GROUP]
    assert [(request.group_id, request.count) for call in retries for request in call] == [(1, 1)]
    renewed = groups[1].trajectories[5]
    assert len(renewed.sample.tokens) == response_length(derive_seed(3, "group", 1, 1), 0, 2.0)
    sizes = {
        len(renewed.mask),
        len(renewed.sample.tokens),
        len(renewed.sample.log_probs),
        len(renewed.sample.versions),
    }
    assert len(sizes) == 1
    assert renewed.mask.all()


def test_members_of_other_groups_keep_their_bits_in_exact_mode() -> None:
    """G7: one aborted sample changes one trajectory and nothing else of the run."""
    clean, _ = two_steps(ScriptedEngine(), ExactLag(1))
    tampered = ScriptedEngine(tamper=Once(1, 5, DAMAGES["aborted"]))
    groups, _ = two_steps(tampered, ExactLag(1))
    differing = [a != b for a, b in zip(content(groups), content(clean), strict=True)]
    assert [place for place, differs in enumerate(differing) if differs] == [1 * GROUP + 5]


def test_wrong_version_in_exact_mode_is_refused() -> None:
    """L1: a sample of another published version than the step's own is not trained on."""

    def older(sample: Sample) -> Sample:
        return replace(sample, versions=np.zeros_like(sample.versions))

    engine = ScriptedEngine(tamper=Once(2, 0, older))
    groups, figures = two_steps(engine, ExactLag(0))
    assert figures["refused/version_not_exact"] == 1
    assert {int(v) for one in groups[2].trajectories for v in one.sample.versions} == {1}


def test_samples_older_than_the_bound_are_refused() -> None:
    """L2: the engine acknowledged version 1 and then answers with a token of version 0."""

    def older(sample: Sample) -> Sample:
        return replace(sample, versions=first(sample.versions, 0))

    engine = ScriptedEngine(tamper=Once(2, 0, older))
    groups, figures = two_steps(engine, BoundedLag(0))
    assert figures["refused/version_too_old"] == 1
    assert groups[2].trajectories[0].oldest_version == 1


def test_exact_mode_samples_again_before_the_engines_switch() -> None:
    engine = ScriptedEngine(tamper=Once(1, 3, DAMAGES["aborted"], times=3))
    groups, figures = two_steps(engine, ExactLag(0))
    assert figures["resampled"] == 3
    assert {int(v) for one in groups[1].trajectories for v in one.sample.versions} == {0}


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite(reward: float, caplog: pytest.LogCaptureFixture) -> None:
    """G4: that trajectory is refused by name and sampled again; the other groups are unchanged."""
    graded: list[GradeJob] = []

    def once_broken(jobs: Sequence[GradeJob]) -> list[float]:
        rewards = grade(jobs)
        if not graded:
            rewards[GROUP + 2] = reward
        graded.extend(jobs)
        return rewards

    clean, _ = two_steps(ScriptedEngine(), ExactLag(0))
    with caplog.at_level(logging.WARNING):
        groups, figures = two_steps(ScriptedEngine(), ExactLag(0), grade=once_broken)
    assert figures["refused/reward_not_finite"] == figures["resampled"] == 1
    assert figures["graded"] == len(graded) == 4 * GROUP + 1
    differing = [a != b for a, b in zip(content(groups), content(clean), strict=True)]
    assert [place for place, differs in enumerate(differing) if differs] == [GROUP + 2]
    assert "refused sample 2 of submission 1, prompt 'p1': reward_not_finite" in caplog.text


def test_a_sample_refused_for_ever_ends_the_run_by_name() -> None:
    engine = ScriptedEngine(tamper=Once(1, 5, DAMAGES["aborted"], times=99))
    with pytest.raises(
        EngineError,
        match=r"submission 1, prompt 'p1': 1 of 8 samples still refused after 3 attempts, "
        r"last for aborted \(out of memory\); counter refused/aborted",
    ):
        two_steps(engine, ExactLag(0), attempts=3)


def test_resampling_keeps_to_the_limit_of_calls() -> None:
    """Calls that are sent again count like any other; the engine never has two open."""

    class Counting(ScriptedEngine):
        open, most = 0, 0

        async def sample(
            self, requests: Sequence[SampleRequest], params: SamplingParams
        ) -> list[list[Sample | Refusal]]:
            self.open += 1
            self.most = max(self.most, self.open)
            answer = await super().sample(requests, params)
            self.open -= 1
            return answer

    refused: set[int] = set()

    def refuse_once(request: SampleRequest, member: int, sample: Sample) -> Sample | Refusal:
        if request.group_id in refused:
            return sample
        refused.add(request.group_id)
        return Refusal("aborted", "once")

    engine = Counting(tamper=refuse_once)
    driver = make_driver([engine], LagScheduler(BoundedLag(5), 1), group_size=1, calls_per_engine=1)
    with running(driver):
        learn(driver, range(8))
    assert len(refused) >= 8
    assert engine.most == 1


def test_evaluations_resample_too() -> None:
    prompts = [prompt_at(n) for n in range(3)]

    def spoil(request: SampleRequest, member: int, sample: Sample) -> Sample | Refusal:
        spoilt = request.group_id == -3 and request.count == GROUP and member == 1
        return Refusal("aborted", "once") if spoilt else sample

    driver = make_driver([ScriptedEngine(tamper=spoil)], LagScheduler(ExactLag(0), 2))
    with running(driver):
        result = driver.evaluate(prompts, 0, GROUP).result(30)
        assert driver.metrics()["refused/aborted"] >= 1
    assert result.rewards.shape == (3, GROUP)


@given(st.integers(0, 1000), st.sampled_from([ExactLag(0), ExactLag(2), BoundedLag(2)]))
@settings(max_examples=25, deadline=None)
def test_groups_stay_whole_under_random_refusals(seed: int, lag: Lag) -> None:
    """G7, D1: whatever is refused, groups are complete, in order and of one attempt each."""
    random = np.random.default_rng(seed)
    damages = list(DAMAGES.values())

    def spoil(request: SampleRequest, member: int, sample: Sample) -> Sample | Refusal:
        if random.random() < 0.2:
            return damages[random.integers(len(damages))](sample)
        return sample

    driver = make_driver(
        [ScriptedEngine("one", tamper=spoil), ScriptedEngine("two", tamper=spoil)],
        LagScheduler(lag, 3, steps=4),
        attempts=40,
        group_size=4,
    )
    with running(driver):
        ledger = learn(driver, range(4))
        figures = driver.metrics()
    groups = flatten(ledger)
    assert [group.id for group in groups] == list(range(12))
    for group in groups:
        assert len(group.trajectories) == 4
        for one in group.trajectories:
            length = len(one.sample.tokens)
            assert length == len(one.sample.log_probs) == len(one.sample.versions) == len(one.mask)
            assert 0 <= group.id // 3 - one.oldest_version <= lag.k
            assert np.isfinite(one.sample.log_probs).all()
    refused = sum(value for name, value in figures.items() if name.startswith("refused/"))
    assert figures["resampled"] == refused
