"""The policy's output layer: the model hands out hidden states, and the head's weight is read here.

A policy step needs the log-probs of a few tokens, never the logits of all: so the last pipeline
stage stops before its output layer, and `log_probs.token_scores` goes on from there. Newer versions
of megatron-core (0.19 has it) let a caller stop it with the argument `output_processor`; older ones
(0.16 has not) need an output layer that passes its input through. This file alone tells them apart.
"""

from __future__ import annotations

import functools
import inspect

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


def install(chunk: GPTModel) -> None:
    """Make `chunk` return hidden states instead of logits; nothing to do before the last stage.

    They come as [b, t, hidden], with sequence parallelism this rank's part of t. The output layer
    keeps its weight, so checkpoints, gradients and the tie to the embedding are as ever.
    """
    if not chunk.post_process:
        return
    if "output_processor" in inspect.signature(GPTModel.forward).parameters:
        chunk.forward = functools.partial(chunk.forward, output_processor=_batch_first)
    else:
        # Made anew, the layer would lose the marks that megatron has put on its weight.
        chunk.output_layer.__class__ = _PassThrough


def head_weight(chunk: GPTModel) -> Tensor:
    """The output layer's weight on the last stage, [padded vocabulary / tensor ranks, hidden]."""
    weight: Tensor = chunk.output_layer.weight
    if chunk.share_embeddings_and_output_weights:
        weight = chunk.shared_embedding_or_output_weight()
    return weight


def whole_sequence(chunk: GPTModel, hidden: Tensor) -> Tensor:
    """All tokens' hidden states on each tensor rank, [b · t, hidden], from what `chunk` returned.

    Backward adds up what the tensor ranks' parts of the vocabulary give, each a part of the sum.
    With sequence parallelism b must be 1.
    """
    whole: Tensor
    if chunk.config.sequence_parallel and chunk.config.tensor_model_parallel_size > 1:
        assert hidden.shape[0] == 1, hidden.shape
        whole = gather_from_sequence_parallel_region(hidden[0], tensor_parallel_output_grad=True)
    else:
        whole = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1))
    return whole


def logits(chunk: GPTModel, hidden: Tensor) -> Tensor:
    """Whole logits of this rank's columns, [b, t, padded vocabulary / tensor ranks], with graph.

    For checks: a policy step never forms them.
    """
    whole = whole_sequence(chunk, hidden) @ head_weight(chunk).t()
    return whole.view(len(hidden), -1, whole.shape[1])


class _PassThrough(ColumnParallelLinear):
    """An output layer that leaves its input as it is, for versions without `output_processor`."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """[t, b, hidden], which the model then turns around."""
        return input_, None


def _batch_first(*, hidden_states: Tensor, **_: object) -> Tensor:
    return hidden_states.transpose(0, 1).contiguous()
