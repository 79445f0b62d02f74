"""What watching a run says, and every known bad sign."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from megatron_gmc.cli import main
from megatron_gmc.estimators.diagnostics import MISMATCH_LIMIT
from megatron_gmc.run_record import RunRecord
from megatron_gmc.signs import MISMATCH_SD, bad_signs
from megatron_gmc.watch_command import view
from tests.report.records import course, settings, write_run


def signs(folder: Path, tree: dict[str, object] | None = None, **last: float) -> list[str]:
    run = RunRecord.read(write_run(folder / "run", course(40, **last), tree=tree))
    return [sign.text for sign in bad_signs(run)]


def shown(run: RunRecord, silent: float = 0.0) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(view(run, silent))
    return capture.get()


def test_a_healthy_run_shows_no_sign(tmp_path: Path) -> None:
    assert signs(tmp_path) == []


@pytest.mark.parametrize(
    ("metric", "good", "bad", "words"),
    [
        ("ratio/log_ratio_sd_lag0", 0.99, 1.01, "Engine and learner disagree: sd(ℓ) at lag 0 is"),
        ("ratio/retained_mass", 0.31, 0.29, "Only 29% of the expected gradient weight is retained"),
        ("ratio/ess", 0.16, 0.13, "One trajectory holds nearly all of a group's weight"),
    ],
)
def test_signs_at_their_limits(
    tmp_path: Path, metric: str, good: float, bad: float, words: str
) -> None:
    assert signs(tmp_path / "good", **{metric: good}) == []
    (sign,) = signs(tmp_path / "bad", **{metric: bad})
    assert sign.startswith(words)


def test_the_limit_of_the_mismatch_is_that_of_training() -> None:
    assert MISMATCH_SD == MISMATCH_LIMIT


@pytest.mark.parametrize(
    ("wait", "idle", "words"),
    [
        (0.2, 0.2, "wait for each other. Try `rollout.lag: {exact: 8}`"),
        (0.3, 0.05, "sampling is the bottleneck"),
        (0.05, 0.9, "the learner is the bottleneck"),
    ],
)
def test_idleness_names_the_bottleneck(
    tmp_path: Path, wait: float, idle: float, words: str
) -> None:
    """Of 0.45 s a step and 0.35 s of sampling."""
    (sign,) = signs(tmp_path, **{"time/wait_s": wait, "rollout/engine_idle_s": idle})
    assert words in sign


def test_without_lag_the_lag_to_try_is_one(tmp_path: Path) -> None:
    tree = settings(rollout__lag={"exact": None, "bounded": 0})
    idle = {"time/wait_s": 0.2, "rollout/engine_idle_s": 0.4}
    (sign,) = signs(tmp_path, tree, **idle)
    assert "Try `rollout.lag: {bounded: 1}`" in sign


def test_trends(tmp_path: Path) -> None:
    """Truncation that rises and entropy that collapses, from the same lines with other ends."""
    lines = course(40)
    for line in lines:
        step = int(line["step"])
        if "time/step_s" in line:
            line |= {"response/truncated_share": step / 100, "entropy/mean": 2 * 0.8**step}
    texts = [s.text for s in bad_signs(RunRecord.read(write_run(tmp_path / "run", lines)))]
    assert len(texts) == 2
    assert texts[0].startswith("The policy's entropy fell from")
    # Quarters: steps 1–10 and 31–40.
    assert texts[1].startswith("Truncated responses rose from 6% to 36%")


def test_a_collapse_is_called_one(tmp_path: Path) -> None:
    """It starts at 0.4; less than 0.05 below that is no collapse."""

    def found(end: float) -> list[str]:
        lines = [*course(10), {"step": 40, "evaluation/accuracy": end}]
        run = RunRecord.read(write_run(tmp_path / str(end), lines))
        return [sign.text for sign in bad_signs(run)]

    assert found(0.36) == []
    (sign,) = found(0.34)
    assert sign.startswith("Held-out accuracy is at 0.340, below the 0.400 of the start")


def test_refused_samples_are_said_with_their_reasons(tmp_path: Path) -> None:
    (sign,) = signs(tmp_path, **{"rollout/refused/too_long": 1.0})
    assert "(too_long 40)" in sign


def test_a_run_under_way(tmp_path: Path) -> None:
    """Half of the steps at 0.45 s and a checkpoint of 0.5 s every ten steps: 20 × 0.5 s left."""
    run = RunRecord.read(write_run(tmp_path / "run", course(20), finished=False))
    text = shown(run)
    assert "step 20 of 40, about 0:00:10 left" in text
    assert "learner idle 22%, engines idle 22%" in text
    assert "held-out accuracy" in text and "0.900" in text
    # The folder's path may push the rest into another line.
    assert "gmc epsilon=0.2, lag 4 (exact), seed 0" in " ".join(text.split())
    assert "no known bad sign" in text
    assert "silent for 0:02:00: it has stopped, or a step hangs" in shown(run, silent=120.0)


def test_a_line_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", course(3), finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time/st')
    assert RunRecord.read(folder).step == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", course(40))
    assert main(["watch", str(folder), "--once"]) == 0
    assert "step 40 of 40, finished" in capsys.readouterr().out
    assert main(["watch", str(folder)]) == 0
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    empty = write_run(tmp_path / "empty", [], finished=False)
    assert main(["watch", str(empty), "--once"]) == 0
    assert "nothing recorded yet" in capsys.readouterr().out


def test_silence_is_counted_from_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", course(20), finished=False)
    then = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (then, then))
    assert main(["watch", str(folder), "--once"]) == 0
    assert "silent for 1:00:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lag", "shown_as"),
    [
        ({"exact": 16, "bounded": None}, "16 (exact)"),
        ({"exact": None, "bounded": 4}, "≤ 4 (bounded)"),
        (
            {"exact": 16, "bounded": None, "ramp": {"start": 0, "steps": 8}},
            "16 (exact, changing at first)",
        ),
        ({"exact": 16, "bounded": None, "ramp": None, "first": []}, "16 (exact)"),
    ],
)
def test_a_lag_is_named_with_its_kind(
    tmp_path: Path, lag: dict[str, object], shown_as: str
) -> None:
    run = RunRecord.read(write_run(tmp_path / "run", course(1), tree=settings(rollout__lag=lag)))
    assert run.lag == shown_as
