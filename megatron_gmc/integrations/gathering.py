"""Rows of all ranks of a process group, whatever number of them each rank holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gmc.integrations.folding import Gather


def gather_over(group: dist.ProcessGroup | None = None) -> Gather:
    """A `Gather` over the ranks of `group` (None: all ranks), for `fold`.

    Every rank must call it, a rank without a row too. Rows are 1-D, of one dtype on all ranks, and
    may differ in number. Before torch.distributed is initialised there is one rank.
    """

    def gather(value_N: Tensor) -> tuple[Tensor, int]:
        if not dist.is_initialized():
            return value_N, 0
        ranks = dist.get_world_size(group)
        rows = torch.tensor([len(value_N)], device=value_N.device)
        rows_R = [torch.zeros_like(rows) for _ in range(ranks)]
        dist.all_gather(rows_R, rows, group=group)
        counts = [int(count) for count in rows_R]
        # Collectives want one size: each rank's rows lie at the start of a buffer as long as the
        # longest.
        padded_N = value_N.new_zeros(max(counts))
        padded_N[: len(value_N)] = value_N
        buffers = [torch.zeros_like(padded_N) for _ in range(ranks)]
        dist.all_gather(buffers, padded_N, group=group)
        rank = dist.get_rank(group)
        parts = [buffer[:count] for buffer, count in zip(buffers, counts, strict=True)]
        return torch.cat(parts), sum(counts[:rank])

    return gather
