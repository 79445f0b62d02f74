"""One SGLang server on a random Qwen3 model, for the benchmarks that need one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.rollout.sglang.engine import RunningServer, SglangEngine, WeightPlan
from megatron_gmc.rollout.sglang.probe import Probes
from megatron_gmc.rollout.sglang.server import ServerPlan, SglangServer
from megatron_gmc.rollout.sglang.transports import TransportName

VOCABULARY = 512
CONTEXT = 512


def save_model(folder: Path, hidden: int, layers: int) -> Path:
    """A tied Qwen3 of random weights, float32; hidden 640 and 6 layers are 127 MB."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def new_server(python: Path, folder: Path, log: Path) -> SglangServer:
    return SglangServer(
        "the server", ServerPlan(python, folder, log, start_timeout_s=600.0, cpu=True)
    )


def new_engine(
    address: str, server: SglangServer, folder: Path, transport: TransportName, bucket_bytes: int
) -> SglangEngine:
    return SglangEngine(
        transport,
        RunningServer(address, server.keys),
        folder,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        sample_timeout_s=600.0,
        weights=WeightPlan(transport, "wait", bucket_bytes, 600.0, stream_tensors),
        probes=Probes(),
    )
