"""The rendered batch script: what it asks for, what it refuses; no value runs a command."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_gmc.cli import main
from megatron_gmc.errors import ConfigError
from megatron_gmc.launch.command import slurm
from tests.runs import train_tree, write_config

FULL: dict[str, object] = {
    "nodes": 2,
    "ranks_per_node": 8,
    "gpus_per_node": 8,
    "cpus_per_rank": 12,
    "time": "1-12:00:00",
    "partition": "gpu",
    "account": "lab.rl",
    "qos": "high",
    "name": "qwen3-lag16",
    "warn_s": 600,
    "interface": "ib0",
    "python": "python",
}


def write(folder: Path, name: str = "train.yaml", **changes: dict[str, object]) -> Path:
    return write_config(folder / name, train_tree(folder, folder / "run", **changes))


def rendered(folder: Path, options: dict[str, object], *overrides: str, **config: object) -> str:
    output = folder / "job.sh"
    assert slurm(write(folder), overrides, options, output) == 0
    return output.read_text()


def directives(script: str) -> set[str]:
    return {line for line in script.splitlines() if line.startswith("#SBATCH")}


def test_what_is_asked_of_the_cluster(tmp_path: Path) -> None:
    assert directives(rendered(tmp_path, FULL)) == {
        "#SBATCH --job-name=qwen3-lag16",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=1-12:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=lab.rl",
        "#SBATCH --qos=high",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR1@600",
    }


CONTAINERS: list[dict[str, object]] = [
    {},
    {"container": "nvcr.io/nvidia/pytorch:25.10-py3", "mounts": ("/data:/data", "/runs:/runs")},
    {"container": "/images/gmc.sif", "container_runtime": "apptainer", "mounts": ("/data:/data",)},
]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("container", CONTAINERS, ids=["bare", "pyxis", "apptainer"])
def test_shellcheck_finds_nothing(tmp_path: Path, container: dict[str, object]) -> None:
    for options in ({"nodes": 1}, FULL | container):
        rendered(tmp_path, options)
        check = subprocess.run(
            ["shellcheck", str(tmp_path / "job.sh")], capture_output=True, text=True
        )
        assert check.returncode == 0, check.stdout


def test_the_container_reaches_the_ranks(tmp_path: Path) -> None:
    pyxis = rendered(tmp_path, FULL | CONTAINERS[1])
    assert "--container-image=nvcr.io/nvidia/pytorch:25.10-py3" in pyxis
    assert "--container-mounts=/data:/data,/runs:/runs" in pyxis
    apptainer = rendered(tmp_path, FULL | CONTAINERS[2])
    words = shlex.split(apptainer.replace("\\\n", " "), comments=True)
    start = words.index("apptainer")
    assert words[start : start + 6] == [
        "apptainer", "exec", "--nv", "--bind", "/data:/data", "/images/gmc.sif",
    ]  # fmt: skip


HOSTILE = "$(touch {mark}); `touch {mark}` '; touch {mark}; \"%j"


@pytest.mark.parametrize("shell", ["bash", "bash -n"])
def test_no_value_of_a_config_runs_a_command(tmp_path: Path, shell: str) -> None:
    """The config's own path, its fields and overrides come out of bash as they went in."""
    mark = tmp_path / "ran"
    folder = tmp_path / "a $(touch ran) 'folder'"
    folder.mkdir()
    config = write(folder, "my $(touch ran) config.yaml")
    value = HOSTILE.format(mark=mark)
    output = tmp_path / "job.sh"
    override = ["--train.output_dir", yaml.safe_dump(value).strip()]
    assert slurm(config, override, {"nodes": 1, "python": "echo"}, output) == 0
    script = output.read_text()
    if shell == "bash":
        # Stand-ins for the cluster's commands: srun prints what it was given.
        stubs = tmp_path / "bin"
        stubs.mkdir()
        for name, body in {"srun": 'printf "%s\\0" "$@"', "squeue": "", "scontrol": ""}.items():
            (stubs / name).write_text(f"#!/bin/sh\n{body}\n")
            (stubs / name).chmod(0o755)
        done = subprocess.run(
            ["bash", str(output)],
            env={"PATH": f"{stubs}:/usr/bin:/bin", "SLURM_JOB_ID": "1"},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        arguments = done.stdout.split("\0")
        assert str(config.resolve()) in arguments, done.stderr
        assert override[1] in arguments
    else:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not mark.exists()
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nodes": 1, "name": "a b"}, "name"),
        ({"nodes": 1, "partition": "x\n#SBATCH --uid=0"}, "partition"),
        ({"nodes": 1, "account": "--uid=0"}, "account"),
        ({"nodes": 1, "time": "tomorrow"}, "time"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": 1, "warn_s": -1}, "warn_s"),
    ],
)
def test_an_option_that_slurm_would_misread(
    tmp_path: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{says}: "):
        slurm(write(tmp_path), [], options, None)


def test_a_mesh_that_the_ranks_cannot_fill(tmp_path: Path) -> None:
    """C8, before anything is queued."""
    config = write(tmp_path, mesh={"tensor": 4, "pipeline": 2})
    with pytest.raises(ConfigError, match=r"nodes 3 × ranks_per_node 4 = 12 ranks .* = 8"):
        slurm(config, [], {"nodes": 3, "ranks_per_node": 4}, None)


def test_context_ranks_count(tmp_path: Path) -> None:
    config = write(tmp_path, mesh={"tensor": 2, "context": 2})
    with pytest.raises(ConfigError, match=r"mesh\.context 2 × mesh\.pipeline 1 = 4"):
        slurm(config, [], {"nodes": 1, "ranks_per_node": 6}, None)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path)
    arguments = ["slurm", str(config), "--nodes", "2", "--time", "30", "--optim.lr", "0.5"]
    assert main(arguments) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --time=30" in script
    assert "--optim.lr 0.5" in script
    assert main([*arguments, "--optim.lrr", "1"]) == 2
    assert "did you mean lr?" in capsys.readouterr().err
