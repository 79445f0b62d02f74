"""Whole weights out of a model that is spread over ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatron_gmc.convert.hugging_face import write_folder
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.storage import writing


def write_weights(
    weights: Iterator[tuple[str, Tensor]], mesh: Mesh, source: Path, target: Path
) -> None:
    """Write `weights` (of `named_weights`) as the Hugging Face folder `target`; collective.

    Config and tokenizer come from `source`. An earlier `target`, left by a run that died right
    after, is replaced. Raises OutputError where it cannot be written.
    """
    if mesh.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        with writing(target):
            write_folder(target, weights, source)
    else:
        # Gathering is collective: the other ranks run it to the end and get nothing.
        for _ in weights:
            pass
