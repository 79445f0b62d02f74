"""The registry, and the estimators as a pydantic union."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, get_args

import pytest
from pydantic import BaseModel, Field, ValidationError

from megatron_gmc.estimators import (
    ESTIMATORS,
    GMC,
    AnyEstimator,
    Scope,
    TICMask,
)

EPSILON_METHODS = sorted(
    name for name, method in ESTIMATORS.items() if method().epsilon is not None
)


class Config(BaseModel):
    estimator: Annotated[AnyEstimator, Field(discriminator="name")] = GMC()


def test_the_names() -> None:
    assert set(ESTIMATORS) == {
        "gmc", "none", "is", "snis", "tic_clip", "tic_mask", "tis_sequence", "mis", "gspo", "gepo",
        "grpo", "cispo", "tis_token", "icepop", "decoupled_ppo", "m2po",
        "water_filling", "soft_threshold", "gmc_pooled", "gmc_differentiable",
    }  # fmt: skip
    assert set(ESTIMATORS.values()) == set(get_args(AnyEstimator))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_method_is_a_frozen_record_with_defaults(name: str) -> None:
    estimator = ESTIMATORS[name]()
    assert estimator.name == name
    assert dataclasses.replace(estimator) == estimator
    assert hash(estimator) == hash(ESTIMATORS[name]())
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator.name = "other"


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_config_names_its_method(name: str) -> None:
    config = Config.model_validate({"estimator": {"name": name}})
    assert config.estimator == ESTIMATORS[name]()
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_config_refuses_unknown_parameters(name: str) -> None:
    with pytest.raises(ValidationError, match=f"estimator.{name}.epsilom"):
        Config.model_validate({"estimator": {"name": name, "epsilom": 0.1}})


def test_a_config_sets_parameters() -> None:
    raw = {"estimator": {"name": "tic_mask", "epsilon": 0.5}}
    assert Config.model_validate(raw).estimator == TICMask(epsilon=0.5)


def test_a_config_refuses_an_unknown_method_and_lists_the_known() -> None:
    with pytest.raises(ValidationError, match="'tic_clip', 'tic_mask'"):
        Config.model_validate({"estimator": {"name": "gmk"}})


@pytest.mark.parametrize("name", EPSILON_METHODS)
@pytest.mark.parametrize(
    ("epsilon", "message"),
    [
        (-1, "epsilon must be above 0, got -1"),
        (0, "epsilon must be above 0, got 0"),
        (math.nan, "epsilon must be above 0, got nan"),
        (math.inf, "epsilon must be finite, got inf"),
    ],
)
def test_impossible_caps_are_refused(name: str, epsilon: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ESTIMATORS[name](epsilon=epsilon)
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"estimator": {"name": name, "epsilon": epsilon}})


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("grpo", {"clip_low": 0.0}, "clip_low must be above 0, got 0"),
        ("grpo", {"clip_low": 1.0}, "clip_low must be below 1, got 1"),
        ("grpo", {"clip_high": -0.1}, "clip_high must be above 0, got -0.1"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip must be above 1, got 1"),
        ("grpo", {"dual_clip": math.inf}, "dual_clip must be finite, got inf"),
        ("gspo", {"clip_low": 0.0}, "clip_low must be above 0, got 0"),
        ("gepo", {"clip_low": 2.0}, "clip_low must be below 1, got 2"),
        ("decoupled_ppo", {"clip_high": 0.0}, "clip_high must be above 0, got 0"),
        ("tis_token", {"cap": 0.5}, "cap must be at least 1, got 0.5"),
        ("tis_token", {"clip_low": -1.0}, "clip_low must be above 0, got -1"),
        ("tis_sequence", {"cap": 0.0}, "cap must be above 0, got 0"),
        ("tis_sequence", {"cap": 0.9}, "cap must be at least 1, got 0.9"),
        ("mis", {"upper": 0.9}, "upper must be at least 1, got 0.9"),
        ("mis", {"lower": 1.1}, "lower must be at most 1, got 1.1"),
        ("mis", {"lower": 0.0}, "lower must be above 0, got 0"),
        ("icepop", {"upper": math.nan}, "upper must be above 0, got nan"),
        ("icepop", {"lower": 2.0}, "lower must be at most 1, got 2"),
        ("cispo", {"weight_max": 0.5}, "weight_max must be at least 1, got 0.5"),
        ("cispo", {"weight_min": 1.5}, "weight_min must be at most 1, got 1.5"),
        ("m2po", {"second_moment": 0.0}, "second_moment must be above 0, got 0"),
        (
            "gmc",
            {"member_limit": 1.1},
            r"member_limit must be at least 1 \+ epsilon = 1.2, got 1.1",
        ),
        ("gmc", {"member_limit": -2.0}, "member_limit must be above 0, got -2"),
        ("gmc", {"member_limit": math.inf}, "member_limit must be finite, got inf"),
        ("gmc", {"member_limit": "G^1.5"}, "with 0 < β < 1, .*, got 'G.1.5'"),
        ("gmc", {"member_limit": "G^0"}, "with 0 < β < 1, .*, got 'G.0'"),
        ("gmc", {"member_limit": "sqrt(G)"}, "must be a number or .*, got 'sqrt"),
    ],
)
def test_impossible_parameters_are_refused(
    name: str, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ESTIMATORS[name](**params)
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"estimator": {"name": name, **params}})


@pytest.mark.parametrize("limit", [3, 2.5, "G^0.33", "G^.5", None])
def test_a_member_limit_is_a_number_or_a_power(limit: float | str | None) -> None:
    config = Config.model_validate({"estimator": {"name": "gmc", "member_limit": limit}})
    assert config.estimator == GMC(member_limit=limit)


def test_what_a_weight_depends_on() -> None:
    scopes = {
        scope: {n for n, m in ESTIMATORS.items() if m.scope == scope} for scope in get_args(Scope)
    }
    assert scopes["batch"] == {"gmc_pooled", "m2po"}
    assert scopes["group"] == {
        "gmc", "snis", "gepo", "water_filling", "soft_threshold", "gmc_differentiable"
    }  # fmt: skip
    assert set.union(*scopes.values()) == set(ESTIMATORS)
