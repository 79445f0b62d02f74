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
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.mapping import padded_vocab_size
from megatron_gmc.learner import output_head
from megatron_gmc.learner.architecture import layer_spec, transformer_config
from megatron_gmc.learner.mesh import Mesh


def build_model(
    shape: ModelShape, mesh: Mesh, dtype: torch.dtype = torch.float32
) -> list[GPTModel]:
    """This rank's part of the policy, its weights not yet set (`initialise`, `load_weights`).

    One chunk for every virtual pipeline stage, in the order in which the model runs through them.
    The last stage's last chunk gives hidden states: see `output_head`. The padding of the
    vocabulary is `padded_vocab_size(shape.vocab_size, mesh.tensor_size)`.
    """
    config = transformer_config(shape, mesh, dtype)
    return [_chunk(config, shape, mesh, index) for index in range(mesh.virtual_size)]


def _chunk(config: TransformerConfig, shape: ModelShape, mesh: Mesh, index: int) -> GPTModel:
    model = GPTModel(
        config,
        layer_spec(shape),
        vocab_size=padded_vocab_size(shape.vocab_size, mesh.tensor_size),
        max_sequence_length=shape.max_positions,
        pre_process=mesh.is_first_stage and index == 0,
        post_process=mesh.is_last_stage and index == mesh.virtual_size - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 1.0,
        vp_stage=index if mesh.virtual_size > 1 else None,
    )
    _mark_sharded(model)
    _mark_experts(model)
    output_head.install(model)
    # torch.nn.RMSNorm is built in float32 whatever params_dtype is.
    return model.to(mesh.device, config.params_dtype)


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


def _mark_experts(model: GPTModel) -> None:
    """Megatron marks experts only where they are spread over ranks.

    By the mark the optimizer keeps them apart; kept apart always, their moments lie under the same
    names in every checkpoint and can be loaded with the experts spread in another way.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            vars(parameter)["allreduce"] = False
