"""What the learner gets of the rollout's groups."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, models

from megatron_gmc.lead import rows_of
from megatron_gmc.learner.batch import Batch
from megatron_gmc.rollout.types import Group, Prompt, Sample, Trajectory


def trajectory(tokens: list[int], versions: list[int], reward: float) -> Trajectory:
    sample = Sample(
        tokens=np.array(tokens, dtype=np.int64),
        log_probs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        versions=np.array(versions, dtype=np.int64),
        finish_reason="stop",
    )
    return Trajectory(sample, np.ones(len(tokens), dtype=np.bool_), reward)


def test_the_engines_ids_are_trained_on() -> None:
    """T4: a response whose text re-encodes to other ids. L7: the lag is the oldest token's."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    sampled = [0, 1, 2]
    assert tokenizer.encode(tokenizer.decode(sampled).replace(" ", "")).ids == [2, 2]
    prompt = Prompt("p", "b", (1,), "", "")
    group = Group(7, prompt, (trajectory(sampled, [5, 4, 6], 1.0), trajectory([2], [6], 0.0)))
    batch = Batch.from_rows(rows_of([group]))
    assert batch.tokens_S.tolist() == [1, 0, 1, 2, 1, 2]
    assert batch.behaviour_log_prob_S[batch.loss_mask_S].tolist() == [-1, -2, -3, -1]
    assert batch.loss_mask_S.tolist() == [False, True, True, True, False, True]
    assert batch.oldest_version_N.tolist() == [4, 6]
    assert batch.id_N.tolist() == [14, 15]
    assert batch.reward_N.tolist() == [1, 0]
