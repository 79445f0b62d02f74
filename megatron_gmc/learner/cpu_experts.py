"""Shims for mixtures of experts; cpu_compat.py lists them, each with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gmc.learner.patching import CUDA, Patches


class NoStream:
    """The only stream of a device where every operation has ended when its call returns.

    It is also its own event.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoStream)

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def record_event(self) -> NoStream:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """Return at once."""


def no_side_streams(patches: Patches) -> None:
    """Make every side stream the one stream there is."""
    patches.replace(CUDA, "Stream", NoStream)
    patches.replace(CUDA, "stream", lambda stream: nullcontext())


def plain_router_gemm(patches: Patches) -> None:
    """Say that there is no transformer-engine to multiply with."""

    def patch(module: ModuleType) -> None:
        if not hasattr(module, "te_general_gemm"):
            patches.replace(module, "te_general_gemm", None)

    patches.when_imported("megatron.core.transformer.moe.moe_utils", patch)


def split_sizes_as_numbers(patches: Patches) -> None:
    """Turn the sizes into numpy arrays, as megatron-core does with those of a GPU."""

    def patch(module: ModuleType) -> None:
        original = module.maybe_move_tensor_to_cpu

        def move(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
            if as_numpy and isinstance(tensor, Tensor):
                return tensor.numpy()
            return original(tensor, as_numpy, record_stream)

        patches.replace(module, "maybe_move_tensor_to_cpu", move)

    patches.when_imported("megatron.core.transformer.moe.token_dispatcher", patch)


def uneven_parts(patches: Patches) -> None:
    """Exchange equal parts, filled up with zeros, and cut them again."""

    def patch(module: ModuleType) -> None:
        gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

        def padded(part: Tensor, rows: int) -> Tensor:
            return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])

        def gather_parts(
            input_: Tensor,
            group: ProcessGroup,
            output_split_sizes: Sequence[int] | None = None,
            use_global_buffer: bool = False,
        ) -> Tensor:
            if output_split_sizes is None:
                whole: Tensor = gather(input_, group, None, use_global_buffer)
                return whole
            rows = max(output_split_sizes)
            parts = gather(padded(input_, rows), group).unflatten(0, (group.size(), rows))
            return torch.cat([p[:n] for p, n in zip(parts, output_split_sizes, strict=True)])

        def scatter_parts(
            input_: Tensor,
            group: ProcessGroup,
            input_split_sizes: Sequence[int] | None = None,
            use_global_buffer: bool = False,
        ) -> Tensor:
            if input_split_sizes is None:
                part: Tensor = scatter(input_, group, None, use_global_buffer)
                return part
            sizes = [int(size) for size in input_split_sizes]
            parts = torch.cat([padded(p, max(sizes)) for p in input_.split(sizes)])
            own: Tensor = scatter(parts, group)[: sizes[group.rank()]]
            return own

        patches.replace(module, "_gather_along_first_dim", gather_parts)
        patches.replace(module, "_reduce_scatter_along_first_dim", scatter_parts)

    patches.when_imported("megatron.core.tensor_parallel.mappings", patch)
