"""What the rewards of n responses a prompt say: accuracy, pass@k, majority vote, their errors."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The n responses of one prompt.

    `tokens`: length of each in tokens; `truncated`: whether it reached the limit; `votes`: the
    answer that each gives, None where it gives none; `votes` itself None for a grader whose
    answers cannot be told apart.
    """

    prompt_id: str
    rewards: tuple[float, ...]
    tokens: tuple[int, ...]
    truncated: tuple[bool, ...]
    votes: tuple[str | None, ...] | None


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error, None for a single prompt."""

    mean: float
    error: float | None


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that one of k responses passes, from `passed` of n: 1 − C(n−c, k)/C(n, k).

    Unbiased for k responses of the same policy (Chen et al. 2021, arXiv 2107.03374, section 2.1).
    Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ passed ≤ n.
    """
    if not (1 <= k <= n and 0 <= passed <= n):
        raise ValueError(f"pass@k needs 1 ≤ k ≤ n and 0 ≤ c ≤ n, got n={n}, c={passed}, k={k}")
    return 1 - math.comb(n - passed, k) / math.comb(n, k)


def majority_reward(rewards: Sequence[float], votes: Sequence[str | None]) -> float:
    """Reward of the answer that most responses give; the mean over answers that tie.

    A response without an answer does not vote; where none votes the reward is 0. The reward of an
    answer is the mean over the responses that give it.
    """
    by_answer: defaultdict[str, list[float]] = defaultdict(list)
    for reward, vote in zip(rewards, votes, strict=True):
        if vote is not None:
            by_answer[vote].append(reward)
    if not by_answer:
        return 0.0
    most = max(len(given) for given in by_answer.values())
    winners = [statistics.fmean(given) for given in by_answer.values() if len(given) == most]
    return statistics.fmean(winners)


def over_prompts(values: Iterable[float]) -> Estimate:
    """Mean and standard error; prompts are the independent draws, responses of one are not."""
    listed = list(values)
    mean = statistics.fmean(listed)
    if len(listed) < 2:
        return Estimate(mean, None)
    return Estimate(mean, statistics.stdev(listed) / math.sqrt(len(listed)))


@dataclass(frozen=True)
class Summary:
    """`accuracy` is the mean reward, as in training's held-out curve; `passes` is pass@k by k."""

    prompts: int
    samples: int
    accuracy: Estimate
    passes: dict[int, Estimate]
    majority: Estimate | None
    response_tokens: Estimate
    truncated_share: Estimate


def summarise(outcomes: Sequence[Outcome], ks: Sequence[int], pass_reward: float) -> Summary:
    """What `outcomes`, one for each prompt, say together."""
    n = len(outcomes[0].rewards)
    passed = [sum(reward >= pass_reward for reward in one.rewards) for one in outcomes]
    voted = [majority_reward(one.rewards, one.votes) for one in outcomes if one.votes is not None]
    return Summary(
        prompts=len(outcomes),
        samples=n,
        accuracy=over_prompts(statistics.fmean(one.rewards) for one in outcomes),
        passes={k: over_prompts(pass_at_k(n, c, k) for c in passed) for k in ks},
        majority=over_prompts(voted) if voted else None,
        response_tokens=over_prompts(statistics.fmean(one.tokens) for one in outcomes),
        truncated_share=over_prompts(statistics.fmean(one.truncated) for one in outcomes),
    )
