"""The grid of ranks: the only source of rank facts, built once per process.

Ranks are laid out as megatron-core does by default: tensor neighbours are adjacent, then context,
then data, then pipeline stages. Experts are spread over neighbours inside context × data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import device as Device
from torch.distributed import ProcessGroup

from megatron_gmc.config import MeshConfig
from megatron_gmc.convert.hf_config import ModelShape


@dataclass(frozen=True)
class Mesh:
    """This rank's place on the grid, and the groups that it talks to."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    """Ranks that share the trajectories of a micro-batch, each with a part of every one."""
    pipeline_rank: int
    pipeline_size: int
    virtual_size: int
    """Chunks of layers that every pipeline stage holds; 1 is the plain 1F1B schedule."""
    data_rank: int
    data_size: int
    """Ranks that hold different trajectories; context ranks are not among them."""
    expert_rank: int
    expert_size: int
    """Ranks that a mixture's experts are spread over; they lie inside context × data."""
    sequence_parallel: bool
    """Whether tensor ranks share the tokens between the layers that they split."""
    device: Device
    tensor_group: ProcessGroup
    context_group: ProcessGroup
    pipeline_group: ProcessGroup
    data_group: ProcessGroup
    expert_group: ProcessGroup
    model_group: ProcessGroup
    """The ranks that hold one replica of the policy: tensor × pipeline."""
    owns_world: bool
    """Whether `close` also ends torch.distributed, which `create` had started."""

    @classmethod
    def of(cls, config: MeshConfig) -> Mesh:
        """The mesh that a run's config asks for; see `create`."""
        return cls.create(
            config.tensor,
            config.pipeline,
            context=config.context,
            expert=config.expert,
            virtual_pipeline=config.virtual_pipeline,
            sequence_parallel=config.sequence_parallel,
        )

    @classmethod
    def create(
        cls,
        tensor: int,
        pipeline: int,
        *,
        context: int = 1,
        expert: int = 1,
        virtual_pipeline: int = 1,
        sequence_parallel: bool = False,
        seed: int = 0,
    ) -> Mesh:
        """Join the ranks into tensor × context × data × pipeline, data taking what is left.

        Starts torch.distributed where it does not run: NCCL with CUDA, gloo without, from
        torchrun's environment, or as a world of one where there is none. `seed` seeds
        megatron-core's tracker of random states. Raises ValueError where the world is no multiple
        of tensor × context × pipeline; `check_mesh` finds out what else can be wrong.
        """
        owns_world = not dist.is_initialized()
        if owns_world:
            _start_world()
        world_size = dist.get_world_size()
        if world_size % (tensor * context * pipeline):
            if owns_world:
                dist.destroy_process_group()
            raise ValueError(_world_error(world_size, tensor, context, pipeline))
        state.initialize_model_parallel(
            tensor,
            pipeline,
            virtual_pipeline if virtual_pipeline > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            create_gloo_process_groups=True,
        )
        model_parallel_cuda_manual_seed(seed)
        return cls(
            rank=dist.get_rank(),
            world_size=world_size,
            tensor_rank=state.get_tensor_model_parallel_rank(),
            tensor_size=tensor,
            context_rank=state.get_context_parallel_rank(),
            context_size=context,
            pipeline_rank=state.get_pipeline_model_parallel_rank(),
            pipeline_size=pipeline,
            virtual_size=virtual_pipeline,
            data_rank=state.get_data_parallel_rank(),
            data_size=state.get_data_parallel_world_size(),
            expert_rank=state.get_expert_model_parallel_rank(),
            expert_size=expert,
            sequence_parallel=sequence_parallel,
            device=_device(),
            tensor_group=state.get_tensor_model_parallel_group(),
            context_group=state.get_context_parallel_group(),
            pipeline_group=state.get_pipeline_model_parallel_group(),
            data_group=state.get_data_parallel_group(),
            expert_group=state.get_expert_model_parallel_group(),
            model_group=state.get_model_parallel_group(),
            owns_world=owns_world,
        )

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's pipeline stage holds the embedding, in its first chunk."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage holds the output layer, in its last chunk."""
        return self.pipeline_rank == self.pipeline_size - 1

    def __str__(self) -> str:
        axes = {
            "tensor": self.tensor_size,
            "context": self.context_size,
            "pipeline": self.pipeline_size,
            "data": self.data_size,
        }
        grid = " × ".join(f"{k} {v}" for k, v in axes.items() if k != "context" or v > 1)
        further = [f"expert {self.expert_size}"] if self.expert_size > 1 else []
        further += [f"virtual pipeline {self.virtual_size}"] if self.virtual_size > 1 else []
        further += ["sequence parallel"] if self.sequence_parallel else []
        return f"{_ranks(self.world_size)} ({'; '.join([grid, *further])})"

    def close(self) -> None:
        """Leave the groups; a new mesh may be created afterwards."""
        state.destroy_model_parallel()
        if self.owns_world:
            dist.destroy_process_group()


def check_mesh(world_size: int, mesh: MeshConfig, shape: ModelShape) -> None:
    """Refuse a mesh that the ranks or the model cannot fill, before anything is built.

    Raises ValueError with the numbers and what would fit.
    """
    if world_size % (mesh.tensor * mesh.context * mesh.pipeline):
        raise ValueError(_world_error(world_size, mesh.tensor, mesh.context, mesh.pipeline))
    _check_tensor(world_size, mesh, shape)
    _check_pipeline(world_size, mesh, shape)
    _check_context(mesh, shape)
    _check_expert(world_size, mesh, shape)


def _check_tensor(world_size: int, mesh: MeshConfig, shape: ModelShape) -> None:
    tensor = mesh.tensor
    parts = {
        "attention heads": shape.heads,
        "query groups": shape.query_groups,
        "MLP width": shape.ffn,
    }
    uneven = [f"{size} ({what})" for what, size in parts.items() if size % tensor]
    if uneven:
        fitting = [n for n in _divisors(world_size) if not any(size % n for size in parts.values())]
        raise ValueError(
            f"mesh.tensor: {tensor} does not divide the model's {', '.join(uneven)}; "
            f"on {_ranks(world_size)} use {_one_of(fitting)}"
        )
    if mesh.sequence_parallel and tensor == 1:
        raise ValueError(
            "mesh.sequence_parallel: true with mesh.tensor 1; it shares the tokens between tensor "
            "ranks, so use mesh.tensor 2 or more, or sequence_parallel false"
        )


def _check_pipeline(world_size: int, mesh: MeshConfig, shape: ModelShape) -> None:
    pipeline, virtual, layers = mesh.pipeline, mesh.virtual_pipeline, shape.layers
    if layers % pipeline:
        others = mesh.tensor * mesh.context
        fitting = [n for n in _divisors(world_size // others) if layers % n == 0]
        beside = f"mesh.tensor {mesh.tensor}"
        beside += f" and mesh.context {mesh.context}" if mesh.context > 1 else ""
        raise ValueError(
            f"mesh.pipeline: {pipeline} does not divide the model's {layers} layers; "
            f"on {_ranks(world_size)} with {beside} use {_one_of(fitting)}"
        )
    if virtual > 1 and pipeline == 1:
        raise ValueError(
            f"mesh.virtual_pipeline: {virtual} with mesh.pipeline 1; chunks are interleaved "
            "between stages, so use mesh.pipeline 2 or more, or virtual_pipeline 1"
        )
    if layers % (pipeline * virtual):
        per_stage = layers // pipeline
        raise ValueError(
            f"mesh.virtual_pipeline: {virtual} does not divide the {per_stage} layers of a stage "
            f"({layers} layers, mesh.pipeline {pipeline}); use {_one_of(_divisors(per_stage))}"
        )


def _check_context(mesh: MeshConfig, shape: ModelShape) -> None:
    # A sequence is cut into 2 × context parts, of which every rank takes an early and a late one.
    if 2 * mesh.context > shape.max_positions and mesh.context > 1:
        raise ValueError(
            f"mesh.context: {mesh.context} cuts every sequence into {2 * mesh.context} parts, and "
            f"the model's context is {shape.max_positions} tokens; use at most "
            f"{max(1, shape.max_positions // 2)}"
        )


def _check_expert(world_size: int, mesh: MeshConfig, shape: ModelShape) -> None:
    if shape.experts == 0:
        if mesh.expert > 1:
            raise ValueError(
                f"mesh.expert: {mesh.expert} with a model that has no experts; use expert 1"
            )
        return
    places = world_size // (mesh.tensor * mesh.pipeline)
    for what, size in {
        f"context × data = {places}": places,
        f"the model's {shape.experts} experts": shape.experts,
    }.items():
        if size % mesh.expert:
            fitting = [n for n in _divisors(places) if shape.experts % n == 0]
            raise ValueError(
                f"mesh.expert: {mesh.expert} does not divide {what}; on {_ranks(world_size)} with "
                f"mesh.tensor {mesh.tensor} and mesh.pipeline {mesh.pipeline} use "
                f"{_one_of(fitting)}"
            )
    if mesh.tensor > 1 and not mesh.sequence_parallel:
        raise ValueError(
            f"mesh.sequence_parallel: false with mesh.tensor {mesh.tensor} and a mixture of "
            "experts, whose tokens tensor ranks have to share; set it to true, or mesh.tensor to 1"
        )


def _world_error(world_size: int, tensor: int, context: int, pipeline: int) -> str:
    product = tensor * context * pipeline
    axes = [f"mesh.tensor {tensor}", f"mesh.context {context}", f"mesh.pipeline {pipeline}"]
    if context == 1:
        del axes[1]
    fault = "is more than" if product > world_size else "does not divide"
    return (
        f"{' × '.join(axes)} = {product} {fault} the number of ranks, "
        f"{world_size}; start a multiple of {product} ranks, or a mesh whose product is "
        f"{_one_of(_divisors(world_size))}"
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _one_of(numbers: list[int]) -> str:
    *head, last = [str(n) for n in numbers]
    return f"{', '.join(head)} or {last}" if head else last


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _start_world() -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _device() -> Device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
