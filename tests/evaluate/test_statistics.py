"""pass@k, votes and standard errors against brute force."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.evaluate.statistics import (
    Outcome,
    majority_reward,
    over_prompts,
    pass_at_k,
    summarise,
)
from megatron_gmc.evaluate.votes import can_vote, vote
from megatron_gmc.tasks.config import (
    ExactGrader,
    FunctionGrader,
    MathVerifyGrader,
    NumericGrader,
    ReasoningGymGrader,
)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        responses = [place < passed for place in range(n)]
        subsets = list(itertools.combinations(responses, k))
        share = Fraction(sum(map(any, subsets)), len(subsets))
        assert pass_at_k(n, passed, k) == pytest.approx(float(share), abs=1e-15)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1), st.integers(1, 6), st.data())
def test_pass_at_k_is_unbiased(chance: float, k: int, data: st.DataObject) -> None:
    """Its mean over the binomial law of c is the chance that one of k fresh responses passes."""
    n = data.draw(st.integers(k, 12))
    weights = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    mean = math.fsum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    assert mean == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "passed", "k"), [(2, 1, 3), (2, 3, 1), (2, 0, 0), (2, -1, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(n: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, passed, k)


def test_a_majority_vote() -> None:
    assert majority_reward([1, 1, 0, 0, 0], ["7", "7", "1", "2", "3"]) == 1
    assert majority_reward([1, 0, 0, 0], ["7", "1", "1", None]) == 0
    assert majority_reward([1, 0, 0, 0], ["7", "7", "1", None]) == 0.5
    assert majority_reward([1, 0], ["7", "1"]) == 0.5
    assert majority_reward([0, 0], [None, None]) == 0
    assert majority_reward([0, 1, 0], [None, "7", None]) == 1


def test_errors_are_over_prompts_and_not_over_responses() -> None:
    rewards = [(1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
    outcomes = [
        Outcome(str(place), row, (4, 5, 6), (False, False, True), ("a", "b", "b"))
        for place, row in enumerate(rewards)
    ]
    found = summarise(outcomes, [1, 3], 1.0)
    means = [2 / 3, 0, 1]
    assert found.accuracy.mean == pytest.approx(statistics.fmean(means))
    assert found.accuracy.error == pytest.approx(statistics.stdev(means) / math.sqrt(3))
    assert found.passes[1].mean == pytest.approx(found.accuracy.mean)
    assert found.passes[1].error == pytest.approx(found.accuracy.error)
    assert found.passes[3].mean == pytest.approx(2 / 3)
    assert found.majority is not None
    assert found.majority.mean == pytest.approx(statistics.fmean([0.5, 0, 1]))
    assert found.response_tokens.mean == 5 and found.response_tokens.error == 0
    assert found.truncated_share.mean == pytest.approx(1 / 3)
    assert over_prompts([0.25]).error is None


def test_partial_rewards_pass_from_the_threshold_on() -> None:
    outcome = Outcome("a", (0.5, 0.9), (1, 1), (False, False), None)
    found = summarise([outcome], [1], 0.9)
    assert found.accuracy.mean == 0.7 and found.passes[1].mean == 0.5
    assert found.majority is None


def test_answers_are_read_as_the_graders_read_them() -> None:
    exact = ExactGrader(after=">", require_stop=True)
    assert vote(exact, "7+5;> 0012 ", "stop") == "0012"
    assert vote(exact, "7+5", "stop") is None
    assert vote(exact, ">0012", "length") is None
    assert vote(ExactGrader(strip=False), " a", "length") == " a"
    assert vote(NumericGrader(), "so 1,000.0", "stop") == vote(NumericGrader(), "1e3", "stop")
    assert vote(NumericGrader(), "none", "stop") is None
    tagged = ReasoningGymGrader(answer_tag="answer")
    assert vote(tagged, "<answer>1</answer><answer> 2\n</answer>", "stop") == "2"
    assert vote(tagged, "2", "stop") is None
    assert vote(ReasoningGymGrader(), " 2 ", "stop") == "2"
    assert not can_vote(MathVerifyGrader()) and not can_vote(FunctionGrader(path="a:b"))
