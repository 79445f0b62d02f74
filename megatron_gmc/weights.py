"""Whole weights out of a learner that is spread over ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_gmc.convert.hugging_face import write_folder
from megatron_gmc.learner.learner import Learner
from megatron_gmc.storage import writing


def write_weights(learner: Learner, source: Path, target: Path) -> None:
    """Write the learner's weights as the Hugging Face folder `target`; a collective call.

    Config and tokenizer come from `source`. An earlier `target`, left by a run that died right
    after, is replaced. Raises OutputError where it cannot be written.
    """
    weights = learner.weights()
    if learner.mesh.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        with writing(target):
            write_folder(target, weights, source)
    else:
        # Gathering is collective: the other ranks run it to the end and get nothing.
        for _ in weights:
            pass
