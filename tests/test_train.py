"""Whole runs on real parts: lag, repeatability, resume, other meshes, conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays

from megatron_gmc.cli import main
from megatron_gmc.config import LearnerConfig, ObjectiveConfig
from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.estimators import ESTIMATORS
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model_weights import load_weights
from megatron_gmc.learner.policy_step import Objective, policy_gradient
from megatron_gmc.optim_config import OptimConfig
from tests.runs import (
    assert_same_weights,
    completed,
    edit_json,
    end_world,
    final_weights,
    records,
    roll_back,
    sft_tree,
    start_ranks,
    train_tree,
    write_config,
)

pytestmark = pytest.mark.usefixtures("own_world")
PROMPTS_PER_STEP = 2


def trained(task: Path, folder: Path, **changes: dict[str, object]) -> Path:
    """Run a changed config to its end, in a process of its own; return the run's folder."""
    config = write_config(folder / "train.yaml", train_tree(task, folder / "run", **changes))
    completed("train", config)
    return folder / "run"


def sampled_versions(checkpoint: Path) -> dict[int, set[int]]:
    """Which versions sampled the finished groups of a checkpoint, by their step."""
    groups = json.loads((checkpoint / "rollout" / "rollout.json").read_text())["groups"]
    arrays = load_arrays(checkpoint / "rollout" / "rollout.safetensors")
    members = [len(group["finish_reasons"]) for group in groups]
    step_N = np.repeat([group["id"] // PROMPTS_PER_STEP for group in groups], members)
    step_S = np.repeat(step_N, arrays["lengths"])
    return {int(step): set(arrays["versions"][step_S == step].tolist()) for step in set(step_N)}


def assert_exact_lag(run: Path, lag: int) -> None:
    """Step t consumed version max(0, t − lag) alone, by its metrics and by every token."""
    for version, metrics in records(run).items():
        if version > 0:
            step = version - 1
            expected = step - max(0, step - lag)
            assert (metrics["lag/min"], metrics["lag/max"]) == (expected, expected)
    for checkpoint in (run / "checkpoints").glob("step_*"):
        for step, versions in sampled_versions(checkpoint).items():
            assert versions == {max(0, step - lag)}


# -- one rank ---------------------------------------------------------------------------------


def test_what_a_finished_run_leaves(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert (result["lag_min"], result["lag_max"]) == (0, 2)
    steps = records(finished)
    assert sorted(steps) == list(range(7))
    evaluated = {v for v, metrics in steps.items() if "evaluation/accuracy" in metrics}
    assert evaluated == {0, 3, 6}
    assert [steps[v]["evaluation/prompts"] for v in (0, 3, 6)] == [16, 8, 16]
    assert (result["accuracy_before"], result["accuracy_after"]) == (
        steps[0]["evaluation/accuracy"],
        steps[6]["evaluation/accuracy"],
    )
    kept = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000004", "step_000006"]
    assert not (finished / "weights").exists()
    for name in ("config.yaml", "versions.json", "plot.png", "tensorboard"):
        assert (finished / name).exists()


def test_transformers_loads_the_result(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("12+34=", return_tensors="pt").input_ids
    assert torch.isfinite(model(tokens).logits).all()


def test_warm_up_reaches_the_full_step_size(finished: Path) -> None:
    steps = records(finished)
    rates = [steps[version]["learning_rate"] for version in range(1, 7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_exact_lag(finished: Path) -> None:
    """L1 at lag 2; lag 0 and 1 are the other meshes'."""
    assert_exact_lag(finished, 2)
    assert sampled_versions(finished / "checkpoints" / "step_000002").keys() >= {2, 3}
    assert sampled_versions(finished / "checkpoints" / "step_000004").keys() == {4, 5}


def test_engine_and_learner_agree_about_log_probs(finished: Path) -> None:
    """T1: at lag 0 and temperature 0.7 every ratio is 1 within rounding, and later it is not."""
    steps = records(finished)
    first = steps[1]
    assert first["ratio/log_ratio_sd_lag0"] < 1e-4
    assert abs(first["ratio/log_ratio_mean"]) < 1e-4
    for name in ("mass_p10", "mass_max", "ess", "retained_mass"):
        assert first[f"ratio/{name}"] == pytest.approx(1, abs=1e-4)
    assert all("ratio/log_ratio_sd_lag0" not in steps[version] for version in range(2, 7))
    assert steps[3]["ratio/log_ratio_sd"] > 0.05


def test_every_estimator_takes_the_same_step_at_lag_0(task: Path, finished: Path) -> None:
    """Samples and behaviour log-probs of the engine, weights of the version that sampled them."""
    learner = untrained_learner(task)
    batch = batch_of(finished / "checkpoints" / "step_000002", step=2)
    assert batch.trajectories == 8
    gradients = {}
    for name in ("gmc", "none", "is", "tic_clip", "tic_mask", "grpo"):
        objective = Objective(ESTIMATORS[name](), ObjectiveConfig(), temperature=0.7)
        _, record, _ = policy_gradient(learner, batch, objective, LearnerConfig())
        assert record.ratios.log_ratio_N.abs().max() < 1e-4
        gradients[name] = torch.cat([p.main_grad.flatten() for p in learner.chunks[0].parameters()])
    assert gradients["none"].norm() > 1
    for name, gradient in gradients.items():
        difference = (gradient - gradients["none"]).norm() / gradients["none"].norm()
        assert difference < 1e-4, name


def untrained_learner(task: Path) -> Learner:
    shape, mesh = load_shape(task / "policy"), Mesh.create(1, 1)
    learner = Learner(shape, mesh, OptimConfig(lr=1e-3), steps=1)
    load_weights(learner.chunks, shape, mesh, stream_tensors(task / "policy"))
    return learner


def batch_of(checkpoint: Path, step: int) -> Batch:
    """The finished groups of a step, as a checkpoint holds them."""
    record = json.loads((checkpoint / "rollout" / "rollout.json").read_text())
    arrays = load_arrays(checkpoint / "rollout" / "rollout.safetensors")
    ends = arrays["lengths"].cumsum()
    rows, place = [], 0
    for group in record["groups"]:
        for _ in group["finish_reasons"]:
            part = slice(ends[place] - arrays["lengths"][place], ends[place])
            row = Row(
                id=place,
                group=group["id"],
                prompt_tokens=group["prompt"]["tokens"],
                response_tokens=arrays["tokens"][part].tolist(),
                loss_mask=arrays["mask"][part].tolist(),
                behaviour_log_probs=arrays["log_probs"][part].tolist(),
                reward=float(arrays["rewards"][place]),
                oldest_version=int(arrays["versions"][part].min()),
            )
            rows.append((group["id"] // PROMPTS_PER_STEP, row))
            place += 1
    return Batch.from_rows([row for its_step, row in rows if its_step == step])


def test_one_seed_one_result(task: Path, finished: Path, tmp_path: Path) -> None:
    """Also when evaluations and checkpoints fall elsewhere; another seed gives another."""
    again = trained(task, tmp_path, train={"save_every": 5}, evaluation={"every": 1})
    assert_same_weights(again, finished)
    ours, theirs = records(again), records(finished)
    assert all(ours[v].items() >= theirs[v].items() for v in theirs if v not in (3,))


def test_bounded_lag(task: Path, tmp_path: Path) -> None:
    """No token older than the bound, whatever the engine and the learner did meanwhile."""
    run = trained(
        task,
        tmp_path,
        train={"steps": 8, "save_every": 3},
        rollout={"lag": {"bounded": 2}, "temperature": 1.0},
    )
    steps = records(run)
    assert sorted(v for v in steps if "loss" in steps[v]) == list(range(1, 9))
    assert all(steps[v]["lag/max"] <= 2 for v in range(1, 9))
    assert (steps[1]["lag/min"], steps[1]["lag/max"]) == (0, 0)
    for version in (3, 6):
        checkpoint = run / "checkpoints" / f"step_{version:06d}"
        for step, versions in sampled_versions(checkpoint).items():
            assert step >= version
            assert max(versions) <= version
            assert min(versions) >= step - 2


def test_two_steps_on_one_batch(task: Path, tmp_path: Path) -> None:
    """L4: the second step's lag is one more, and is reported; a resumed run repeats it."""
    changes: dict[str, dict[str, object]] = {
        "train": {"output_dir": str(tmp_path / "run"), "steps": 6, "prompts_per_step": 2}
        | {"save_every": 4},
        "optim": {"lr": 1e-3, "steps_per_batch": 2},
        "evaluation": {"every": 2, "prompts": 8},
    }
    run = trained(task, tmp_path, **changes)
    steps = records(run)
    lags = [(steps[version]["lag/min"], steps[version]["lag/max"]) for version in range(1, 7)]
    assert lags == [(0, 0), (1, 1), (2, 2), (3, 3), (2, 2), (3, 3)]
    for version, (lag, _) in enumerate(lags, 1):
        assert steps[version][f"lag/tokens/{lag:.0f}"] == 1
    assert {v for v, metrics in steps.items() if "evaluation/accuracy" in metrics} == {0, 2, 4, 6}
    again = tmp_path / "again" / "run"
    roll_back(run, again, 4)
    assert sampled_versions(again / "checkpoints" / "step_000004") == {4: {2}, 5: {2}}
    changes["train"] |= {"output_dir": str(again)}
    config = write_config(tmp_path / "again.yaml", train_tree(task, again, **changes))
    end_world()
    completed("train", config, "--resume")
    assert_same_weights(run, again)
    assert records(again) == steps


# -- two ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensor", "pipeline", "data"])
def test_the_first_step_on_another_mesh(meshes: Path, finished: Path, name: str) -> None:
    ours, theirs = records(meshes / name)[1], records(finished)[1]
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert ours["reward/mean"] == theirs["reward/mean"]
    assert ours["grad_norm"] > 1


def test_exact_lag_on_other_meshes(meshes: Path) -> None:
    """L1 at lag 0 and 1."""
    assert_exact_lag(meshes / "pipeline", 0)
    assert_exact_lag(meshes / "data", 1)
    assert_exact_lag(meshes / "tensor", 2)


def test_supervised_on_two_ranks(task: Path, meshes: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "sft.yaml", sft_tree(task, tmp_path / "run"))
    assert main(["sft", str(config)]) == 0
    ours, theirs = records(meshes / "sft"), records(tmp_path / "run")
    assert ours == {
        step: pytest.approx(metrics, rel=1e-5, abs=1e-6) for step, metrics in theirs.items()
    }
    losses = [theirs[step]["loss"] for step in (1, 2, 3, 4)]
    assert losses[-1] < losses[0]
    both = final_weights(meshes / "sft"), final_weights(tmp_path / "run")
    for name, weight in both[0].items():
        torch.testing.assert_close(weight, both[1][name], rtol=0, atol=1e-6)


# -- conversion -------------------------------------------------------------------------------


def test_a_checkpoint_of_two_tensor_ranks_converts(
    task: Path, meshes: Path, tmp_path: Path
) -> None:
    source = meshes / "tensor" / "checkpoints" / "step_000006"
    target = tmp_path / "run" / "huggingface"
    assert main(["convert", str(source), str(target), "--like", str(task / "policy")]) == 0
    assert_same_weights(tmp_path / "run", meshes / "tensor")


def test_two_ranks_write_one_folder(task: Path, finished: Path, tmp_path: Path) -> None:
    """Under torchrun every rank runs the command, and only one may write what it prints."""
    target = tmp_path / "run" / "huggingface"
    source = finished / "checkpoints" / "step_000006" / "learner"
    command = ("convert", source, target, "--like", task / "policy")
    ranks = start_ranks(2, tmp_path / "log", *command)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert_same_weights(tmp_path / "run", finished)
    said = [(tmp_path / f"log.rank{rank}").read_text().count("wrote the") for rank in (0, 1)]
    assert said == [1, 0]


def test_there_and_back(
    task: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "run" / "huggingface"
    source = finished / "huggingface"
    assert main(["convert", str(source), str(megatron)]) == 0
    assert main(["convert", str(megatron), str(back)]) == 2
    assert "--like: a Megatron checkpoint has no config.json" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(source, other)
    edit_json(other / "config.json", intermediate_size=64)
    assert main(["convert", str(megatron), str(back), "--like", str(other)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --like {other}: {megatron}: decoder.layers.mlp.linear_fc1")
    assert len(said.splitlines()) == 1
    assert not back.exists()
    assert main(["convert", str(megatron), str(back), "--like", str(source)]) == 0
    assert_same_weights(tmp_path / "run", finished)
    for path in source.iterdir():
        if path.suffix == ".json":
            assert json.loads((back / path.name).read_text()) == json.loads(path.read_text())
