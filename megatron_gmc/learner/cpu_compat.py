"""What megatron-core 0.16.1 and newer need to run on a CPU with gloo.

megatron-core takes CUDA for granted. `SHIMS` lists what then fails on a CPU, each with its cause;
none is active where CUDA is. torch's functions are replaced in what megatron's modules see of torch
alone; only two methods of Tensor are replaced in place, and they look at who calls. `install` must
run before megatron is imported; importing any module of `megatron_gmc.learner` has done so.

Versions: 0.19 and newer also import triton when they are imported themselves, so it must be
installed there although nothing on a CPU runs it.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_gmc.learner.cpu_experts import (
    NoStream,
    no_side_streams,
    plain_router_gemm,
    split_sizes_as_numbers,
    uneven_parts,
)
from megatron_gmc.learner.patching import CUDA, TORCH, Patches, called_by_megatron, watch_imports

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

_CPU = torch.device("cpu")


def _keep_eager(patches: Patches) -> None:
    def replace_fuser(jit: ModuleType) -> None:
        patches.replace(jit, "jit_fuser", jit.noop_decorator)

    patches.when_imported("megatron.core.jit", replace_fuser)


def _current_device_is_cpu(patches: Patches) -> None:
    patches.replace(CUDA, "current_device", lambda: _CPU)


def _factories_on_cpu(patches: Patches) -> None:
    def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def make(*args: object, **kwargs: object) -> Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return make

    for name in ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like"):
        patches.replace(TORCH, name, on_cpu(getattr(torch, name)))


def _tensors_stay(patches: Patches) -> None:
    original: Callable[..., Tensor] = torch.Tensor.cuda

    def cuda(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        return tensor if called_by_megatron() else original(tensor, *args, **kwargs)

    patches.replace(torch.Tensor, "cuda", cuda)


def _type_names_of_cuda(patches: Patches) -> None:
    original: Callable[..., str | Tensor] = torch.Tensor.type

    def type_(tensor: Tensor, *args: object, **kwargs: object) -> str | Tensor:
        name = original(tensor, *args, **kwargs)
        if isinstance(name, str) and called_by_megatron():
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    patches.replace(torch.Tensor, "type", type_)


def _nothing_to_wait_for(patches: Patches) -> None:
    patches.replace(CUDA, "synchronize", lambda: None)


def _one_stream(patches: Patches) -> None:
    patches.replace(CUDA, "current_stream", NoStream)


def _random_states_of_cpu(patches: Patches) -> None:
    def get_state(device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_state(state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def patch(module: ModuleType) -> None:
        patches.replace(module, "_set_cuda_rng_state", set_state)
        # The tracker warns when the CPU's state moves under it; here that is what it is for.
        logging.getLogger(module.__name__).addFilter(
            lambda record: "CPU RNG state changed" not in record.getMessage()
        )

    patches.replace(CUDA, "get_rng_state", get_state)
    patches.replace(CUDA.random, "get_rng_state", get_state)
    patches.replace(CUDA, "manual_seed", torch.default_generator.manual_seed)
    patches.when_imported("megatron.core.tensor_parallel.random", patch)


def _norm_under_sequence_parallel(patches: Patches) -> None:
    def patch(module: ModuleType) -> None:
        original = module.WrappedTorchNorm.__new__

        def new(cls: type, config: TransformerConfig, *args: object, **kwargs: object) -> nn.Module:
            plain = copy.copy(config)
            plain.sequence_parallel = False
            norm: nn.Module = original(cls, plain, *args, **kwargs)
            for parameter in norm.parameters():
                # finalize_model_grads sums gradients so marked over the tensor group.
                vars(parameter)["sequence_parallel"] = config.sequence_parallel
            return norm

        patches.replace(module.WrappedTorchNorm, "__new__", staticmethod(new))

    patches.when_imported("megatron.core.transformer.torch_norm", patch)


_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


def _states_before_loading(patches: Patches) -> None:
    def patch(module: ModuleType) -> None:
        describe = module.DistributedOptimizer.sharded_state_dict

        def sharded_state_dict(
            self: DistributedOptimizer,
            model_state: object,
            is_loading: bool = False,
            **kwargs: object,
        ) -> object:
            if is_loading and not self.optimizer.state:
                self._init_optimizer_states_with_dummy_values()
            return describe(self, model_state, is_loading, **kwargs)

        patches.replace(module.DistributedOptimizer, "sharded_state_dict", sharded_state_dict)

    patches.when_imported(_DISTRIBUTED_OPTIMIZER, patch)


def _own_step_count(patches: Patches) -> None:
    name = "_set_main_param_and_optimizer_states"

    def patch(module: ModuleType) -> None:
        assign = getattr(module.DistributedOptimizer, name)

        def set_states(
            self: DistributedOptimizer, parameter: nn.Parameter, tensors: dict[str, Tensor]
        ) -> None:
            group, order = self.model_param_group_index_map[parameter]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
            step = {"step": state["step"]} if "step" in state else {}
            assign(self, parameter, step | tensors)

        patches.replace(module.DistributedOptimizer, name, set_states)

    patches.when_imported(_DISTRIBUTED_OPTIMIZER, patch)


def _separate_step_counts(patches: Patches) -> None:
    def patch(module: ModuleType) -> None:
        load = module.DistributedOptimizer.load_state_dict

        def load_state_dict(self: DistributedOptimizer, state: dict[str, object]) -> None:
            load(self, state)
            for entry in self.optimizer.state.values():
                if isinstance(entry.get("step"), Tensor):
                    entry["step"] = entry["step"].clone()

        patches.replace(module.DistributedOptimizer, "load_state_dict", load_state_dict)

    patches.when_imported(_DISTRIBUTED_OPTIMIZER, patch)


@dataclass(frozen=True)
class Shim:
    """One thing that megatron-core does and a CPU cannot."""

    name: str
    cause: str
    apply: Callable[[Patches], None]


SHIMS = (
    Shim(
        "compile",
        "jit_fuser is torch.compile: every rank would start a C++ compiler for small functions",
        _keep_eager,
    ),
    Shim(
        "current_device",
        "torch.cuda.current_device() is the device= of most buffers (mappings, rotary embedding, "
        "gradient buffers, point-to-point) and raises without CUDA",
        _current_device_is_cpu,
    ),
    Shim(
        "factories",
        "device='cuda' is written out in causal masks, schedules, gradient clipping and scalers",
        _factories_on_cpu,
    ),
    Shim(
        "tensor_cuda",
        "Tensor.cuda() is called on the tied embedding of a pipeline and on gathered states",
        _tensors_stay,
    ),
    Shim(
        "tensor_type",
        "the optimizers accept a parameter by its type name, 'torch.cuda.FloatTensor' and its like",
        _type_names_of_cuda,
    ),
    Shim(
        "synchronize",
        "torch.cuda.synchronize() follows point-to-point exchanges and checkpoint writes",
        _nothing_to_wait_for,
    ),
    Shim(
        "current_stream",
        "0.19 asks for the current stream before every gradient reduction, a mixture of experts in "
        "every layer",
        _one_stream,
    ),
    Shim(
        "side_streams",
        "the token dispatcher of a mixture of experts copies its counts to the host on a stream of "
        "its own",
        no_side_streams,
    ),
    Shim(
        "router_gemm",
        "0.16 imports te_general_gemm with transformer-engine alone and then asks whether it is "
        "None: NameError in every router without it",
        plain_router_gemm,
    ),
    Shim(
        "split_sizes",
        "the sizes that an all-to-all is split by become numbers on their way from the GPU; gloo "
        "does not take tensors",
        split_sizes_as_numbers,
    ),
    Shim(
        "uneven_parts",
        "tensor ranks exchange as many tokens as each of them has for an expert; gloo gathers and "
        "scatters equal parts alone",
        uneven_parts,
    ),
    Shim(
        "random_states",
        "the tracker reads the CUDA generator, which fails, and seeds and sets it, which is queued "
        "for a CUDA start that never comes",
        _random_states_of_cpu,
    ),
    Shim(
        "sequence_parallel_norm",
        "torch's RMSNorm is refused under sequence parallelism, which it supports once its weight "
        "is marked",
        _norm_under_sequence_parallel,
    ),
    Shim(
        "optimizer_fresh",
        "DistributedOptimizer without apex or transformer-engine describes what it will load by "
        "the states that it has, and a fresh torch AdamW has none",
        _states_before_loading,
    ),
    Shim(
        "optimizer_step_missing",
        "DistributedOptimizer loads every state that AdamW keeps per parameter, but the checkpoint "
        "holds 'step' once for all",
        _own_step_count,
    ),
    Shim(
        "optimizer_step_shared",
        "DistributedOptimizer loads one 'step' tensor for all parameters, which torch's AdamW then "
        "counts up once per parameter: wrong bias correction, silently",
        _separate_step_counts,
    ),
)

# Warnings that megatron-core's own calls draw, and that a user on a CPU can do nothing about.
_CUDA_ADVICE = (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "When using async grad allreduce it is recommended to set the environment variable CUDA",
    "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated",
)

_installed: dict[str, Patches] = {}


def install() -> None:
    """Put every shim on, once; does nothing where CUDA is available.

    Raises RuntimeError if megatron was imported first, and so took torch as it is.
    """
    if torch.cuda.is_available() or _installed:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("import megatron_gmc.learner before megatron.core on a CPU")
    for message in _CUDA_ADVICE:
        warnings.filterwarnings("ignore", message=message)
    watch_imports()
    for shim in SHIMS:
        _put_on(shim)


def _put_on(shim: Shim) -> None:
    patches = Patches()
    shim.apply(patches)
    _installed[shim.name] = patches


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Take one shim off for a while; tests use it to see that the shim is still needed."""
    (shim,) = (shim for shim in SHIMS if shim.name == name)
    _installed[name].undo()
    try:
        yield
    finally:
        _put_on(shim)
