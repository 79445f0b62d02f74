"""Named tensors gathered into one buffer of bounded size, again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.multiprocessing
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some tensors, one after the other in `flat`, uint8 [bytes].

    It is good until the second one after it is asked for.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: Tensor
    last: bool

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Each by its name, as a view of `flat`."""
        found, offset = [], 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            end = offset + torch.Size(shape).numel() * kind.itemsize
            found.append((name, self.flat[offset:end].view(kind).view(shape)))
            offset = end
        return found


@contextmanager
def shared_by_name() -> Iterator[None]:
    """What is shared inside has a file name that any process of this host can open.

    torch's default, a file descriptor, would have to travel over a socket of its own.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def buckets(tensors: Iterator[tuple[str, Tensor]], limit_bytes: int) -> Iterator[Bucket]:
    """Fill buckets in the order of `tensors`, at most `limit_bytes` each.

    A larger tensor is a bucket of its own, and so is what has another dtype: every tensor starts
    at a multiple of its item size. Two buffers in shared memory take turns, so that a bucket can
    be filled while the one before is sent. Raises ValueError where there is no tensor.
    """
    buffers = [torch.empty(0, dtype=torch.uint8)] * 2
    pending = next(tensors, None)
    if pending is None:
        raise ValueError("there is no weight to send")
    while pending is not None:
        dtype = pending[1].dtype
        size = max(limit_bytes, pending[1].nbytes)
        buffers.reverse()
        if buffers[0].nbytes < size:
            with shared_by_name():
                buffers[0] = torch.empty(size, dtype=torch.uint8).share_memory_()
        buffer = buffers[0]
        names: list[str] = []
        shapes: list[list[int]] = []
        used = 0
        while (
            pending is not None and pending[1].dtype == dtype and used + pending[1].nbytes <= size
        ):
            name, tensor = pending
            bytes_of = tensor.contiguous().flatten().view(torch.uint8)
            buffer[used : used + tensor.nbytes] = bytes_of
            names.append(name)
            shapes.append(list(tensor.shape))
            used += tensor.nbytes
            pending = next(tensors, None)
        label = str(dtype).removeprefix("torch.")
        yield Bucket(names, [label] * len(names), shapes, buffer[:used], pending is None)
