"""Each shim is still needed, does its work, and touches nobody but megatron.

Every case runs with its shim taken off and must fail in the way that the shim is for. When a newer
megatron-core makes one pass, the shim can go.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from megatron.core import __version__ as megatron_version
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import get_default_causal_mask
from packaging.version import Version

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.learner import cpu_compat
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import initialise
from tests.distributed import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shims are for CPUs")

NO_CUDA = (AssertionError, RuntimeError)  # a torch without CUDA; one with CUDA and no device

SHAPE = ModelShape(
    layers=2,
    hidden=16,
    ffn=16,
    heads=2,
    query_groups=2,
    head_size=8,
    vocab_size=16,
    max_positions=16,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    tied=True,
    initializer_range=0.02,
)

MIXTURE = dataclasses.replace(SHAPE, experts=4, experts_per_token=2)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.create(tensor=1, pipeline=1)
    yield mesh
    mesh.close()


def distributed_optimizer(mesh: Mesh) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    (model,) = chunks = build_model(SHAPE, mesh)
    initialise(chunks, SHAPE, mesh, seed=0)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    chain = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True), [wrapped]
    )
    return wrapped, chain.chained_optimizers[0]


def adam_step(optimizer: DistributedOptimizer) -> None:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.optimizer.step()


def steps_counted(optimizer: DistributedOptimizer) -> set[float]:
    return {float(state["step"]) for state in optimizer.optimizer.state.values()}


def second_copy(module: str) -> ModuleType:
    """The module executed once more, with its decorators."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> bool:
        fuser = second_copy("megatron.core.jit").jit_fuser
        monkeypatch.setattr("megatron.core.jit.jit_fuser", fuser)
        fused = second_copy("megatron.core.fusions.fused_bias_dropout")
        return hasattr(fused.bias_dropout_add_fused_train, "_torchdynamo_orig_callable")

    assert not compiled()
    with cpu_compat._without("compile"):
        assert compiled()


def test_current_device() -> None:
    def frequencies() -> torch.Tensor:
        return RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True)(4)

    assert frequencies().device.type == "cpu"
    with cpu_compat._without("current_device"), pytest.raises(NO_CUDA):
        frequencies()


def test_factories() -> None:
    assert get_default_causal_mask(2).tolist() == [[False, True], [False, False]]
    with cpu_compat._without("factories"), pytest.raises(NO_CUDA):
        get_default_causal_mask(3)


def test_tensor_cuda(mesh: Mesh) -> None:
    """The first of two stages, whose tied embedding goes through `.cuda()` when it is built."""
    first = dataclasses.replace(mesh, pipeline_size=2)
    build_model(SHAPE, first)
    with cpu_compat._without("tensor_cuda"), pytest.raises(NO_CUDA):
        build_model(SHAPE, first)


def test_tensor_type(mesh: Mesh) -> None:
    distributed_optimizer(mesh)
    with cpu_compat._without("tensor_type"), pytest.raises(TypeError, match="FloatTensor"):
        distributed_optimizer(mesh)


def test_synchronize() -> None:
    assert FileSystemWriterAsync.preload_tensors([], non_blocking=True) == []
    with cpu_compat._without("synchronize"), pytest.raises(NO_CUDA):
        FileSystemWriterAsync.preload_tensors([], non_blocking=True)


@pytest.mark.skipif(Version(megatron_version) < Version("0.19"), reason="0.19 came to need it")
def test_current_stream(mesh: Mesh) -> None:
    wrapped, _ = distributed_optimizer(mesh)
    wrapped.start_grad_sync()
    with cpu_compat._without("current_stream"), pytest.raises(NO_CUDA):
        distributed_optimizer(mesh)[0].start_grad_sync()


def test_random_states(mesh: Mesh) -> None:
    """Two forks of the tracker go on in their own sequence and leave the default one alone."""

    def draws() -> tuple[list[float], bool]:
        torch.manual_seed(5)
        untouched = torch.rand(3).tolist()
        torch.manual_seed(5)
        forked = []
        for _ in range(2):
            with get_cuda_rng_tracker().fork():
                forked.append(float(torch.rand(())))
        return forked, torch.rand(3).tolist() == untouched

    (first, second), untouched = draws()
    assert first != second
    assert untouched
    with cpu_compat._without("random_states"), pytest.raises(NO_CUDA):
        draws()


def test_sequence_parallel_norm() -> None:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        persist_layer_norm=False,
    )
    norm = WrappedTorchNorm(config, 8)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert norm.weight.sequence_parallel is True
    assert config.sequence_parallel
    with (
        cpu_compat._without("sequence_parallel_norm"),
        pytest.raises(AssertionError, match="sequence parallel not supported"),
    ):
        WrappedTorchNorm(config, 8)


def test_optimizer_fresh(mesh: Mesh) -> None:
    def what_to_load() -> object:
        wrapped, optimizer = distributed_optimizer(mesh)
        return optimizer.sharded_state_dict(
            wrapped.module.sharded_state_dict(),
            is_loading=True,
            metadata={
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False,
            },
        )

    assert what_to_load()
    with cpu_compat._without("optimizer_fresh"), pytest.raises(AssertionError):
        what_to_load()


def test_optimizer_step_missing(mesh: Mesh) -> None:
    wrapped, optimizer = distributed_optimizer(mesh)
    adam_step(optimizer)
    parameter = wrapped.module.decoder.final_layernorm.weight
    zeros = torch.zeros(16)
    loaded = {"param": zeros, "exp_avg": zeros, "exp_avg_sq": zeros}

    @torch.no_grad()
    def load() -> None:
        optimizer._set_main_param_and_optimizer_states(parameter, loaded)

    load()
    assert parameter.tolist() == [0.0] * 16
    with cpu_compat._without("optimizer_step_missing"), pytest.raises(KeyError, match="step"):
        load()


def test_optimizer_step_shared(mesh: Mesh) -> None:
    """D5: one step after a load counts as one step, for every parameter."""
    _, optimizer = distributed_optimizer(mesh)
    adam_step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    adam_step(optimizer)
    assert steps_counted(optimizer) == {2.0}
    with cpu_compat._without("optimizer_step_shared"):
        optimizer.load_state_dict(optimizer.state_dict())
        adam_step(optimizer)
        assert steps_counted(optimizer) != {3.0}


def test_side_streams(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a mixture asks for a stream, once for the class."""
    monkeypatch.setattr(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    build_model(MIXTURE, mesh)
    monkeypatch.setattr(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    with cpu_compat._without("side_streams"), pytest.raises(NO_CUDA):
        build_model(MIXTURE, mesh)


@pytest.mark.skipif(Version(megatron_version) >= Version("0.19"), reason="0.19 does without")
def test_router_gemm() -> None:
    ones = torch.ones(2, 2)
    assert router_gating_linear(ones, ones, None, torch.float32).tolist() == [[2.0, 2.0]] * 2
    with cpu_compat._without("router_gemm"), pytest.raises(NameError, match="te_general_gemm"):
        router_gating_linear(ones, ones, None, torch.float32)


def test_split_sizes(mesh: Mesh) -> None:
    def exchange() -> list[float]:
        sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([2]), as_numpy=True)
        received = torch.zeros(2)
        torch.distributed.all_to_all_single(received, torch.ones(2), sizes, sizes)
        return received.tolist()

    assert exchange() == [1.0, 1.0]
    with cpu_compat._without("split_sizes"), pytest.raises((TypeError, ValueError)):
        exchange()


def test_uneven_parts() -> None:
    run_ranks("tests.learner.uneven_workers", "", 2)


def test_every_shim_has_a_test() -> None:
    assert {f"test_{shim.name}" for shim in cpu_compat.SHIMS} <= globals().keys()


def test_torch_is_left_as_it_is() -> None:
    """A function replaced in torch itself would, for one, escape torch.device as a context."""
    with pytest.raises(NO_CUDA):
        torch.cuda.current_device()
    with pytest.raises(NO_CUDA):
        torch.zeros(1).cuda()
    with torch.device("meta"):
        assert all(make(1).is_meta for make in (torch.zeros, torch.ones, torch.empty))
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_install_again_changes_nothing() -> None:
    before = list(sys.meta_path)
    cpu_compat.install()
    assert sys.meta_path == before


def test_nothing_is_installed_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compat, "_installed", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    cpu_compat.install()
    assert sys.meta_path == before
    assert cpu_compat._installed == {}


def test_megatron_must_not_be_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compat, "_installed", {})
    with pytest.raises(RuntimeError, match=r"import megatron_gmc\.learner before megatron\.core"):
        cpu_compat.install()
