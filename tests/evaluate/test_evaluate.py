"""The command on real engines: the same numbers as training's curve, resume, both checkpoints."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_gmc.cli import main
from tests.runs import environment, records, run_alone, write_config

Tree = dict[str, dict[str, object]]

TOKEN = "not-a-secret"


def config(task: Path, model: Path, output: Path, **sampling: object) -> Path:
    """Two tasks: one whose prompts are held out, one that is evaluated whole."""
    source = {"type": "jsonl", "path": str(task / "heldout.jsonl")}
    grader = {"type": "function", "path": "tests.reward:even_digits"}
    tree = {
        "output_dir": str(output),
        "model": {"path": str(model)},
        "tasks": {
            "held_out": {
                "source": {"type": "jsonl", "path": str(task / "prompts.jsonl")},
                "held_out_source": source,
                "grader": grader,
            },
            "sums": {"source": source, "grader": {"type": "exact", "after": ">"}},
        },
        "sampling": {"max_response_tokens": 12, "temperature": 0.7, **sampling},
    }
    return write_config(output.with_suffix(".yaml"), tree)


def results(folder: Path) -> Tree:
    found: Tree = json.loads((folder / "evaluation.json").read_text())["tasks"]
    return found


def lines(folder: Path) -> list[str]:
    return sorted((folder / "samples.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def evaluated(task: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sample a prompt of a run's last weights."""
    folder = tmp_path_factory.mktemp("evaluated") / "one"
    assert main(["evaluate", str(config(task, finished / "huggingface", folder))]) == 0
    return folder


def test_it_repeats_the_last_point_of_trainings_curve(finished: Path, evaluated: Path) -> None:
    """Same weights, seeds and graders: not close, but the same responses."""
    last = records(finished)[6]
    found = results(evaluated)["held_out"]
    assert found["accuracy"]["mean"] == last["evaluation/accuracy"]  # type: ignore[index]
    assert found["response_tokens"]["mean"] == last["evaluation/mean_tokens"]  # type: ignore[index]
    assert found["prompts"] == last["evaluation/prompts"] == 16
    assert found["majority"] is None and results(evaluated)["sums"]["majority"] is not None


def test_an_interrupted_evaluation_goes_on(task: Path, finished: Path, evaluated: Path) -> None:
    """A kill may leave whole lines of some prompts and half a line of another."""
    folder = evaluated.with_name("interrupted")
    path = config(task, finished / "huggingface", folder)
    shutil.copytree(evaluated, folder, ignore=lambda *_: {"evaluation.json"})
    kept = (folder / "config.yaml").read_text().replace(str(evaluated), str(folder))
    (folder / "config.yaml").write_text(kept)
    whole = (evaluated / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(whole[3:20:2]) + whole[0][:25])
    assert main(["evaluate", str(path)]) == 0
    assert (folder / "samples.jsonl").read_text().startswith("".join(whole[3:20:2]))
    assert lines(folder) == lines(evaluated)
    assert results(folder) == results(evaluated)


def test_a_finished_evaluation_samples_nothing_again(
    task: Path, finished: Path, evaluated: Path
) -> None:
    path = config(task, finished / "huggingface", evaluated)
    before = (evaluated / "samples.jsonl").read_bytes()
    assert main(["evaluate", str(path), "--sampling.pass_reward", "0.5"]) == 0
    assert (evaluated / "samples.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("--sampling.temperature", "1.5"), "sampling.temperature: 1.5, but the evaluation in"),
        (("--sampling.k", "[2]"), "sampling.k: 2 needs as many samples, got 1"),
        (("--sampling.max_response_tokens", "64"), "leaves no room for a prompt"),
        (("--engine", "{type: http, address: localhost}"), "is no address such as"),
        (("--sampling.sample", "3"), "sampling.sample: unknown key; did you mean samples?"),
    ],
)
def test_faults_are_named(
    task: Path,
    finished: Path,
    evaluated: Path,
    capsys: pytest.CaptureFixture[str],
    override: tuple[str, str],
    message: str,
) -> None:
    path = config(task, finished / "huggingface", evaluated)
    assert main(["evaluate", str(path), *override]) == 2
    assert message in capsys.readouterr().err


def test_other_weights_do_not_mix_in(
    task: Path, finished: Path, evaluated: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, model = evaluated.with_name("other"), tmp_path / "model"
    shutil.copytree(finished / "huggingface", model)
    path = config(task, model, folder)
    shutil.copytree(evaluated, folder)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            yaml.safe_load((evaluated / "config.yaml").read_text())
            | {"output_dir": str(folder), "model": {"path": str(model), "like": None}}
        )
    )
    (model / "model.safetensors").touch()
    assert main(["evaluate", str(path)]) == 2
    assert "holds samples of another weights" in capsys.readouterr().err


def test_a_megatron_checkpoint_samples_what_its_hugging_face_folder_does(
    task: Path, finished: Path, evaluated: Path
) -> None:
    """In a process of its own, because a conversion joins a process group."""
    folder = evaluated.with_name("megatron")
    path = config(task, finished / "checkpoints" / "step_000006", folder)
    done = run_alone("evaluate", path, "--model.like", finished / "huggingface")
    assert done.returncode == 0, done.stderr
    assert lines(folder) == lines(evaluated)


def test_a_running_engine_keeps_its_weights(
    task: Path,
    finished: Path,
    evaluated: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The embedded engine's process, started by hand as version 6, is reached by its address."""
    folder = evaluated.with_name("running")
    path = config(task, finished / "huggingface", folder)
    with engine(finished / "huggingface", version=6) as port:
        override = f"{{type: http, address: 'http://127.0.0.1:{port}', token_env: ENGINE_TOKEN}}"
        assert main(["evaluate", str(path), "--engine", override]) == 2
        assert "the environment has no ENGINE_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("ENGINE_TOKEN", TOKEN)
        assert main(["evaluate", str(path), "--engine", override]) == 0
    assert lines(folder) == lines(evaluated)
    assert json.loads((folder / "subject.json").read_text())["weights"] == {"version": 6}
    assert TOKEN not in (folder / "config.yaml").read_text()


@contextlib.contextmanager
def engine(model: Path, *, version: int) -> Iterator[int]:
    """An embedded engine's process; yields its port."""
    command = [sys.executable, "-m", "megatron_gmc.rollout.embedded", str(model)]
    process = subprocess.Popen(
        [*command, "--version", str(version)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{TOKEN}\n")
        process.stdin.flush()
        yield int(json.loads(process.stdout.readline())["port"])
    finally:
        process.kill()
        process.wait()
