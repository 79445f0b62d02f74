"""One batch, one gradient: every mesh, pass and micro-batch size against a plain reference.

`python -m tests.learner.gradients` prints the table; test_gradients.py asserts it.
"""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_gmc.learner.batch import Batch, Row
from tests.distributed import run_ranks
from tests.qwen3 import VOCABULARY, save_tiny_qwen3, tiny_qwen3
from tests.reference import Reference, ReferenceTrajectory, reference_gradient

TEMPERATURE = 0.7
ESTIMATORS: dict[str, dict[str, float]] = {
    "gmc": {"epsilon": 0.2},
    "none": {},
    "is": {},
    "tic_clip": {"epsilon": 0.2},
    "tic_mask": {"epsilon": 0.2},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "snis": {},
    "mis": {"upper": 2.0, "lower": 0.5},
    "tis_sequence": {"cap": 2.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gepo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"weight_max": 5.0},
    "tis_token": {"cap": 1.2},
    "icepop": {"lower": 0.8, "upper": 5.0},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "m2po": {"second_moment": 0.04},
    "water_filling": {"epsilon": 0.2},
    "soft_threshold": {"epsilon": 0.2},
    "gmc_pooled": {"epsilon": 0.2},
    "gmc_differentiable": {"epsilon": 0.2},
}
# Aggregation and advantage go along with the estimators, so that each is seen on every mesh.
SETTINGS = {
    "gmc": ("token_sum", "leave_one_out"),
    "none": ("trajectory_mean", "group_mean_std"),
    "is": ("token_mean", "group_mean"),
    "tic_clip": ("token_sum", "leave_one_out"),
    "tic_mask": ("trajectory_mean", "leave_one_out"),
    "grpo": ("token_mean", "group_mean_std"),
    "snis": ("token_sum", "leave_one_out"),
    "mis": ("trajectory_mean", "group_mean"),
    "tis_sequence": ("token_sum", "leave_one_out"),
    "gspo": ("trajectory_mean", "group_mean_std"),
    "gepo": ("trajectory_mean", "leave_one_out"),
    "cispo": ("token_mean", "group_mean_std"),
    "tis_token": ("token_sum", "leave_one_out"),
    "icepop": ("token_mean", "whitened"),
    "decoupled_ppo": ("token_sum", "group_mean"),
    "m2po": ("token_mean", "leave_one_out"),
    "water_filling": ("token_sum", "leave_one_out"),
    "soft_threshold": ("token_sum", "group_mean"),
    "gmc_pooled": ("trajectory_mean", "leave_one_out"),
    "gmc_differentiable": ("token_sum", "leave_one_out"),
}
# Tokens a forward may hold, and how weights are formed: one trajectory, everything, a few groups.
Cuts = tuple[tuple[int, Literal["auto", "two_pass"]], ...]
CUTS: Cuts = ((30, "auto"), (4096, "auto"), (4096, "two_pass"), (220, "auto"))


def cuts_of(estimator: str) -> Cuts:
    """All cuts for gmc, the first two for its baselines, a middle one for every other method."""
    baselines = ("none", "is", "tic_clip", "tic_mask", "grpo")
    return CUTS if estimator == "gmc" else CUTS[:2] if estimator in baselines else CUTS[3:]


MESHES = {1: [(1, 1)], 2: [(2, 1), (1, 2), (1, 1)]}  # (tensor, pipeline) by number of ranks


def trajectories() -> list[ReferenceTrajectory]:
    """Groups of 3, 4, 8 and 2 in mixed order: holes in the mask, a response of one token, equal
    rewards in a group, a trajectory without a loss token, ratios far from 1 and one of e^30."""
    rng = random.Random(5)
    model = tiny_qwen3(tied=True).double()
    members = [g for g, size in enumerate((3, 4, 8, 2)) for _ in range(size)]
    rng.shuffle(members)
    batch: list[ReferenceTrajectory] = []
    for i, group in enumerate(members):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        length = 1 if i == 4 else rng.randint(2, 20)
        response = [rng.randrange(VOCABULARY) for _ in range(length)]
        mask = [i not in (6,) and rng.random() < 0.8 for _ in response]
        mask[0] = i != 6
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0] / TEMPERATURE
        current = logits.log_softmax(-1)
        behaviour = [
            float(current[len(prompt) + t - 1, token]) + rng.gauss(0, 0.25) if mask[t] else math.nan
            for t, token in enumerate(response)
        ]
        if i == 9:
            behaviour[0] -= 30.0
        reward = 1.0 if group == 1 else float(rng.randint(0, 3))
        batch.append(
            ReferenceTrajectory(
                tokens=prompt + response,
                prompt_length=len(prompt),
                mask=mask,
                behaviour_log_prob=behaviour,
                group=group,
                reward=reward,
            )
        )
    return batch


def references(tied: bool) -> dict[str, Reference]:
    model = tiny_qwen3(tied=tied)
    batch = trajectories()
    return {
        name: reference_gradient(
            model, batch, name, params, SETTINGS[name][1], SETTINGS[name][0], TEMPERATURE
        )
        for name, params in ESTIMATORS.items()
    }


def learner_batch() -> Batch:
    """The trajectories as the learner takes them."""
    return Batch.from_rows(
        [
            Row(
                id=i,
                group=t["group"],
                prompt_tokens=t["tokens"][: t["prompt_length"]],
                response_tokens=t["tokens"][t["prompt_length"] :],
                loss_mask=t["mask"],
                behaviour_log_probs=t["behaviour_log_prob"],
                reward=t["reward"],
                oldest_version=0,
            )
            for i, t in enumerate(trajectories())
        ]
    )


def save_gradients(model_folder: str, target: str) -> None:
    """On every rank: the learner's gradients for all meshes that its world allows, to `target`."""
    from megatron_gmc.config import LearnerConfig, ObjectiveConfig, OptimConfig
    from megatron_gmc.convert.hf_config import load_shape
    from megatron_gmc.convert.hugging_face import stream_tensors
    from megatron_gmc.estimators import ESTIMATORS as REGISTRY
    from megatron_gmc.learner.learner import Learner
    from megatron_gmc.learner.mesh import Mesh
    from megatron_gmc.learner.model_weights import gathered, load_weights, parameter_name
    from megatron_gmc.learner.policy_step import Objective, policy_gradient

    torch.set_num_threads(1)
    batch = learner_batch()
    shape = load_shape(Path(model_folder))
    if int(os.environ["WORLD_SIZE"]) > 1:
        # One world for all meshes: gloo does not start a second one in the same process.
        dist.init_process_group("gloo")
    for tensor, pipeline in MESHES[int(os.environ["WORLD_SIZE"])]:
        mesh = Mesh.create(tensor, pipeline)
        learner = Learner(shape, mesh, OptimConfig(lr=1e-3), steps=1)
        load_weights(learner.module, shape, mesh, stream_tensors(Path(model_folder)))
        results: dict[str, torch.Tensor] = {}
        for name, params in ESTIMATORS.items():
            aggregation, advantage = SETTINGS[name]
            objective = Objective(
                REGISTRY[name](**params),
                ObjectiveConfig(aggregation=aggregation, advantage=advantage),
                TEMPERATURE,
            )
            for limit, passes in cuts_of(name):
                settings = LearnerConfig(micro_batch_tokens=limit, passes=passes)
                loss, record, two_pass = policy_gradient(learner, batch, objective, settings)
                key = f"{name}/{limit}/{'two' if two_pass else 'single'}"
                learner.optimizer.prepare_grads()
                norm = float(learner.optimizer.get_grad_norm())
                results[f"{key}/scalars"] = torch.tensor([loss, norm], dtype=torch.float64)
                results[f"{key}/weights"] = record.weight_N.clone()
                results[f"{key}/log_ratios"] = record.ratios.log_ratio_N.clone()
                local = {
                    parameter_name(n, shape, mesh): p.main_grad
                    for n, p in learner.module.named_parameters()
                }
                for weight, gradient in gathered(local, shape, mesh):
                    results[f"{key}/gradient/{weight}"] = gradient
        if mesh.rank == 0:
            save_file(results, f"{target}-tp{tensor}-pp{pipeline}-dp{mesh.data_size}")
        mesh.close()


def compare(folder: Path, tied: bool) -> list[tuple[str, str, str, dict[str, float]]]:
    """Run all meshes; rows of (mesh, estimator, pass and limit, largest differences).

    Differences: of the gradient, relative to its largest entry; of its norm and the loss,
    relative; of the weights and log-ratios, absolute with weights relative to the largest.
    """
    model_folder = save_tiny_qwen3(folder / f"model-{tied}", tied)
    for world in MESHES:
        run_ranks(
            "tests.learner.gradients",
            "save_gradients",
            world,
            str(model_folder),
            str(folder / f"gradients-{tied}"),
        )
    expected = references(tied)
    rows = []
    for path in sorted(folder.glob(f"gradients-{tied}-*")):
        results = load_file(path)
        for key in sorted({k.rsplit("/scalars", 1)[0] for k in results if k.endswith("/scalars")}):
            name, limit, two_pass = key.split("/")
            differences = _differences(results, key, expected[name])
            mesh = path.name.split("-", 2)[2]
            rows.append((mesh, name, f"{two_pass} pass, {limit} tokens", differences))
    return rows


def _differences(
    results: dict[str, torch.Tensor], key: str, expected: Reference
) -> dict[str, float]:
    prefix = f"{key}/gradient/"
    found = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
    assert found.keys() == expected.gradient.keys(), found.keys() ^ expected.gradient.keys()
    largest = max(float(g.abs().max()) for g in expected.gradient.values())
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradient.values()))
    loss, found_norm = results[f"{key}/scalars"].tolist()
    weights = torch.tensor(expected.weights, dtype=torch.float64)
    log_ratios = torch.tensor(expected.log_ratios, dtype=torch.float64)
    return {
        "gradient": max(float((found[n] - g).abs().max()) for n, g in expected.gradient.items())
        / largest,
        "norm": abs(found_norm - norm) / norm,
        "loss": abs(loss - expected.loss) / abs(expected.loss),
        "weight": float((results[f"{key}/weights"] - weights).abs().max() / weights.max()),
        "log_ratio": float((results[f"{key}/log_ratios"] - log_ratios).abs().max()),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for tied in (True, False):
            print(f"tied embeddings: {tied}")
            print(f"{'mesh':14} {'estimator':9} {'pass, limit':26} largest relative differences")
            for mesh, name, passes, differences in compare(Path(folder), tied):
                values = "  ".join(f"{k} {v:.1e}" for k, v in differences.items())
                print(f"{mesh:14} {name:9} {passes:26} {values}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        assert sys.argv[1] == "save_gradients", sys.argv
        save_gradients(*sys.argv[2:])
    else:
        main()
