"""KL, entropy, mismatch and proximal policies: one gradient for every split, and the right one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_gmc.config import LearnerConfig, ObjectiveConfig
from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.estimators import ESTIMATORS
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model_weights import load_weights
from megatron_gmc.learner.policy_step import Objective, policy_step, score_proximal
from megatron_gmc.optim_config import OptimConfig
from tests.distributed import run_ranks
from tests.learner.gradients import TEMPERATURE
from tests.learner.objectives import (
    ALL,
    CASES,
    ONE,
    Expected,
    expected,
    gradients,
    learner_batch,
    models,
)

MESHES = ("one rank", "TP2", "PP2", "DP2", "CP2")
# transformers' norms go through float32 whatever the model's dtype is.
TOLERANCE = 1e-5
RATE = 0.02


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("objectives")
    for name, model in models().items():
        model.save_pretrained(folder / name)
    run_ranks("tests.learner.objectives", "save_gradients", 2, str(folder), *MESHES[1:])
    mesh = Mesh.create(1, 1)
    results = {"one rank": gradients(folder, mesh)}
    mesh.close()
    return results | {name: load_file(Path(folder) / f"{name}.safetensors") for name in MESHES[1:]}


@pytest.fixture(scope="module")
def wanted() -> dict[str, Expected]:
    policies = {name: model.double() for name, model in models().items()}
    return {name: expected(case, policies) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_is_that_of_the_surrogate(
    found: dict[str, dict[str, Tensor]], wanted: dict[str, Expected], mesh: str, name: str
) -> None:
    """S1, R6; G6: with equal rewards ("kl alone") the KL's own gradient is left, on every split."""
    expectation = wanted[name]
    largest = max(float(g.abs().max()) for g in expectation.gradient.values())
    assert largest > 1e-3
    for limit in (ALL, ONE):
        prefix = f"{name}/{limit}/"
        results = {
            key.removeprefix(prefix): value
            for key, value in found[mesh].items()
            if key.startswith(prefix)
        }
        loss = float(results.pop("loss"))
        if expectation.loss is not None:
            assert abs(loss - expectation.loss) < TOLERANCE * expectation.size
        assert results.keys() == expectation.gradient.keys()
        for weight, gradient in expectation.gradient.items():
            difference = (results[weight].double() - gradient).abs().max() / largest
            assert difference < TOLERANCE, (limit, weight)


@pytest.mark.parametrize("name", ["tis", "icepop", "truncate"])
def test_two_steps_on_one_batch(tmp_path: Path, one_rank: Mesh, name: str) -> None:
    """The second step's ratios are at the weights that the first left; π_prox is before both."""
    case = CASES[name]
    policy = models()["policy"]
    policy.save_pretrained(tmp_path)
    learner = Learner(load_shape(tmp_path), one_rank, OptimConfig(name="sgd", lr=RATE), steps=2)
    load_weights(learner.chunks, learner.shape, one_rank, stream_tensors(tmp_path))
    terms = ObjectiveConfig.model_validate(case.objective)
    objective = Objective(ESTIMATORS[case.estimator](**case.params), terms, TEMPERATURE)
    batch, settings = learner_batch(case), LearnerConfig()
    for proximal_K in score_proximal(learner, [batch, batch], objective, settings):
        policy_step(learner, batch, objective, settings, proximal_K=proximal_K)

    start, weights = policy.double(), copy.deepcopy(policy)
    for at_once in (True, False):
        of_step = replace(case, proximal=not at_once)
        gradient = expected(of_step, {"policy": weights, "proximal": start, "reference": start})
        with torch.no_grad():
            for key, parameter in weights.named_parameters():
                parameter.sub_(gradient.gradient[key], alpha=RATE)
    before, wanted = dict(start.named_parameters()), dict(weights.named_parameters())
    moved = max(float((wanted[key] - before[key]).detach().abs().max()) for key in wanted)
    assert moved > 0.01
    for key, weight in learner.weights():
        assert (weight.double() - wanted[key]).abs().max() < 2 * TOLERANCE * moved, key


def test_the_cases_are_apart(wanted: dict[str, Expected]) -> None:
    """Each term and factor has a part in its case's gradient."""
    flat = {
        name: torch.cat([g.flatten() for g in one.gradient.values()])
        for name, one in wanted.items()
    }
    for one in flat:
        for other in flat:
            if one != other:
                assert (flat[one] - flat[other]).norm() > 1e-2 * flat[one].norm(), (one, other)
