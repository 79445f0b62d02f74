"""Whether a folder holds the tensors that a model needs, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_gmc.convert.experts import separated
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.mapping import OUTPUT, Layout, layouts


class Inventory:
    """Ticks off a model's tensors by Hugging Face name as they come, in any order."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._missing = layouts(shape)

    def tick(self, name: str, size: tuple[int, ...]) -> Layout | None:
        """The layout of tensor `name`; None for a tied output layer, which the embedding is.

        Raises ValueError by name for an unexpected or repeated tensor and for a wrong shape.
        """
        if self._shape.tied and name == OUTPUT:
            return None
        layout = self._missing.pop(name, None)
        if layout is None:
            raise ValueError(
                f"tensor {name}: given twice"
                if name in layouts(self._shape)
                else f"tensor {name}: not part of the model that config.json describes, of "
                f"{self._shape.layers} layers"
            )
        if size != layout.shape:
            raise ValueError(
                f"tensor {name}: its shape is {size}, and by config.json it should be "
                f"{layout.shape}"
            )
        return layout

    def finish(self) -> None:
        """Raise ValueError where a tensor has not come."""
        if self._missing:
            raise ValueError(
                f"{len(self._missing)} of the model's tensors are missing, first "
                f"{next(iter(self._missing))}"
            )


def check_tensors(found: Iterable[tuple[str, tuple[int, ...]]], shape: ModelShape) -> None:
    """Raise ValueError, naming the tensor, unless `found` (names, shapes) are `shape`'s tensors."""
    inventory = Inventory(shape)
    for name, size in found:
        for part, tensor in separated(name, torch.empty(size, device="meta"), shape):
            inventory.tick(part, tuple(tensor.shape))
    inventory.finish()
