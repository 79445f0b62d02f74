"""The record of a run survives the way it ended."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_gmc.config import WandbConfig
from megatron_gmc.metrics import read_metrics
from megatron_gmc.run_log import RunLog


def test_a_resumed_run_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    """A full disk or a kill may leave half a line, which would spoil the next one."""
    metrics = tmp_path / "metrics.jsonl"
    log = RunLog(tmp_path, title="run", steps=3, start=0)
    log.write(1, {"loss": 0.5})
    log.close()
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b'{"step": 2, "lo')
    log = RunLog(tmp_path, title="run", steps=3, start=1)
    log.write(2, {"loss": 0.25})
    log.close()
    assert metrics.read_bytes().startswith(whole)
    assert read_metrics(metrics) == {"loss": [(1, 0.5), (2, 0.25)]}


@pytest.mark.parametrize("written", [b"", b'{"step": 1, "lo'])
def test_a_record_without_one_whole_line(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(written)
    log = RunLog(tmp_path, title="run", steps=3, start=0)
    log.write(1, {"loss": 0.5})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == {"loss": [(1, 0.5)]}


def test_the_last_of_two_lines_of_a_step_counts(tmp_path: Path) -> None:
    log = RunLog(tmp_path, title="run", steps=3, start=0)
    for step, loss in ((1, 1.0), (2, 2.0), (1, 3.0)):
        log.write(step, {"loss": loss})
    log.write_aside(0, {"evaluation/accuracy": 0.5})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == {
        "loss": [(1, 3.0), (2, 2.0)],
        "evaluation/accuracy": [(0, 0.5)],
    }


def test_values_that_json_has_no_word_for_stay_visible(tmp_path: Path) -> None:
    log = RunLog(tmp_path, title="run", steps=1, start=0)
    log.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=lambda word: pytest.fail(word)) == {
        "step": 1,
        "a": "nan",
        "b": "inf",
        "c": "-inf",
    }
    series = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(series["a"][0][1])
    assert series["c"] == [(1, -math.inf)]


def test_wandb_gets_the_same_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: everything stays in the folder, also a late evaluation of an older step."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    settings = WandbConfig(project="demo", mode="offline")
    log = RunLog(tmp_path, title="run", steps=3, start=0, wandb=settings)
    log.write(1, {"loss": 0.5})
    log.write(2, {"loss": 0.25})
    log.write_aside(1, {"evaluation/accuracy": 0.75})
    log.close()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert all(name in content for name in (b"loss", b"evaluation/accuracy", b"0.75"))
