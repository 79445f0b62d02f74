"""A correction to what megatron-core's distributed optimizer writes to checkpoints.

It gathers weights and moments bucket after bucket without the padding that ends a bucket, and then
looks the parameters up where they lie with that padding. All but the first bucket are then off by
it, and so is the checkpoint, without an error (0.16.1 and 0.19.2; megatron's own comment there
calls it a bug). A tied embedding under a pipeline has a bucket of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

State = dict[object, dict[object, dict[str, object]]]


def keep_bucket_padding(optimizer: MegatronOptimizer) -> None:
    """Make `optimizer`'s checkpoints hold every parameter where it is looked for."""
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer):
            gather = part.get_parameter_state_dp_zero
            vars(part)["get_parameter_state_dp_zero"] = functools.partial(
                _with_padding, gather, part.buffers
            )


def _with_padding(
    gather: Callable[..., State | None],
    buffers: list[_ParamAndGradBuffer],
    *args: object,
    **kwargs: object,
) -> State | None:
    """What `gather` returns: by buffer, by dtype and by name, flat tensors of all parameters."""
    state = gather(*args, **kwargs)
    if state is None:
        return None
    for index, buffer in enumerate(buffers):
        for tensors in state[index].values():
            for name, flat in tensors.items():
                # A version that keeps the padding needs no correction.
                if isinstance(flat, Tensor) and len(flat) == buffer.numel_unpadded:
                    tensors[name] = _spread(flat, buffer)
    return state


def _spread(flat: Tensor, buffer: _ParamAndGradBuffer) -> Tensor:
    parts = flat.split([bucket.numel_unpadded for bucket in buffer.buckets])
    padded = [
        torch.nn.functional.pad(part, (0, bucket.grad_data.numel() - bucket.numel_unpadded))
        for part, bucket in zip(parts, buffer.buckets, strict=True)
    ]
    return torch.cat(padded) if len(padded) > 1 else flat
