"""One batch, one gradient: every mesh, pass and micro-batch size against a plain reference.

`python -m benchmarks.gradients` prints the whole table; test_gradients.py asserts a part of it.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_gmc.config import LearnerConfig, MeshConfig, ObjectiveConfig
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.optim_config import OptimConfig
from tests.distributed import run_ranks
from tests.learner.methods import ESTIMATORS, SETTINGS
from tests.models import VOCABULARY, tiny_model
from tests.reference import Reference, ReferenceTrajectory, reference_gradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megatron_gmc.learner.learner import Learner
    from megatron_gmc.learner.mesh import Mesh

TEMPERATURE = 0.7
# Kind of model → its family and whether its embedding is tied.
KINDS = {
    "tied": ("qwen3", True),
    "untied": ("qwen3", False),
    "mixture": ("qwen3_moe", False),
}

Job = tuple[str, int, Literal["auto", "two_pass"]]
"""An estimator, the tokens that a micro-batch may hold, and how weights are formed."""

OUTLIER = 9
"""The trajectory that is far from its behaviour policy."""
UNBOUNDED = ("is", "decoupled_ppo")

ONE, SOME, ALL = 32, 220, 4096
"""Tokens of a micro-batch that holds one trajectory, a few groups, the whole batch."""

_AXIS = re.compile(r"(TP|CP|PP|VPP|EP|DP)(\d+)|SP|ZeRO")
_FIELD = {"TP": "tensor", "CP": "context", "PP": "pipeline", "VPP": "virtual_pipeline"}


def every_job() -> list[Job]:
    """gmc in every way, its baselines with the smallest and the largest micro-batches, the other
    methods with a middle size."""
    jobs: list[Job] = [("gmc", ONE, "auto"), ("gmc", SOME, "auto")]
    jobs += [("gmc", ALL, "auto"), ("gmc", ALL, "two_pass")]
    for name in ESTIMATORS:
        if name in ("none", "is", "tic_clip", "tic_mask", "grpo"):
            jobs += [(name, ONE, "auto"), (name, ALL, "auto")]
        elif name != "gmc":
            jobs.append((name, SOME, "auto"))
    return jobs


def some_jobs(turn: int) -> list[Job]:
    """gmc in every way, and a fifth of the other methods; five turns show all."""
    rest = [job for job in every_job() if job[0] != "gmc"]
    return [job for job in every_job() if job[0] == "gmc"] + rest[turn % 5 :: 5]


def mesh_config(name: str) -> MeshConfig:
    """The config of a mesh by its name, such as TP2×SP×CP2; data parallelism takes the rest.

    ZeRO in a name is for the optimizer, which then shards its state.
    """
    fields: dict[str, int | bool] = {}
    for axis in name.split("×"):
        match = _AXIS.fullmatch(axis)
        assert match is not None, name
        if axis == "SP":
            fields["sequence_parallel"] = True
        elif match[1] == "EP":
            fields["expert"] = int(match[2])
        elif match[1] not in ("DP", None):
            fields[_FIELD[match[1]]] = int(match[2])
    return MeshConfig(**fields)  # type: ignore[arg-type]


def small_model(kind: str) -> PreTrainedModel:
    """Four layers, which four stages can share."""
    family, tied = KINDS[kind]
    return tiny_model(family, tied, layers=4)


def outlier_of(estimator: str) -> float:
    """The log-ratio of one trajectory: 300, except where nothing bounds what float32 must hold."""
    return 30.0 if estimator in UNBOUNDED else 300.0


def trajectories(outlier: float = 30.0) -> list[ReferenceTrajectory]:
    """Groups of 3, 4, 8 and 2 in mixed order: holes in the mask, a response of one token, equal
    rewards in a group, a trajectory without a loss token, ratios far from 1 and one of e^outlier.

    Behaviour log-probs are float32's, as the learner gets them.
    """
    rng = random.Random(5)
    model = small_model("tied").double()
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
        at = torch.arange(len(prompt) - 1, len(prompt) + length - 1)
        behaviour = current[at, torch.tensor(response)]
        behaviour += torch.tensor([rng.gauss(0, 0.25) for _ in response], dtype=torch.float64)
        reward = 1.0 if group == 1 else float(rng.randint(0, 3))
        if i == OUTLIER:
            behaviour[0] -= outlier
            # The group's best: methods that clip from one side clip it.
            reward = 4.0
        behaviour[~torch.tensor(mask)] = math.nan
        batch.append(
            ReferenceTrajectory(
                tokens=prompt + response,
                prompt_length=len(prompt),
                mask=mask,
                behaviour_log_prob=behaviour.float().tolist(),
                group=group,
                reward=reward,
            )
        )
    return batch


def references(kind: str, estimators: Sequence[str]) -> dict[str, Reference]:
    """What each estimator's gradient of the batch is."""
    model = small_model(kind)
    return {
        name: reference_gradient(
            model,
            trajectories(outlier_of(name)),
            name,
            ESTIMATORS[name],
            SETTINGS[name][1],
            SETTINGS[name][0],
            TEMPERATURE,
        )
        for name in estimators
    }


def learner_batch(outlier: float = 30.0) -> Batch:
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
            for i, t in enumerate(trajectories(outlier))
        ]
    )


def save_gradients(folder: str, *arguments: str) -> None:
    """On every rank: the learner's gradients on each mesh, to files in `folder`.

    Each argument is kind/mesh/turn: turn `all` takes every job, a number `some_jobs` of it.
    """
    from megatron_gmc.learner.mesh import Mesh

    torch.set_num_threads(1)
    # One world for all meshes: gloo does not start a second one in the same process.
    dist.init_process_group("gloo")
    for argument in arguments:
        kind, name, turn = argument.split("/")
        mesh = Mesh.of(mesh_config(name))
        jobs = every_job() if turn == "all" else some_jobs(int(turn))
        optim = OptimConfig(lr=1e-3, distributed="ZeRO" in name)
        results = dict(_results(Path(folder) / f"model-{kind}", mesh, optim, jobs))
        if mesh.rank == 0:
            save_file(results, Path(folder) / f"{kind} {name}")
        mesh.close()
    dist.destroy_process_group()


def _results(
    model: Path, mesh: Mesh, optim: OptimConfig, jobs: Sequence[Job]
) -> Iterator[tuple[str, Tensor]]:
    """Named numbers and, on rank 0, the gradient's tensors of every job."""
    from megatron_gmc.convert.hf_config import load_shape
    from megatron_gmc.convert.hugging_face import stream_tensors
    from megatron_gmc.estimators import ESTIMATORS as REGISTRY
    from megatron_gmc.learner.learner import Learner
    from megatron_gmc.learner.model_weights import load_weights
    from megatron_gmc.learner.policy_step import Objective, policy_gradient

    learner = Learner(load_shape(model), mesh, optim, steps=1)
    load_weights(learner.chunks, learner.shape, mesh, stream_tensors(model))
    batches = {outlier: learner_batch(outlier) for outlier in (30.0, 300.0)}
    for name, limit, passes in jobs:
        batch = batches[outlier_of(name)]
        aggregation, advantage = SETTINGS[name]
        objective = Objective(
            REGISTRY[name](**ESTIMATORS[name]),
            ObjectiveConfig(aggregation=aggregation, advantage=advantage),
            TEMPERATURE,
        )
        settings = LearnerConfig(micro_batch_tokens=limit, passes=passes)
        loss, record, two_pass = policy_gradient(learner, batch, objective, settings)
        learner.optimizer.prepare_grads()
        norm = float(learner.optimizer.get_grad_norm())
        key = f"{name}/{limit}/{'two' if two_pass else 'single'}"
        yield f"{key}/scalars", torch.tensor([loss, norm], dtype=torch.float64)
        yield f"{key}/taken", record.take_N
        yield f"{key}/weights", record.weight_N.clone()
        yield f"{key}/log_ratios", record.ratios.log_ratio_N.clone()
        if optim.distributed:
            _gather_shards(learner)
        for weight, gradient in _gradient(learner):
            yield f"{key}/gradient/{weight}", gradient


def _gather_shards(learner: Learner) -> None:
    """A sharded optimizer's ranks hold the sum of gradients for their own part alone."""
    for wrapped in learner.model:
        for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def _gradient(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Whole gradients by Hugging Face name, on rank 0; collective."""
    from megatron_gmc.learner.model_weights import gathered, parameter_name

    local = {
        parameter_name(name, index, learner.shape, learner.mesh): parameter.main_grad
        for index, chunk in enumerate(learner.chunks)
        for name, parameter in chunk.named_parameters()
    }
    return gathered(local, learner.shape, learner.mesh)


@dataclass(frozen=True)
class Compared:
    """How far one job on one mesh is from the reference.

    `differences`: of the gradient, relative to its largest entry; of its norm and the loss,
    relative; of the weights, relative to the largest; of the log-ratios, relative where above 1.
    """

    kind: str
    mesh: str
    estimator: str
    limit: int
    passes: str
    differences: dict[str, float]


def compare(folder: Path, worlds: dict[int, list[str]], timeout: float = 600) -> list[Compared]:
    """Run meshes, given as `save_gradients` takes them by number of ranks, and compare."""
    kinds = {argument.split("/")[0] for arguments in worlds.values() for argument in arguments}
    for kind in kinds:
        small_model(kind).save_pretrained(folder / f"model-{kind}")
    for world, arguments in worlds.items():
        run_ranks(
            "tests.learner.gradients",
            "save_gradients",
            world,
            str(folder),
            *arguments,
            timeout=timeout,
        )
    rows = []
    for kind in sorted(kinds):
        files = {path: load_file(path) for path in sorted(folder.glob(f"{kind} *"))}
        keys = {path: _keys(results) for path, results in files.items()}
        used = {key.split("/")[0] for of_file in keys.values() for key in of_file}
        expected = references(kind, sorted(used))
        for path, results in files.items():
            for key in keys[path]:
                name, limit, passes = key.split("/")
                differences = _differences(results, key, expected[name])
                mesh = path.name.removeprefix(f"{kind} ")
                rows.append(Compared(kind, mesh, name, int(limit), passes, differences))
    return rows


def _keys(results: dict[str, Tensor]) -> list[str]:
    return sorted(key.removesuffix("/scalars") for key in results if key.endswith("/scalars"))


def _each_expert(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """transformers stacks a layer's experts in memory, and names each in a file."""
    for name, tensor in tensors.items():
        prefix, stacked, kind = name.partition(".experts.")
        if not stacked:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            of_expert = f"{prefix}.experts.{expert}"
            if kind == "down_proj":
                yield f"{of_expert}.down_proj.weight", matrix
            else:
                gate, up = matrix.chunk(2)
                yield f"{of_expert}.gate_proj.weight", gate
                yield f"{of_expert}.up_proj.weight", up


def _differences(
    results: dict[str, torch.Tensor], key: str, expected: Reference
) -> dict[str, float]:
    prefix = f"{key}/gradient/"
    found = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
    wanted = dict(_each_expert(expected.gradient))
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    loss, found_norm = results[f"{key}/scalars"].tolist()
    weights = torch.tensor(expected.weights, dtype=torch.float64)
    log_ratios = torch.tensor(expected.log_ratios, dtype=torch.float64)
    # What is left out has no signal in its group, and neither weight nor ratio.
    taken = results[f"{key}/taken"]
    assert all(a == 0 for a, t in zip(expected.advantages, taken.tolist(), strict=True) if not t)
    return {
        "gradient": max(float((found[n] - g).abs().max()) for n, g in wanted.items()) / largest,
        "norm": abs(found_norm - norm) / norm,
        "loss": abs(loss - expected.loss) / abs(expected.loss),
        "weight": float((results[f"{key}/weights"] - weights)[taken].abs().max() / weights.max()),
        "log_ratio": float((results[f"{key}/log_ratios"] - log_ratios)[taken].abs().max()),
    }


if __name__ == "__main__":
    assert sys.argv[1] == "save_gradients", sys.argv
    save_gradients(*sys.argv[2:])
