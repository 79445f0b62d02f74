"""`megatron-gmc simulate`: the table, the JSON, and faults told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megatron_gmc.cli import main
from megatron_gmc.simulate_command import SimulateConfig

FIELDS: dict[str, object] = {
    "engines": 2,
    "concurrency": 4,
    "tokens_per_s": 40,
    "calls_per_engine": 2,
    "learn_s": 3,
    "lengths": {"type": "constant", "tokens": 50},
    "prompts_per_step": 4,
    "group_size": 2,
    "lags": [0, 1],
    "steps": 20,
}


def options(**changes: object) -> list[str]:
    fields = FIELDS | changes
    return [word for name, value in fields.items() for word in (f"--{name}", json.dumps(value))]


def test_one_row_for_each_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sampling takes 5 s, learning 3 s: the sum at lag 0, the larger at lag 1."""
    target = tmp_path / "table.json"
    assert main(["simulate", "--json", str(target), *options()]) == 0
    rows = json.loads(target.read_text())
    assert [row["lag"] for row in rows] == ["lag ≤ 0 (bounded)", "lag ≤ 1 (bounded)"]
    assert [row["steps_per_hour"] for row in rows] == pytest.approx([450, 720], rel=1e-2)
    shown = capsys.readouterr().out
    assert "450.0" in shown
    assert "bounded lag, order submission: 2 engines" in shown


def test_yaml_and_overrides(tmp_path: Path) -> None:
    cluster, target = tmp_path / "cluster.yaml", tmp_path / "table.json"
    cluster.write_text(yaml.safe_dump(FIELDS))
    words = ["--cluster", str(cluster), "--lags", "[2]", "--mode", "exact", "--json", str(target)]
    assert main(["simulate", *words]) == 0
    (row,) = json.loads(target.read_text())
    assert row["lag"] == "lag 2 (exact)"
    assert row["lags"] == {"2": 1}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engines": 0}, "engines: input should be greater than 0, got 0"),
        ({"lags": []}, "lags: empty; give one k or more"),
        ({"lags": [2], "steps_per_batch": 4}, "lags: a bound of 2 at step 3 cannot be kept"),
        ({"mode": "exact", "order": "earliest_deadline"}, "order: earliest_deadline needs mode"),
        ({"lengths": {"type": "weibull"}}, "lengths.type: 'weibull' is unknown; known here: "),
        ({"lengths": {"type": "file", "path": "nowhere.txt"}}, "lengths.path: cannot read nowhe"),
        ({"lengths": {"type": "record", "path": "nowhere.parquet"}}, "lengths.path: nowhere.p"),
        ({"engnies": 3}, "engnies: unknown key; did you mean engines?"),
    ],
)
def test_faults(
    changes: dict[str, object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *options(**changes)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {expected}")


@pytest.mark.parametrize("text", ["", "12\nx\n", "12\n-3\n", "inf\n"])
def test_a_file_without_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert main(["simulate", *options(lengths={"type": "file", "path": str(path)})]) == 2
    assert f"error: lengths.path: {path} " in capsys.readouterr().err


def drawn(lengths: dict[str, object], **changes: object) -> np.ndarray:
    fields = FIELDS | {"lengths": lengths, "group_size": 8} | changes
    source = SimulateConfig.model_validate(fields).length_source()
    return np.array([source(submission) for submission in range(2000)]).ravel()


def test_lengths_follow_their_laws(tmp_path: Path) -> None:
    """Medians and tails by closed form; the same submission always has the same lengths."""
    log_normal = drawn({"type": "log_normal", "median": 1000, "sigma": 0.5})
    assert np.median(log_normal) == pytest.approx(1000, rel=0.03)
    assert np.log(log_normal).std() == pytest.approx(0.5, rel=0.03)
    pareto = drawn({"type": "pareto", "smallest": 100, "alpha": 1.2})
    assert pareto.min() >= 100
    assert (pareto > 1000).mean() == pytest.approx(10**-1.2, rel=0.1)
    assert drawn({"type": "pareto", "smallest": 100, "alpha": 1.2}, longest=500).max() == 500
    path = tmp_path / "lengths.txt"
    path.write_text("3\n7\n")
    table = pa.table({"tokens": [[5, 6], [1, 2, 3, 4], None]})
    pq.write_table(table, tmp_path / "step_1.parquet")
    for place in (tmp_path / "step_1.parquet", tmp_path / "record"):
        assert set(drawn({"type": "record", "path": str(place)}).tolist()) == {2, 4}
        (tmp_path / "record").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "record" / "step_1.parquet")
    assert set(drawn({"type": "file", "path": str(path)}).tolist()) == {3, 7}
