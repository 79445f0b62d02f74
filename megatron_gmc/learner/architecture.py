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
from megatron_gmc.learner.core_attention import with_core_attention
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.parallel_settings import parallel_settings


def layer_spec(shape: ModelShape) -> ModuleSpec:
    """megatron-core's spec of one layer: transformer-engine's where that can run, else local.

    A mixture of experts runs expert by expert in the local spec, as one grouped matrix product in
    transformer-engine's, which has not been run on a GPU.
    """
    experts = shape.experts or None
    if _has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=True, qk_layernorm=shape.qk_norm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    return with_core_attention(spec)


def _has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(shape: ModelShape, mesh: Mesh, dtype: torch.dtype) -> TransformerConfig:
    """The config of the policy's layers on this mesh; dropout and auxiliary losses are off."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # The only dispatcher with which micro-batches may differ in length, experts or not.
        moe_token_dispatcher_type="alltoall",
        # Weights come from `initialise` or a checkpoint, the same for every mesh.
        perform_initialization=False,
        use_cpu_initialization=True,
        # Fused kernels that need apex or transformer-engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **parallel_settings(mesh),
        **(_mixture(shape) if shape.experts else {}),
    )


def _mixture(shape: ModelShape) -> dict[str, object]:
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_router_topk": shape.experts_per_token,
        # A softmax over the chosen experts is one over all of them, divided by the chosen sum.
        "moe_router_pre_softmax": not shape.normalised_gates,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": _has_transformer_engine(),
    }
