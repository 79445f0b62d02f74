"""The record of consumed groups: against transformers, closed forms, and other readers."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet as parquet
import pytest
import torch

from megatron_gmc.cli import main
from megatron_gmc.learner.policy_step import StepRecord
from megatron_gmc.rollout.types import Group, Prompt, Sample, Trajectory
from megatron_gmc.trajectory_record import SCHEMA, read_records, table_of, write_table
from tests.runs import records, trajectories

CAP = 1.2
LISTS = ("tokens", "mask", "behaviour_log_probs", "log_probs", "versions")


def by_group(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    return groups


def test_the_learners_log_probs_are_transformers(task: Path, finished: Path) -> None:
    """Of step 0, which consumed what the initial policy sampled, at temperature 0.7."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(task / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task / "policy")
    for row in trajectories(finished, 0):
        prompt = tokenizer(row["prompt"]).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + row["tokens"]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits.double() / 0.7).log_softmax(-1)
        places = torch.arange(len(row["tokens"]))
        expected = expected[places, torch.tensor(row["tokens"])]
        assert row["log_probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert tokenizer.decode(row["tokens"]).startswith(row["response"])


def test_ratios_weights_and_lags_fit_together(finished: Path) -> None:
    """ℓ is a masked sum, weights are those of gmc, advantages leave one out, lag from versions."""
    for step in range(6):
        rows = trajectories(finished, step)
        assert len(rows) == 8
        for members in by_group(rows).values():
            for row in members:
                difference = math.fsum(row["log_probs"]) - math.fsum(row["behaviour_log_probs"])
                assert row["log_ratio"] == pytest.approx(difference, abs=1e-5)
                assert row["lag"] == row["version"] - min(row["versions"]) == min(step, 2)
                others = [one["reward"] for one in members if one is not row]
                advantage = row["reward"] - sum(others) / 3
                assert row["advantage"] == pytest.approx(advantage, abs=1e-6)
            mass = sum(math.exp(row["log_ratio"]) for row in members) / 4
            for row in members:
                weight = math.exp(row["log_ratio"]) * min(1, CAP / mass)
                assert row["weight"] == pytest.approx(weight, rel=1e-6)
        metrics = records(finished)[step + 1]
        mean = sum(row["weight"] for row in rows) / 8
        assert metrics["ratio/retained_mass"] == pytest.approx(mean, rel=1e-6)
        assert metrics["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 8)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "data"])
def test_a_split_over_ranks_records_the_same(meshes: Path, finished: Path, name: str) -> None:
    """Of the first step, before roundings part the runs."""
    ours, theirs = trajectories(meshes / name, 0), trajectories(finished, 0)
    for mine, other in zip(ours, theirs, strict=True):
        close = ("log_probs", "log_ratio", "weight", "behaviour_log_probs", "advantage")
        for column in close:
            assert mine.pop(column) == pytest.approx(other[column], abs=1e-4)
        assert mine == {column: other[column] for column in mine}


def group(number: int, prompt: str, masks: list[list[bool]]) -> Group:
    trajectories = []
    for mask in masks:
        size = len(mask)
        sample = Sample(
            tokens=np.arange(size, dtype=np.int64),
            log_probs=np.full(size, -1, dtype=np.float32),
            versions=np.array([5, 3, 4][:size], dtype=np.int64),
            finish_reason="length",
        )
        trajectories.append(Trajectory(sample, np.array(mask), reward=float(size)))
    return Group(number, Prompt("id", prompt, (1,), "", ""), tuple(trajectories))


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A file of two groups: masked tokens, markup and escape codes, a ratio that overflows."""
    groups = [
        group(8, "[red]1\x1b[2J+1=[/red]", [[True, False], [True, True, True]]),
        group(9, "2+2=", [[True], [False]]),
    ]
    consumed = StepRecord(
        log_prob_K=torch.tensor([-1.0, -2.0, -3.0, -4.0, math.nan]),
        log_ratio_N=torch.tensor([800.0, 0.0, math.nan, 0.0], dtype=torch.float64),
        weight_N=torch.tensor([2.4, 0.0, math.nan, 1.0], dtype=torch.float64),
        advantage_N=torch.tensor([1.0, -1.0, 1.0, -1.0]),
    )
    table = table_of(groups, consumed, step=6, version=7, decode=str)
    write_table(table, tmp_path / "trajectories" / "step_000006.parquet")
    return tmp_path


def test_rows_of_masked_and_ragged_trajectories(hostile: Path) -> None:
    rows = read_records(hostile).to_pylist()
    assert [row["log_probs"][:2] for row in rows[:2]] == [[-1.0, None], [-2.0, -3.0]]
    assert rows[3]["log_probs"] == [None]
    assert [row["lag"] for row in rows] == [4, 4, 2, 2]
    assert [(row["group"], row["member"]) for row in rows] == [(8, 0), (8, 1), (9, 0), (9, 1)]
    assert rows[1]["response"] == "[0, 1, 2]"


def test_other_readers_open_the_file(hostile: Path) -> None:
    path = hostile / "trajectories" / "step_000006.parquet"
    assert parquet.read_schema(path).names == SCHEMA.names
    frame = pandas.read_parquet(path)
    assert frame["weight"].tolist()[:2] == [2.4, 0.0]
    assert frame["tokens"].map(len).tolist() == [2, 3, 1, 1]


def test_polars_opens_the_file(hostile: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(hostile / "trajectories" / "*.parquet")
    assert frame["tokens"].list.len().to_list() == [2, 3, 1, 1]
    assert frame["log_probs"].to_list()[0] == [-1.0, None]


def test_duckdb_opens_the_file(hostile: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    files = hostile / "trajectories" / "*.parquet"
    query = f"SELECT max(weight), max(len(tokens)) FROM '{files}' WHERE \"group\" = 8"
    assert duckdb.sql(query).fetchall() == [(2.4, 3)]


# -- inspect ----------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["inspect", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_groups_are_ordered(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the order that pandas finds."""
    frame = pandas.read_parquet(finished / "trajectories")
    largest = frame.groupby("group")["weight"].max().sort_values(ascending=False)
    printed = shown(capsys, finished, "--largest-weights", "--groups", "3")
    assert "largest weights of 12 groups" in printed
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    assert [int(line.split("│")[2]) for line in lines] == largest.index[:3].tolist()
    printed = shown(capsys, finished, "--step", "4")
    assert [f"{name} of 2 groups" in printed for name in ("largest weights", "most capped", "old")]


def test_what_a_model_wrote_is_inert(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys, hostile, "--most-capped")
    assert "\x1b" not in printed
    assert "[red]1\\x1b[2J+1=[/red]" in printed
    assert "e^799" in printed


def test_the_token_at_fault_is_shown(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R7, G4: where a step was stopped, every trajectory with both sides' log-probs."""
    record = read_records(hostile)
    write_table(record, hostile / "non_finite_step_6.parquet")
    printed = shown(capsys, hostile / "non_finite_step_6.parquet")
    assert "0 (id 0): learner nan, engine -1" in printed
    assert "megatron-gmc inspect" in shown(capsys, hostile)


def test_what_is_not_there_is_said(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no Parquet")
    cases = {
        (str(tmp_path),): "holds no trajectories/step_*.parquet; a run keeps them with train.save",
        (str(tmp_path / "text"),): "text is no record of trajectories: ",
        (str(finished), "--step", "6"): "--step 6: not recorded; ",
    }
    for words, said in cases.items():
        assert main(["inspect", *words]) == 2
        assert said in capsys.readouterr().err
