"""What the ranks run: `python -m tests.integrations.workers function args…`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_gmc.estimators import GMC
from megatron_gmc.integrations import fold, gather_over
from tests.integrations.inputs import ADVANTAGES, GROUPS, LOG_RATIOS


def fold_parts(folder: str) -> None:
    """`fold` with 2 of the rows on rank 0, then with none; and with a NaN on rank 1 alone."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for first in (2, 0):
        rows = slice(0, first) if rank == 0 else slice(first, None)
        inputs = (
            torch.tensor(ADVANTAGES)[rows],
            torch.tensor(LOG_RATIOS, dtype=torch.float64)[rows],
            torch.tensor(GROUPS)[rows],
        )
        weighted, metrics = fold(*inputs, GMC(), gather_over())
        if rank == 1:
            inputs[1][0] = torch.nan
        try:
            fold(*inputs, GMC(), gather_over())
        except ValueError as found:
            error = str(found)
        result = {"weighted": weighted, "metrics": metrics, "error": error}
        torch.save(result, Path(folder) / f"{first}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
