"""Which recorded trajectories a report shows, and their tokens' texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import Table, parquet

from megatron_gmc.errors import ConfigError
from megatron_gmc.report.pieces import text_pieces
from megatron_gmc.report.trajectories import chosen_groups
from tests.report.records import course, trajectory_rows, write_run, write_trajectories


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", course(3))


def test_a_run_without_a_record_has_no_groups(run: Path) -> None:
    assert chosen_groups(run, budget=100, pieces=None) == ([], 0)


def test_groups_come_whole_and_as_recorded(run: Path) -> None:
    rows = trajectory_rows(steps=3, groups=2, members=4, text="7+5=12")
    write_trajectories(run, rows)
    groups, total = chosen_groups(run, budget=10_000, pieces=None)
    assert total == len(groups) == 6
    assert [(one["step"], one["group"]) for one in groups] == sorted(
        {(row["step"], row["group"]) for row in rows}
    )
    member = groups[0]["members"][2]
    row = rows[2]
    assert member["response"] == "7+5=12" and member["versions"] == [(0, 3), (1, 3)]
    ratios = [a - b for a, b in zip(row["log_probs"], row["behaviour_log_probs"], strict=True)]  # type: ignore[call-overload]
    assert member["log_ratios"] == pytest.approx(ratios, rel=2e-3, abs=1e-4)
    assert member["weight"] == pytest.approx(row["weight"], rel=1e-3)


def test_a_small_budget_keeps_the_extremes(run: Path) -> None:
    rows = trajectory_rows(steps=9, groups=2, members=4, text="7+5=12")
    rows[21] |= {"weight": 50.0, "log_ratio": 3.9}
    rows[45] |= {"weight": 0.5, "log_ratio": 30.0}
    rows[60] |= {"lag": 99}
    write_trajectories(run, rows)
    groups, total = chosen_groups(run, budget=3 * 4 * 6, pieces=None)
    assert total == 18
    wanted = sorted((rows[place]["step"], rows[place]["group"]) for place in (21, 45, 60))
    assert [(one["step"], one["group"]) for one in groups] == wanted


def test_what_a_resumed_run_wrote_again_counts(run: Path) -> None:
    rows = trajectory_rows(steps=1, groups=1, members=2, text="7")
    write_trajectories(run, [row | {"response": "old"} for row in rows], "step_1")
    write_trajectories(run, [row | {"response": "new"} for row in rows], "step_1_again")
    groups, total = chosen_groups(run, budget=100, pieces=None)
    assert total == 1
    assert [member["response"] for member in groups[0]["members"]] == ["new", "new"]


def test_other_files_are_refused(run: Path) -> None:
    (run / "trajectories").mkdir()
    file = run / "trajectories" / "a.parquet"
    parquet.write_table(Table.from_pylist([{"step": 1}]), file)
    with pytest.raises(ConfigError, match="is no record of trajectories: no column version"):
        chosen_groups(run, budget=100, pieces=None)
    file.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match="is no readable Parquet file"):
        chosen_groups(run, budget=100, pieces=None)


def test_pieces_are_the_tokens_texts(task: Path, tmp_path: Path) -> None:
    pieces = text_pieces(task / "model")
    assert pieces is not None
    assert pieces([7, 10, 5, 11]) == [("7", 1), ("+", 1), ("5", 1), ("=", 1)]
    assert text_pieces(tmp_path) is None


def test_tokens_that_share_a_character_are_one_piece(tmp_path: Path) -> None:
    """Bytes as tokens: é takes two of them, an emoji four."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {symbol: place for place, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode("aé😀b").ids
    pieces = text_pieces(tmp_path)
    assert pieces is not None
    assert pieces(tokens) == [("a", 1), ("é", 2), ("😀", 4), ("b", 1)]
    assert pieces(tokens[:2]) == [("a", 1), ("\ufffd", 1)]
