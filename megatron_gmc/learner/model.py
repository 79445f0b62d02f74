"""This rank's part of the policy as a megatron-core GPTModel."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.mapping import padded_vocab_size
from megatron_gmc.learner.architecture import layer_spec, transformer_config
from megatron_gmc.learner.mesh import Mesh


def build_model(shape: ModelShape, mesh: Mesh, dtype: torch.dtype = torch.float32) -> GPTModel:
    """This rank's part of the policy, its weights not yet set (`initialise`, `load_weights`).

    `model(tokens, positions, None)` with int64 [b, s] gives logits [b, s, padded vocabulary /
    tensor ranks] on the last stage. The mask is causal, so rows are padded on the right. The
    padding of the vocabulary is `padded_vocab_size(shape.vocab_size, mesh.tensor_size)`.
    """
    model = GPTModel(
        transformer_config(shape, mesh, dtype),
        layer_spec(),
        vocab_size=padded_vocab_size(shape.vocab_size, mesh.tensor_size),
        max_sequence_length=shape.max_positions,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    _mark_sharded(model)
    # torch.nn.RMSNorm is built in float32 whatever params_dtype is.
    return model.to(mesh.device, dtype)


def _mark_sharded(model: GPTModel) -> None:
    """Megatron 0.16 marks a sharded weight only where it draws it, which we leave out.

    A weight without the mark counts in the gradient's norm, and so in clipping, on one rank alone.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dimension = 0
        elif isinstance(module, RowParallelLinear):
            dimension = 1
        else:
            continue
        # A tied output layer has no weight of its own on the stage of the embedding.
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)
