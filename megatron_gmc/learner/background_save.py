"""Saving a learner beside training: the learner waits while its tensors are copied, no longer.

megatron-core's asynchronous save splits a save into a plan, which all ranks make together, the
writing, and a closing that all ranks do together once every rank has written. The writing is left
to the caller. Its own callers fork a process from one that has threads (0.16.1) and keep a manager
process for a queue of results; here a thread of this process writes, which needs neither.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch import Tensor

from megatron_gmc.learner.patching import Patches

# megatron-core 0.16.1 has the first name, 0.19 the second.
_RESULTS_QUEUE = ("_get_write_results_queue", "get_write_results_queue")


class StateCopies:
    """Copies of a learner's tensors on the CPU; their memory is kept from one save to the next."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def take(self, state: dict[str, Any]) -> None:
        """Replace each sharded tensor's data in `state` by a copy of it.

        Every call must pass a state of the same layout. Overwrites what the last call copied.
        """
        # A factory cuts a tensor into the parts that are saved; the parts are what to copy.
        apply_factories(state)
        taken = 0

        def copy(value: object) -> object:
            nonlocal taken
            if isinstance(value, ShardedTensor) and value.data is not None:
                value.data = self._copy(taken, value.data)
                taken += 1
            return value

        dict_list_map_inplace(copy, state)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _copy(self, place: int, data: Tensor) -> Tensor:
        if place == len(self._copies):
            # Page-locked memory lets the device write without a stop on the way.
            pinned = data.device.type == "cuda"
            copy = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=pinned)
            self._copies.append(copy)
        kept = self._copies[place]
        assert (kept.shape, kept.dtype) == (data.shape, data.dtype), "another layout"
        return kept.copy_(data.detach(), non_blocking=True)


class PendingSave:
    """A planned save whose tensors nobody changes any more."""

    def __init__(self, request: AsyncRequest) -> None:
        self._request = request

    def write(self) -> list[Path]:
        """Write this rank's files, flushed to the disk, and return them; from any thread, once.

        A failure to write is kept, and raised on every rank by `finish`.
        """
        if self._request.async_fn is None:
            return []  # this rank holds nothing that another one does not write
        transforms = self._request.async_fn.args[0]
        _, buckets, results = self._request.async_fn_args
        written: dict[int, list[Any]] = {}
        for place, bucket in enumerate(buckets):
            answer: queue.Queue[tuple[int, list[Any] | Exception]] = queue.Queue()
            open_buckets: queue.Queue[int] = queue.Queue()
            open_buckets.put(place)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, place, bucket, answer, open_buckets, use_fsync=True
            )
            _, outcome = answer.get()
            if isinstance(outcome, Exception):
                results.put(outcome)
                return []
            written[place] = outcome
        results.put(written)
        return [Path(bucket[0]) for bucket in buckets]

    def finish(self) -> None:
        """Write what describes the files; collective, after every rank's `write`.

        Raises torch's CheckpointException, on every rank, where a rank could not write.
        """
        for close in self._request.finalize_fns:
            close()


def begin_save(folder: Path, state: dict[str, Any], *, validate: bool) -> PendingSave:
    """Plan the save of `state`, whose tensors must stay as they are, to `folder`; collective.

    `validate` checks that the ranks' parts cover every tensor once, which depends on the layout
    alone.
    """
    with _queue_in_this_process():
        request = dist_checkpointing.save(
            state, str(folder), async_sharded_save=True, validate_access_integrity=validate
        )
    return PendingSave(request)


@contextmanager
def _queue_in_this_process() -> Iterator[None]:
    """Results need not cross a process border, for which megatron would start a manager."""
    patches = Patches()
    for name in _RESULTS_QUEUE:
        if hasattr(filesystem_async, name):
            patches.replace(filesystem_async, name, queue.Queue)
    try:
        yield
    finally:
        patches.undo()
