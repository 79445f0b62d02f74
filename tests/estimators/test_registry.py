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
    GRPO,
    AnyEstimator,
    TICMask,
    TrajectoryEstimator,
)


class Config(BaseModel):
    estimator: Annotated[AnyEstimator, Field(discriminator="name")] = GMC()


def test_the_names() -> None:
    assert set(ESTIMATORS) == {"gmc", "none", "is", "tic_clip", "tic_mask", "grpo"}
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


@pytest.mark.parametrize("name", ["gmc", "tic_clip", "tic_mask"])
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
    ("params", "message"),
    [
        ({"clip_low": 0.0}, "clip_low must be above 0, got 0"),
        ({"clip_low": 1.0}, "clip_low must be below 1, got 1"),
        ({"clip_high": -0.1}, "clip_high must be above 0, got -0.1"),
    ],
)
def test_impossible_clips_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO(**params)


def test_which_methods_look_at_the_whole_group() -> None:
    needing = {
        name
        for name, method in ESTIMATORS.items()
        if issubclass(method, TrajectoryEstimator) and method.needs_group
    }
    assert needing == {"gmc"}
