"""Ages of what a step consumes, by hand."""

from __future__ import annotations

from megatron_gmc.rollout.staleness import Completed, lag_shares, staleness
from tests.rollout.test_state import group


def test_the_lag_splits_into_sampling_and_waiting() -> None:
    """L7: counted from the oldest token. Sampled at 2 and 3, complete at 3, consumed at 5."""
    early = Completed(group(0, [2, 3]), version=3)
    fresh = Completed(group(1, [5]), version=5)
    longer = Completed(group(2, [4, 4, 4, 4, 4]), version=4)
    figures = staleness([[early], [fresh]], 5, [early, fresh, longer])
    # early: 1 while sampling, 2 waiting; fresh, consumed at 6: 0 and 1.
    assert figures["lag_sampling"] == 0.5
    assert figures["lag_waiting"] == 1.5
    assert figures["consumed_length_ratio"] == 1.5 / (8 / 3)


def test_shares_of_trajectories_and_of_tokens() -> None:
    """L7: a response over three versions is one trajectory of the oldest and tokens of each."""
    groups = [group(0, [2, 3, 3, 4], members=1), group(1, [4, 4, 4, 4], members=1)]
    assert lag_shares(groups, 4) == {
        "lag/trajectories/0": 0.5,
        "lag/trajectories/2": 0.5,
        "lag/tokens/0": 0.625,
        "lag/tokens/1": 0.25,
        "lag/tokens/2": 0.125,
    }
