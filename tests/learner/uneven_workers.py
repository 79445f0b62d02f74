"""What two ranks run for test_cpu_compat.py: exchanges of unequal parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_gmc.learner import cpu_compat

SIZES = [1, 3]


def check() -> None:
    """Gather 1 and 3 rows, scatter them again, and the gradients of both."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    part = torch.full((SIZES[rank], 2), 1.0 + rank, requires_grad=True)
    whole = gather_from_sequence_parallel_region(part, group=group, output_split_sizes=SIZES)
    assert whole[:, 0].tolist() == [1.0, 2.0, 2.0, 2.0]
    again = reduce_scatter_to_sequence_parallel_region(whole, group, SIZES)
    assert again.tolist() == [[2.0 + 2 * rank] * 2] * SIZES[rank]
    again.sum().backward()
    assert part.grad is not None and part.grad.tolist() == [[2.0, 2.0]] * SIZES[rank]
    with cpu_compat._without("uneven_parts"):
        try:
            gather_from_sequence_parallel_region(part, group=group, output_split_sizes=SIZES)
        except RuntimeError as error:
            assert "invalid tensor size" in str(error)
        else:
            raise AssertionError("gloo gathers unequal parts now")
    dist.destroy_process_group()


if __name__ == "__main__":
    check()
