"""The batch that every rank learns from."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron_gmc.learner.batch import Batch, Row, broadcast_batch
from megatron_gmc.learner.mesh import Mesh
from tests.learner.steps import random_rows

NAN = float("nan")
ROWS = [
    Row(7, 30, [1, 2], [3, 4, 5], [True, False, True], [-1.0, NAN, -2.0], 0.5, 4),
    Row(8, 10, [6], [7], [False], [NAN], 1.0, 3),
    Row(9, 30, [1, 2], [8, 9], [True, True], [-3.0, -4.0], 0.25, 5),
]


def test_rows_become_flat_tensors() -> None:
    """S stands for all tokens, prompts included; groups get numbers in order of appearance."""
    batch = Batch.from_rows(ROWS)
    assert batch.tokens_S.tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 8, 9]
    expected = [False, False, True, False, True, False, False, False, False, True, True]
    assert batch.loss_mask_S.tolist() == expected
    used = batch.behaviour_log_prob_S[batch.loss_mask_S]
    assert used.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert batch.length_N.tolist() == [5, 2, 4]
    assert batch.group_N.tolist() == [0, 1, 0]
    assert batch.reward_N.tolist() == [0.5, 1.0, 0.25]
    assert batch.oldest_version_N.tolist() == [4, 3, 5]
    assert batch.id_N.tolist() == [7, 8, 9]
    assert (batch.trajectories, batch.groups) == (3, 2)


def test_loss_tokens_are_counted_by_trajectory() -> None:
    """R7: also where one has none, or all."""
    assert Batch.from_rows(ROWS).loss_tokens_N().tolist() == [2, 0, 2]
    assert Batch.from_rows(ROWS[1:2]).loss_tokens_N().tolist() == [0]


def test_types_do_not_depend_on_the_rows() -> None:
    types = {name: tensor.dtype for name, tensor in asdict(Batch.from_rows(ROWS)).items()}
    assert types == {
        "tokens_S": torch.int64,
        "loss_mask_S": torch.bool,
        "behaviour_log_prob_S": torch.float32,
        "length_N": torch.int64,
        "group_N": torch.int64,
        "reward_N": torch.float32,
        "oldest_version_N": torch.int64,
        "id_N": torch.int64,
    }
    whole = replace(ROWS[0], reward=1, behaviour_log_probs=[-1, 0, -2])
    assert {n: t.dtype for n, t in asdict(Batch.from_rows([whole])).items()} == types


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": [True, False]},
        {"behaviour_log_probs": [-1.0, -1.0, -1.0, -1.0]},
        {"response_tokens": [3, 4]},
    ],
)
def test_lists_that_do_not_agree(change: dict[str, list[int]]) -> None:
    """T6: a log-prob that is missing is never filled in."""
    with pytest.raises(ValueError, match=r"trajectory 7: \d response tokens, \d mask .* \d log-p"):
        Batch.from_rows([replace(ROWS[0], **change)])


def test_a_prompt_without_a_token() -> None:
    """T3: the first response token is predicted from the last prompt token."""
    with pytest.raises(ValueError, match="trajectory 8: the prompt has no token"):
        Batch.from_rows([replace(ROWS[1], prompt_tokens=[])])


def test_every_rank_receives_the_batch(checkpoints: Path) -> None:
    expected = asdict(Batch.from_rows(random_rows(7)))
    for rank in (0, 1):
        received = torch.load(checkpoints / f"batch.rank{rank}")
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor), name


def test_alone_nothing_is_sent(one_rank: Mesh) -> None:
    batch = Batch.from_rows(ROWS)
    assert broadcast_batch(batch, one_rank) is batch
