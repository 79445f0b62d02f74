"""`megatron-gmc theory`: the table and the advice, from flags and from a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gmc.cli import main


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Output on one line, because the width of the terminal breaks it."""
    assert main(["theory", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_numbers_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """sd(ℓ) = 1: the deficits of TIC-clip, TIC-mask and GMC at G = 16, and G for 5 %."""
    text = shown(capsys, "--sd", "1", "--group-size", "16", "--epsilon", "0.2")
    assert "0.940 (0.060)" in text
    assert "0.672 (0.328)" in text
    assert "0.375 (0.625)" in text
    assert "G for a deficit of 5%: 20, if ℓ is normal; 35 suffice" in text


def test_enough_is_said_to_be_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing has to change" in shown(capsys, "--sd", "0.3")
    assert "all methods coincide" in shown(capsys, "--sd", "0")


def test_a_starving_run_is_pointed_to_the_mismatch(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--sd", "4")
    assert "more than 4096" in text
    assert "log_ratio_sd_lag0" in text


def test_a_run_folder_brings_its_own_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later half counts: steps 3 and 4 have sd 1.0 and 1.2; flags win over the run."""
    (tmp_path / "config.yaml").write_text("rollout: {group_size: 4}\nestimator: {epsilon: 0.5}\n")
    rows = [(1, 0.0, 0.0), (2, 0.2, 0.0), (3, 1.0, 1.5), (4, 1.2, 1.5)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "step": step,
                    "ratio/log_ratio_sd": sd,
                    "ratio/log_ratio_sd_lag0": mismatch,
                    "ratio/retained_mass": 0.81,
                }
            )
            + "\n"
            for step, sd, mismatch in rows
        )
    )
    text = shown(capsys, str(tmp_path))
    assert "sd(ℓ) = 1.1, ε = 0.5" in text
    assert "GMC at G = 4 loses" in text
    assert "own retained mass is 0.810" in text
    assert "sd(ℓ) at lag 0 is 1.50" in text
    assert "GMC at G = 32 loses" in shown(capsys, str(tmp_path), "--group-size", "32")


def test_a_run_without_ratios_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a fine-tuning run leaves it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    assert main(["theory", str(tmp_path)]) == 2
    assert f"{tmp_path} has no ratio/log_ratio_sd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --sd"),
        (["--sd", "nan"], "--sd must be finite and at least 0, got nan"),
        (["--sd", "1", "--epsilon", "0"], "--epsilon must be finite and above 0, got 0"),
        (["--sd", "1", "--group-size", "-3"], "--group-size must be between 1 and 4096, got -3"),
        (["/nowhere"], "/nowhere holds no metrics.jsonl"),
    ],
)
def test_faulty_input_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["theory", *arguments]) == 2
    assert message in capsys.readouterr().err
