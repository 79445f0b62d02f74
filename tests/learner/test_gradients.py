"""One batch, one gradient: meshes, passes and micro-batch sizes against a plain reference.

`python -m benchmarks.gradients` has every mesh of up to four ranks.
"""

from __future__ import annotations

import math

import pytest

from tests.learner.gradients import (
    OUTLIER,
    VOCABULARY,
    compare,
    every_job,
    outlier_of,
    references,
    some_jobs,
    trajectories,
)
from tests.learner.methods import ESTIMATORS, SETTINGS

Rows = dict[tuple[str, str], dict[tuple[str, int, str], dict[str, float]]]

ALLOWED = {
    "gradient": 1e-5,
    "norm": 1e-5,
    "loss": 5e-5,  # a sum of large terms of both signs, which nearly cancel
    "weight": 1e-5,
    "log_ratio": 1e-5,
}
# Number of ranks → kind/mesh; each takes its turn of the estimators.
MESHES = {
    2: [
        "tied/DP2×ZeRO",
        "untied/TP2",
        "tied/TP2×SP",
        "tied/CP2",
        "untied/PP2",
        "tied/PP2×VPP2",
        "mixture/EP2",
    ],
    4: ["tied/TP2×SP×PP2", "untied/CP2×PP2×VPP2", "mixture/CP2×EP4"],
}
ALL_MESHES = [name for names in MESHES.values() for name in names]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Differences from the reference by kind and mesh, then by estimator, tokens and pass."""
    worlds = {
        world: [f"{name}/{ALL_MESHES.index(name)}" for name in names]
        for world, names in MESHES.items()
    }
    found: Rows = {}
    for row in compare(tmp_path_factory.mktemp("gradients"), worlds):
        key = (row.estimator, row.limit, row.passes)
        found.setdefault((row.kind, row.mesh), {})[key] = row.differences
    return found


@pytest.mark.parametrize("name", ALL_MESHES)
def test_the_gradient_is_the_references(rows: Rows, name: str) -> None:
    """S1: micro-batches of one trajectory, some groups and everything; TP, SP, PP, VPP, CP, EP, DP.

    S2: 17 uneven trajectories leave DP ranks with different numbers to do. S3, S4: the norm on
    stages and context ranks, and with tied embeddings on two stages. R4: masked positions hold
    NaN log-probs, which the reference never sees. T3: a first response token is scored from the
    last prompt position. T8: vocabulary 101 at TP 2.
    """
    kind, mesh = name.split("/")
    jobs = rows[kind, mesh]
    assert len(jobs) == len(some_jobs(ALL_MESHES.index(name)))
    for job, differences in jobs.items():
        assert differences.keys() == ALLOWED.keys()
        over = {what: value for what, value in differences.items() if not value <= ALLOWED[what]}
        assert over == {}, job


def test_both_ways_of_forming_weights_were_taken(rows: Rows) -> None:
    for name in ALL_MESHES:
        kind, mesh = name.split("/")
        passes = sorted(passes for job, _, passes in rows[kind, mesh] if job == "gmc")
        assert passes == ["single", "single", "two", "two"]


def test_every_estimator_has_its_turn() -> None:
    assert ESTIMATORS.keys() == SETTINGS.keys()
    seen = {job for turn in range(len(ALL_MESHES)) for job in some_jobs(turn)}
    assert seen == set(every_job())
    assert {job[0] for job in seen} == set(ESTIMATORS)


def test_the_batch_holds_what_the_cases_need() -> None:
    batch = trajectories(outlier_of("gmc"))
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
    assert any(len(one["mask"]) == 1 for one in batch)
    assert len({len(one["tokens"]) for one in batch}) > 5
    sizes = [sum(one["group"] == group for one in batch) for group in range(4)]
    assert sizes == [3, 4, 8, 2]
    reference = references("tied", ["gmc"])["gmc"]
    assert reference.log_ratios[OUTLIER] > 290
    zeros = [one["group"] for one, a in zip(batch, reference.advantages, strict=True) if a == 0]
    assert zeros.count(1) == 4
