"""`fold`: one factor for each trajectory, whatever the order, the dtype and the ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gmc.estimators import ESTIMATORS, GMC, PlainIS
from megatron_gmc.integrations import fold, log_ratio_sums
from megatron_gmc.integrations.folding import NOT_A_WEIGHT
from tests.distributed import run_ranks
from tests.estimators.oracle import Member, trajectory_weights
from tests.estimators.records import TRAJECTORY_METHODS, parameters
from tests.integrations.inputs import ADVANTAGES, GROUPS, LOG_RATIOS

FOLDED = [name for name in TRAJECTORY_METHODS if not issubclass(ESTIMATORS[name], NOT_A_WEIGHT)]


def folded(estimator: object, **changes: object) -> tuple[Tensor, dict[str, float]]:
    inputs: dict[str, object] = {
        "advantages": torch.tensor(ADVANTAGES),
        "log_ratio": torch.tensor(LOG_RATIOS, dtype=torch.float64),
        "group_ids": torch.tensor(GROUPS),
        "estimator": estimator,
    }
    return fold(**(inputs | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FOLDED)
def test_every_weight_of_a_trajectory_is_the_oracles(name: str) -> None:
    """G1 as well: three groups of different sizes, interleaved, none sees another's members."""
    estimator = ESTIMATORS[name]()
    members = [Member(value) for value in LOG_RATIOS]
    weights = trajectory_weights(name, parameters(estimator), members, GROUPS)
    weighted, _ = folded(estimator)
    expected = [float(w) * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert weighted.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - set(FOLDED)))
def test_other_methods_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"estimator: {name} is not one weight a trajectory"):
        folded(ESTIMATORS[name]())


def test_huge_log_ratios() -> None:
    """R1: no clamp before the mass."""
    weighted, metrics = fold(
        torch.ones(4, dtype=torch.float64),
        torch.tensor([40.0, 25.0, 0.0, 0.0]),
        torch.zeros(4, dtype=torch.int64),
        GMC(epsilon=0.2),
    )
    assert weighted.tolist() == pytest.approx(
        [4.79999853, 1.468331e-6, 2.0392e-17, 2.0392e-17], rel=1e-4
    )
    assert metrics["ratio/capped_share"] == 1
    assert metrics["ratio/retained_mass"] == pytest.approx(1.2)
    assert metrics["ratio/log_mass_max"] == pytest.approx(40 - math.log(4), abs=1e-6)


def test_a_weight_reaches_every_token_of_its_trajectory() -> None:
    per_token = torch.arange(27.0).view(9, 3)
    weighted, _ = folded(GMC(), advantages=per_token)
    factors, _ = folded(GMC(), advantages=torch.ones(9))
    torch.testing.assert_close(weighted, per_token * factors[:, None], rtol=0, atol=0)


def test_advantage_zero_stays_zero_beside_a_huge_ratio() -> None:
    """R5."""
    weighted, _ = fold(
        torch.zeros(1), torch.tensor([1000.0]), torch.tensor([3]), GMC(), group_size=1
    )
    assert weighted.tolist() == [0.0]


def test_no_gradient_goes_through_a_weight() -> None:
    """R6."""
    log_ratio = torch.tensor(LOG_RATIOS, dtype=torch.float64, requires_grad=True)
    weighted, _ = folded(GMC(), log_ratio=log_ratio)
    assert not weighted.requires_grad


def test_log_ratios_are_sums_over_loss_tokens_alone() -> None:
    """R4, R8: 0.3 − 0.1 under the mask; NaN and infinities beside it are not looked at."""
    nan, inf = math.nan, math.inf
    current = torch.tensor([[nan, -1.0, -2.0, -inf], [-1.0, inf, nan, -1.0]])
    behaviour = torch.tensor([[-1.0, -1.3, -1.9, nan], [nan, nan, nan, nan]])
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])
    sums = log_ratio_sums(current, behaviour, mask)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([0.2, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_ids": torch.zeros(9)}, r"group_ids must be integers \[9\].*float32 \[9\]"),
        ({"group_ids": torch.zeros(8).long()}, r"group_ids must be integers \[9\].*\[8\]"),
        ({"log_ratio": torch.zeros(9, 3)}, r"log_ratio must be float32 or float64 \[9\]"),
        ({"log_ratio": torch.zeros(9).half()}, r"log_ratio must be .*float16"),
        ({"advantages": torch.zeros(9).long()}, r"advantages must be float.*int64"),
        ({"log_ratio": torch.full((9,), math.nan)}, r"9 trajectories.*groups 3, 7, 12"),
        ({"group_size": 4}, r"must have 4 trajectories over all ranks; group 3 has 3, 12 has 2"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], message: str) -> None:
    """T6: a missing behaviour log-prob is never 0."""
    with pytest.raises(ValueError, match=message):
        folded(GMC(), **changes)


def test_a_weight_beyond_the_dtype_is_an_error() -> None:
    with pytest.raises(OverflowError, match=r"a weight of is exceeds torch\.float32.*is 100"):
        folded(PlainIS(), log_ratio=torch.full((9,), 100.0))


def test_groups_may_lie_on_several_ranks(tmp_path: Path) -> None:
    """Two ranks hold 2 and 7 of the nine rows, three groups over both; then a rank holds none."""
    run_ranks("tests.integrations.workers", "fold_parts", 2, str(tmp_path))
    whole, metrics = folded(GMC())
    for split in ("2", "0"):
        ranks = [torch.load(tmp_path / f"{split}.rank{rank}.pt") for rank in range(2)]
        parts = torch.cat([rank["weighted"] for rank in ranks])
        torch.testing.assert_close(parts, whole, rtol=1e-7, atol=0)
        for rank in ranks:
            assert rank["metrics"] == pytest.approx(metrics, rel=1e-12)
            assert rank["error"].startswith("log_ratio: 1 trajectories")
