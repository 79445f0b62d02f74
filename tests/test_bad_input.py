"""Faulty input at the command line: a line or two on what to do, an exit code, nothing left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_gmc.cli import main
from megatron_gmc.config import Config
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.settings import load_config
from tests.runs import (
    edit_json,
    run_alone,
    sft_tree,
    train_tree,
    write_config,
)

pytestmark = pytest.mark.usefixtures("own_world")
Refused = Callable[..., str]


@pytest.fixture
def config_file(task: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", train_tree(task, tmp_path / "run"))


@pytest.fixture
def refused(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refused:
    """Run a command that must be refused before any model is built; return what it says."""

    def built(*_: object, **__: object) -> None:
        raise AssertionError("a model was built or an engine started")

    for place in ("opening.Learner", "opening.Lead", "sft.Learner"):
        monkeypatch.setattr(f"megatron_gmc.{place}", built)

    def run(*overrides: str | Path, words: tuple[str | Path, ...] = ("train", config_file)) -> str:
        root = config_file.parent
        before = sorted(root.rglob("*"))
        assert main([*map(str, words), *map(str, overrides)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert len(output.err.splitlines()) <= 2
        assert sorted(root.rglob("*")) == before
        return output.err.removeprefix("error: ").strip()

    return run


# -- prompts ----------------------------------------------------------------------------------

GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty: it needs one JSON object per line"),
        ([json.dumps(GOOD), '{"prompt": "1+2=",'], "line 2: not valid JSON"),
        ([json.dumps(GOOD), "", "[1]"], "line 3: must be a JSON object, got"),
        ([json.dumps(GOOD), '{"prompt": "1+2="}'], "line 2: field 'answer' is missing"),
        (['{"answer": "2"}'], "line 1: needs field 'prompt' or 'messages', has ['answer']"),
    ],
    ids=["empty", "broken", "no object", "no answer", "no prompt"],
)
def test_a_faulty_prompt_file(
    refused: Refused, config_file: Path, lines: list[str], said: str
) -> None:
    path = config_file.with_name("prompts.jsonl")
    path.write_text("".join(f"{line}\n" for line in lines))
    for field in ("source", "held_out_source"):
        text = refused(f"--task.{field}.path", path)
        assert text.startswith("task: ")
        assert str(path) in text
        assert said in text


def test_a_missing_prompt_file(refused: Refused, tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    text = refused("--task.source.path", missing)
    assert text == f"task: prompt file {missing} does not exist"
    text = refused("--task.source.path", tmp_path)
    assert text == f"task: prompt file {tmp_path} cannot be read: Is a directory"


def test_prompts_that_the_model_cannot_take(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(GOOD | {"prompt": "1" * 60}) + "\n")
    text = refused("--task.source.path", path)
    assert text.startswith("task: prompt jsonl:1 has 61 tokens, at most 52 are allowed")
    path.write_text(json.dumps(GOOD | {"prompt": "eins+eins="}) + "\n")
    assert "task: prompt jsonl:1 cannot be tokenised" in refused("--task.source.path", path)


def test_a_grader_that_cannot_be_found(refused: Refused) -> None:
    text = refused("--task.grader", "{type: function, path: 'no_such_module:grade'}")
    assert text.startswith("task: grader.path 'no_such_module:grade': cannot import")


# -- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("--mesh.tensor", "2"),
            "mesh: mesh.tensor 2 × mesh.pipeline 1 = 2 is more than the number of ranks, 1; ",
        ),
        (
            ("--mesh.pipeline", "3"),
            "mesh: mesh.tensor 1 × mesh.pipeline 3 = 3 is more than the number of ranks, 1; ",
        ),
        (("--mesh.virtual_pipeline", "2"), "mesh: mesh.virtual_pipeline: 2 with mesh.pipeline 1; "),
        (("--mesh.sequence_parallel", "true"), "mesh: mesh.sequence_parallel: true with mesh."),
        (("--mesh.expert", "2"), "mesh: mesh.expert: 2 with a model that has no experts; "),
        (("--train.steps", "0"), "train.steps: input should be greater than 0, got 0"),
        (
            ("--rollout.max_response_tokens", "64"),
            "rollout.max_response_tokens: 64 leaves no room for a prompt in the model's context "
            "of 64 tokens; lower it",
        ),
        (
            ("--learner.micro_batch_tokens", "20"),
            "learner.micro_batch_tokens: 20 is less than the longest possible trajectory, 9 prompt "
            "+ 12 response tokens; raise it to 21 or more",
        ),
        (
            ("--learner.micro_batch_tokens", "83", "--learner.passes", "single_pass"),
            "learner.passes: single_pass needs a whole group in a micro-batch, up to 4 × 21 "
            "tokens, and learner.micro_batch_tokens is 83; ",
        ),
        (
            ("--evaluation.prompts", "17"),
            "evaluation.prompts: 17 is more than the 16 held-out prompts",
        ),
    ],
)
def test_limits_that_do_not_fit_together(
    refused: Refused, overrides: tuple[str, ...], said: str
) -> None:
    """C8, S5."""
    assert refused(*overrides).startswith(said)


def test_limits_that_just_fit(config_file: Path) -> None:
    """S5: the messages name the smallest number that is right."""
    from megatron_gmc.convert.hf_config import load_shape
    from megatron_gmc.setup_checks import check_task

    for overrides in (
        ("--learner.micro_batch_tokens", "21"),
        ("--learner.micro_batch_tokens", "84", "--learner.passes", "single_pass"),
        ("--evaluation.prompts", "16"),
    ):
        config = load_config(Config, config_file, overrides)
        task = check_task(config, load_shape(config.policy.path))
        assert (len(task.prompts.train), len(task.prompts.held_out)) == (64, 16)


# -- models -----------------------------------------------------------------------------------


def without_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "it has no config.json; give the folder that holds config.json, the tokenizer and"


def without_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "holds no weights: neither model.safetensors nor"


def pickle_alone(folder: Path) -> str:
    """C7."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return "holds its weights as pytorch_model.bin, a pickle, which can run code when it is read"


def cut_off_weights(folder: Path) -> str:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return "model.safetensors is damaged: "


def broken_config(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json is not JSON: "


def other_architecture(folder: Path) -> str:
    edit_json(folder / "config.json", architectures=["GPT2LMHeadModel"])
    return "architectures: ['GPT2LMHeadModel']"


def without_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "has no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json"


def without_end(folder: Path) -> str:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    return "names no end-of-sequence token; set eos_token_id in generation_config.json"


def impossible_end(folder: Path) -> str:
    edit_json(folder / "generation_config.json", eos_token_id=[3, 20])
    return "ends responses with token 20, and the model's ids go from 0 to 19; mend eos_token_id"


def broken_generation_config(folder: Path) -> str:
    (folder / "generation_config.json").write_text("{")
    return "generation_config.json is no JSON object: "


@pytest.mark.parametrize(
    "fault",
    [
        without_config,
        without_weights,
        pickle_alone,
        cut_off_weights,
        broken_config,
        other_architecture,
        without_tokenizer,
        without_end,
        impossible_end,
        broken_generation_config,
    ],
)
def test_a_folder_that_is_no_usable_model(
    refused: Refused, task: Path, tmp_path: Path, fault: Callable[[Path], str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(task / "policy", folder)
    said = fault(folder)
    text = refused("--policy.path", folder)
    assert text.startswith(f"policy.path: {folder}")
    assert said in text


def test_a_tokenizer_of_another_vocabulary(refused: Refused, task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(task / "policy", folder)
    edit_json(folder / "config.json", vocab_size=16)
    assert refused("--policy.path", folder) == (
        "policy.path: tensor model.embed_tokens.weight: its shape is (20, 64), and by config.json "
        "it should be (16, 64)"
    )
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:16].clone()
    save_file(weights, folder / "model.safetensors")
    assert refused("--policy.path", folder) == (
        "task: the tokenizer has token id 19, the model's vocabulary ends at 15: take the "
        "tokenizer that belongs to the model"
    )


# -- the run's folder -------------------------------------------------------------------------


def test_a_folder_that_is_in_use(refused: Refused, config_file: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.open(load_config(Config, config_file), resume=False)
    assert refused() == (
        f"train.output_dir: {run.path} holds another run that has not finished (it has no "
        "checkpoint); continue it with --resume, remove it, or choose another folder"
    )
    run.checkpoints.joinpath("step_000004").mkdir(parents=True)
    assert "(its last checkpoint is step_000004)" in refused()


def test_a_folder_that_is_none_of_ours(refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert refused("--train.output_dir", tmp_path) == (
        f"train.output_dir: {tmp_path} is not an empty folder; choose a new one"
    )
    assert refused("--train.output_dir", file).startswith(f"train.output_dir: {file} is not an emp")
    below = file / "run"
    assert refused("--train.output_dir", below) == (
        f"train.output_dir: {below} cannot be made: Not a directory"
    )


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed(refused: Refused) -> None:
    assert refused("--train.wandb.project", "demo") == (
        "train.wandb: the package wandb is not installed; pip install 'megatron_gmc[wandb]', or "
        "leave train.wandb out"
    )


def test_nothing_to_resume(refused: Refused, tmp_path: Path) -> None:
    assert refused("--resume") == (
        f"train.output_dir: {tmp_path / 'run'} holds no run to resume; leave --resume out"
    )


@pytest.mark.parametrize(
    ("field", "value", "before"),
    [
        ("train.seed", "1", "0"),
        ("train.steps", "7", "6"),
        ("rollout.temperature", "0.8", "0.7"),
        ("rollout.lag.exact", "3", "2"),
        ("estimator.epsilon", "0.3", "0.2"),
        ("task.source.path", "'other.jsonl'", None),
    ],
)
def test_resume_with_another_config(
    refused: Refused, config_file: Path, tmp_path: Path, field: str, value: str, before: str | None
) -> None:
    """D4; a finished run is not another run's result either."""
    run = RunFolder(tmp_path / "run")
    run.open(load_config(Config, config_file), resume=False)
    if field == "task.source.path":
        other = tmp_path / "other.jsonl"
        other.write_text(json.dumps(GOOD) + "\n")
        text = refused("--resume", f"--{field}", other)
        assert text.startswith(f"{field}: '{other}', but the run in {run.path} was started with '")
        return
    said = (
        f"{field}: {value}, but the run in {run.path} was started with {before}; resume with "
        "that, or start a new run in another folder"
    )
    assert refused("--resume", f"--{field}", value) == said
    run.result.write_text("{}")
    assert refused(f"--{field}", value) == said


def test_a_process_that_is_refused(config_file: Path, tmp_path: Path) -> None:
    """As a user sees it: no traceback, no noise of libraries, nothing left behind."""
    missing = tmp_path / "missing.jsonl"
    done = run_alone("train", config_file, "--task.source.path", missing)
    assert done.returncode == 2
    assert done.stderr == f"error: task: prompt file {missing} does not exist\n"
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


# -- other commands ---------------------------------------------------------------------------


def test_faulty_supervised_runs(refused: Refused, task: Path, tmp_path: Path) -> None:
    words = ("sft", write_config(tmp_path / "sft.yaml", sft_tree(task, tmp_path / "run")))
    missing = tmp_path / "missing.jsonl"
    assert refused("--data.path", missing, words=words) == (
        f"data: prompt file {missing} does not exist"
    )
    assert refused("--policy.initial", "pretrained", words=words).startswith(
        f"policy.path: {task / 'model'} holds no weights"
    )
    assert refused("--learner.micro_batch_tokens", "8", words=words).startswith(
        "learner.micro_batch_tokens: 8 is less than the longest demonstration, "
    )
    assert refused("--mesh.tensor", "2", words=words).startswith("mesh: mesh.tensor 2 × ")


def test_faulty_conversions(refused: Refused, task: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert "model.safetensors" in refused(words=("convert", task / "model", target))
    assert "config.json" in refused(words=("convert", tmp_path, target))
    assert refused(words=("convert", task / "policy", task)) == (
        f"{task} exists already; remove it, or choose another target"
    )
