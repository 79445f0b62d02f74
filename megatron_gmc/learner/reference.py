"""A reference policy: a second set of weights that takes the policy's place while it scores.

The model's structure is the policy's own, so that one model in memory serves both, and equal
weights give log-probs that are equal to the last bit. Between its turns the second set waits in the
CPU's memory, each rank holding what corresponds to its part of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.model_weights import load_weights


class ReferencePolicy:
    """Fixed weights of the policy's architecture, for a KL term."""

    def __init__(self, learner: Learner, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take the reference's weights from (Hugging Face name, tensor) pairs; collective.

        The policy's own weights are as they were, to the bit. Raises ValueError by name for
        tensors that are not the policy's (`load_weights`).
        """
        self._waiting = [_to_cpu(parameter) for parameter in _parameters(learner)]
        try:
            load_weights(learner.chunks, learner.shape, learner.mesh, tensors)
        finally:
            self._exchange(learner)

    @contextmanager
    def in_place(self, learner: Learner) -> Iterator[None]:
        """The learner's model holds the reference's weights inside, and its own again after."""
        self._exchange(learner)
        try:
            yield
        finally:
            self._exchange(learner)

    def _exchange(self, learner: Learner) -> None:
        # One tensor at a time, so that no third set of weights ever exists.
        with torch.no_grad():
            for parameter, waiting in zip(_parameters(learner), self._waiting, strict=True):
                leaving = _to_cpu(parameter)
                parameter.copy_(waiting)
                waiting.copy_(leaving)


def _parameters(learner: Learner) -> list[Tensor]:
    return [parameter for chunk in learner.chunks for parameter in chunk.parameters()]


def _to_cpu(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", copy=True)
