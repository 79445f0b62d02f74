"""One batch, one gradient: every mesh, pass and micro-batch size against a plain reference."""

from __future__ import annotations

import math

import pytest

from tests.learner.gradients import ESTIMATORS, compare, cuts_of, trajectories
from tests.qwen3 import VOCABULARY

Differences = dict[str, float]
Rows = dict[tuple[str, str, str], dict[str, Differences]]

ALLOWED = {
    "gradient": 1e-5,
    "norm": 1e-5,
    "loss": 2e-5,  # a sum of large terms of both signs
    "weight": 1e-5,
    "log_ratio": 1e-5,
}
MESHES = ["tp1-pp1-dp1", "tp1-pp1-dp2", "tp2-pp1-dp1", "tp1-pp2-dp1"]
KINDS = ["tied", "untied"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Differences from the reference by kind, mesh and estimator, then by passes and limit."""
    found: Rows = {}
    for kind in KINDS:
        for mesh, estimator, cut, differences in compare(
            tmp_path_factory.mktemp(kind), tied=kind == "tied"
        ):
            found.setdefault((kind, mesh, estimator), {})[cut] = differences
    return found


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_references(rows: Rows, kind: str, mesh: str, estimator: str) -> None:
    """S1: micro-batches of one trajectory, some groups and everything; TP, PP, DP 1 and 2.

    S2: 17 uneven trajectories leave DP ranks with different numbers to do. S3, S4: the norm at
    PP 2, and with tied embeddings on two stages. R4: masked positions hold NaN log-probs, which
    the reference never sees. T3: a first response token is scored from the last prompt position.
    T8: vocabulary 101 at TP 2.
    """
    cuts = rows[kind, mesh, estimator]
    assert len(cuts) == len(cuts_of(estimator))
    for cut, differences in cuts.items():
        assert differences.keys() == ALLOWED.keys()
        over = {name: value for name, value in differences.items() if not value <= ALLOWED[name]}
        assert over == {}, cut


def test_both_ways_of_forming_weights_were_taken(rows: Rows) -> None:
    for kind in KINDS:
        for mesh in MESHES:
            passes = sorted(cut.split(" pass")[0] for cut in rows[kind, mesh, "gmc"])
            assert passes == ["single", "single", "two", "two"]


def test_the_batch_holds_what_the_cases_need() -> None:
    batch = trajectories()
    assert VOCABULARY % 2 == 1
    masked = [
        log_prob
        for one in batch
        for log_prob, used in zip(one["behaviour_log_prob"], one["mask"], strict=True)
        if not used
    ]
    assert len(masked) > 20
    assert all(math.isnan(log_prob) for log_prob in masked)
    assert sum(not any(one["mask"]) for one in batch) == 1
    assert any(one["prompt_length"] == 1 and one["mask"][0] for one in batch)
    assert len({len(one["tokens"]) for one in batch}) > 5
