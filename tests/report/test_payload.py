"""What a report says about runs, before any browser."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_gmc.cli import main
from megatron_gmc.errors import ConfigError
from megatron_gmc.report.page import embedded_json, render
from megatron_gmc.report.payload import (
    cells,
    hours,
    labels,
    natural,
    payload,
    standard_error,
    thinned,
)
from megatron_gmc.run_record import RunRecord
from tests.report.records import HOSTILE, course, settings, write_run


def read(folder: Path, **kwargs: object) -> RunRecord:
    return RunRecord.read(write_run(folder, **kwargs))  # type: ignore[arg-type]


class _Tags(HTMLParser):
    """What a browser would take for tags, and the addresses in them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset")]


def test_a_page_loads_nothing_and_no_value_opens_a_tag() -> None:
    data: dict[str, object] = {"runs": [HOSTILE]}
    plain, hostile = _Tags(), _Tags()
    plain.feed(render("title", {"runs": ["x"]}))
    hostile.feed(render(HOSTILE, data))
    assert plain.tags == hostile.tags
    assert hostile.addresses == ["#main"]


def test_data_come_out_of_the_page_as_they_went_in() -> None:
    data = {"text": HOSTILE + "\u2028&amp;", "value": 0.1}
    assert json.loads(embedded_json(data)) == data
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded_json({"value": math.nan})


def test_values_that_are_not_finite_stay_visible(tmp_path: Path) -> None:
    lines = [{"step": 1, "grad_norm": "nan"}, {"step": 2, "grad_norm": "inf"}]
    run = read(tmp_path / "run", metrics=lines)
    described = payload([run])["runs"]
    assert described[0]["series"]["grad_norm"] == [[1, 2], ["nan", "inf"]]  # type: ignore[index]


def test_a_500_step_run_is_well_below_6_megabytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", course(500))
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size < 2e6


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], finished=False)
    assert main(["report", str(run)]) == 0
    assert "not finished" not in payload([RunRecord.read(run)])["charts"]  # type: ignore[operator]


def test_cells_hold_means_over_seeds(tmp_path: Path) -> None:
    """Finals 0.9 and 0.3 of one cell: the one that ended 0.05 below its start has collapsed."""
    finals = {0: 0.9, 1: 0.3}
    runs = []
    for seed, final in finals.items():
        lines = [*course(10), {"step": 10, "evaluation/accuracy": final}]
        runs.append(read(tmp_path / str(seed), metrics=lines, tree=settings(train__seed=seed)))
    other = settings(optim__lr=1e-3, train__seed=0)
    runs.append(read(tmp_path / "other", metrics=course(10), tree=other))
    first, second = cells(runs)
    assert first["seeds"] == [0, 1] and second["seeds"] == [0]
    assert first["final"] == pytest.approx(0.6)
    assert first["final_se"] == pytest.approx(0.3)
    assert first["collapsed"] == 0.5
    assert second["final_se"] is None and second["lr"] == 1e-3


def test_a_standard_error_is_that_of_the_mean() -> None:
    values = [0.1, 0.4, 0.9, 0.2]
    assert standard_error(values) == pytest.approx(math.sqrt(statistics.variance(values) / 4))


def test_thinning_keeps_the_ends_and_the_even_spacing() -> None:
    points = [(step, float(step)) for step in range(1, 1002)]
    kept = thinned(points, 100)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {b[0] - a[0] for a, b in itertools.pairwise(kept[:-1])} == {11}
    assert thinned(points[:50], 100) == points[:50]
    assert thinned([], 100) == []


def test_wall_time_counts_a_checkpoint_after_its_step(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "time/step_s": 3600.0},
        {"step": 1, "time/checkpoint_s": 7200.0},
        {"step": 2, "time/step_s": 3600.0},
    ]
    assert hours(read(tmp_path / "run", metrics=lines)) == [(0, 0.0), (1, 1.0), (2, 4.0)]


def test_lags_sort_by_their_number() -> None:
    names = ["16 (exact)", "4 (exact)", "≤ 8 (bounded)", "changing"]
    assert sorted(names, key=natural) == ["4 (exact)", "≤ 8 (bounded)", "16 (exact)", "changing"]


def test_folders_are_told_apart_by_what_they_do_not_share(tmp_path: Path) -> None:
    assert labels([tmp_path / "a" / "x", tmp_path / "b" / "x"]) == ["a/x", "b/x"]
    assert labels([tmp_path / "run"]) == ["run"]


@pytest.mark.parametrize("damage", ["config", "metrics"])
def test_a_damaged_run_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    run = write_run(tmp_path / "run", course(3))
    name = {"config": "config.yaml", "metrics": "metrics.jsonl"}[damage]
    (run / name).write_text("{[\n")
    with pytest.raises(ConfigError, match=f"{run} holds a damaged file"):
        RunRecord.read(run)


def test_folders_without_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "is no folder" in capsys.readouterr().err
    run = write_run(tmp_path / "run", course(1))
    assert main(["report", str(run), "--tokens", "0"]) == 2
    assert "--tokens must be at least 1, got 0" in capsys.readouterr().err


def test_a_real_run_has_every_chart(finished: Path, tmp_path: Path) -> None:
    """Names of metrics are the training loop's own, not this room's guess of them."""
    run = RunRecord.read(finished)
    charts = {chart["id"]: chart for chart in payload([run])["charts"]}  # type: ignore[attr-defined]
    wanted = {"accuracy", "reward", "lag_course", "lag_histogram", "mass", "kept", "spread"}
    wanted |= {"capped", "grad_norm", "lengths", "truncated", "speed", "seconds", "engine_seconds"}
    assert set(charts) == wanted
    assert list(charts["seconds"]["fields"].values())[-1] == "other"
    assert run.step == run.steps == 6 and run.lag == "2 (exact)" and run.cap == 1.2
    assert main(["report", str(finished), "--output", str(tmp_path / "page.html")]) == 0
