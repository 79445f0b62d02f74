"""The grid of ranks: the only source of rank facts, built once per process.

Ranks are laid out as megatron-core does by default: tensor neighbours are adjacent, then data,
then pipeline stages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import device as Device
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """This rank's place on the grid, and the groups that it talks to."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    device: Device
    tensor_group: ProcessGroup
    pipeline_group: ProcessGroup
    data_group: ProcessGroup
    model_group: ProcessGroup
    """The ranks that hold one replica of the policy: tensor × pipeline."""
    owns_world: bool
    """Whether `close` also ends torch.distributed, which `create` had started."""

    @classmethod
    def create(cls, tensor: int, pipeline: int, seed: int = 0) -> Mesh:
        """Join the ranks into tensor × pipeline × data, data taking what the others leave.

        Starts torch.distributed where it does not run: NCCL with CUDA, gloo without, from
        torchrun's environment, or as a world of one where there is none. `seed` seeds
        megatron-core's tracker of random states. Raises ValueError where the world is no multiple
        of tensor × pipeline.
        """
        owns_world = not dist.is_initialized()
        if owns_world:
            _start_world()
        world_size = dist.get_world_size()
        if world_size % (tensor * pipeline):
            if owns_world:
                dist.destroy_process_group()
            raise ValueError(_world_error(world_size, tensor, pipeline))
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=True)
        model_parallel_cuda_manual_seed(seed)
        return cls(
            rank=dist.get_rank(),
            world_size=world_size,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=tensor,
            pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pipeline_size=pipeline,
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            device=_device(),
            tensor_group=parallel_state.get_tensor_model_parallel_group(),
            pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
            data_group=parallel_state.get_data_parallel_group(),
            model_group=parallel_state.get_model_parallel_group(),
            owns_world=owns_world,
        )

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's pipeline stage holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage holds the output layer."""
        return self.pipeline_rank == self.pipeline_size - 1

    def __str__(self) -> str:
        return (
            f"{_ranks(self.world_size)} (tensor {self.tensor_size} × pipeline "
            f"{self.pipeline_size} × data {self.data_size})"
        )

    def close(self) -> None:
        """Leave the groups; a new mesh may be created afterwards."""
        parallel_state.destroy_model_parallel()
        if self.owns_world:
            dist.destroy_process_group()


def check_mesh(
    world_size: int,
    tensor: int,
    pipeline: int,
    *,
    layers: int,
    heads: int,
    query_groups: int,
    ffn: int,
) -> None:
    """Refuse a mesh that the ranks or the model cannot fill, before anything is built.

    `ffn` is the width of the MLP. Raises ValueError with the numbers and what would fit.
    """
    if world_size % (tensor * pipeline):
        raise ValueError(_world_error(world_size, tensor, pipeline))
    parts = {"attention heads": heads, "query groups": query_groups, "MLP width": ffn}
    uneven = [f"{size} ({what})" for what, size in parts.items() if size % tensor]
    if uneven:
        fitting = [n for n in _divisors(world_size) if not any(size % n for size in parts.values())]
        raise ValueError(
            f"mesh.tensor: {tensor} does not divide the model's {', '.join(uneven)}; "
            f"on {_ranks(world_size)} use {_one_of(fitting)}"
        )
    if layers % pipeline:
        fitting = [n for n in _divisors(world_size // tensor) if layers % n == 0]
        raise ValueError(
            f"mesh.pipeline: {pipeline} does not divide the model's {layers} layers; "
            f"on {_ranks(world_size)} with mesh.tensor {tensor} use {_one_of(fitting)}"
        )


def _world_error(world_size: int, tensor: int, pipeline: int) -> str:
    product = tensor * pipeline
    fault = "is more than" if product > world_size else "does not divide"
    return (
        f"mesh.tensor {tensor} × mesh.pipeline {pipeline} = {product} {fault} the number of ranks, "
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
