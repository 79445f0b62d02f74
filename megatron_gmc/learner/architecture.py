"""What megatron-core is told about the policy: its transformer config and layer spec."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.learner.mesh import Mesh


def layer_spec() -> ModuleSpec:
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    if torch.cuda.is_available() and has_transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")


def transformer_config(shape: ModelShape, mesh: Mesh, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=mesh.tensor_size,
        pipeline_model_parallel_size=mesh.pipeline_size,
        # Weights come from `initialise` or a checkpoint, the same for every mesh.
        perform_initialization=False,
        use_cpu_initialization=True,
        # Fused kernels that need apex or transformer-engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
