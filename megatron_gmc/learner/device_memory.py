"""The learner's device memory, lent to an engine between optimizer steps.

Gradients are dropped: every step computes them anew. The optimizer's state moves to the host and
back. The weights stay, so that they can be handed over and saved meanwhile; so does what the
optimizer keeps as weights of its own precision.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch import device as Device

from megatron_gmc.learner.learner import Learner


def lend(learner: Learner) -> int:
    """Free the device of gradients and optimizer state; returns the bytes that went."""
    freed = 0
    for buffer in _gradient_buffers(learner):
        storage = buffer.untyped_storage()
        freed += storage.nbytes()
        storage.resize_(0)
    freed += _move_state(learner, Device("cpu"))
    return freed


def take_back(learner: Learner) -> None:
    """Make room for gradients and bring the state back; collective, so that no rank is early."""
    dist.barrier()
    for buffer in _gradient_buffers(learner):
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
        buffer.zero_()
    _move_state(learner, learner.mesh.device)


def _gradient_buffers(learner: Learner) -> list[Tensor]:
    return [
        buffer.grad_data
        for chunk in learner.model
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def _move_state(learner: Learner, device: Device) -> int:
    """Move the moments, not the steps' counters; returns the bytes of what is moved."""
    moved = 0
    chained = getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])
    for optimizer in (one.optimizer for one in chained):
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = value.to(device)
                    moved += value.nbytes
    return moved
