"""The policy on its mesh, with optimizer and schedule: one object that takes optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.errors import NonFiniteError
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.micro_batch import LossOfLogProbs, MicroBatch, run_micro_batches
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import load_weights, named_weights
from megatron_gmc.learner.optimizer import build_optimizer
from megatron_gmc.learner.pack import Padding
from megatron_gmc.learner.plan import Limits
from megatron_gmc.optim_config import OptimConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the config's word for them."""


class Learner:
    """Model, optimizer and schedule of one run, for every rank of the mesh.

    `version` counts the optimizer steps that the weights have behind them.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        optim: OptimConfig,
        steps: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = shape
        self.mesh = mesh
        self.version = 0
        self.chunks = build_model(shape, mesh, dtype)
        self.limits = _limits(shape, mesh)
        config = self.chunks[0].config
        # Loss shares arrive divided by the batch's own denominator: nobody divides again.
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = _finalize
        self.model = [self._wrap(chunk, optim) for chunk in self.chunks]
        syncs = [wrapped.no_sync for wrapped in self.model]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        self.optimizer, self.scheduler = build_optimizer(optim, self.model, steps, dtype)

    def _wrap(self, chunk: GPTModel, optim: OptimConfig) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=optim.distributed
        )
        return DistributedDataParallel(self.chunks[0].config, settings, chunk)

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_of: LossOfLogProbs,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        forward_only: bool = False,
    ) -> float:
        """Run `loss_of` over this rank's micro-batches; see `run_micro_batches`.

        Unless `forward_only`, the model then holds the whole batch's gradient. Returns the loss
        of the whole batch, the same on every rank.
        """
        if not forward_only:
            for wrapped in self.model:
                wrapped.zero_grad_buffer()
            self.optimizer.zero_grad()
        with torch.set_grad_enabled(not forward_only):
            share = run_micro_batches(
                self.model,
                micro_batches,
                loss_of,
                mesh=self.mesh,
                vocabulary=self.shape.vocab_size,
                temperature=temperature,
                entropy=entropy,
                forward_only=forward_only,
            )
        return float(self.sum_over_batch(share))

    def sum_over_batch(self, value: Tensor) -> Tensor:
        """Add up what data-parallel ranks hold, and hand the last stage's sum to every stage.

        Tensor and context ranks hold the same value already; stages before the last hold zeros.
        """
        if self.mesh.data_size > 1:
            dist.all_reduce(value, group=self.mesh.data_group)
        if self.mesh.pipeline_size > 1:
            dist.all_reduce(value, group=self.mesh.pipeline_group)
        return value

    def apply(self) -> float:
        """Take one optimizer step on the gradient in place; return its norm before clipping.

        Raises NonFiniteError, on every rank and before the optimizer saw anything, where the
        norm is not finite.
        """
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}", ())
        self.scheduler.step(1)
        self.optimizer.step()
        self.version += 1
        return norm

    def skip(self) -> float:
        """Pass over a step without loss tokens: the weights stay, the schedule goes on."""
        self.scheduler.step(1)
        self.version += 1
        return 0.0

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights from (Hugging Face name, tensor) pairs; see `load_weights`."""
        load_weights(self.chunks, self.shape, self.mesh, tensors)
        # With bfloat16 the optimizer has weights of its own, which are what it steps on.
        self.optimizer.reload_model_params()

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, one at a time; a collective call.

        Global rank 0 gets the tensors; the other ranks take part and get nothing.
        """
        return named_weights(self.chunks, self.shape, self.mesh)


def _limits(shape: ModelShape, mesh: Mesh) -> Limits:
    """What plans of this model's batches depend on; work is counted in multiply-adds."""
    width = shape.heads * shape.head_size
    projections = 2 * shape.hidden * (width + shape.query_groups * shape.head_size)
    mlp = 3 * shape.hidden * shape.ffn * (shape.experts_per_token if shape.experts else 1)
    each_token = shape.layers * (projections + mlp) + shape.vocab_size * shape.hidden
    return Limits(
        data_size=mesh.data_size,
        padding=Padding.of(
            tensor=mesh.tensor_size,
            context=mesh.context_size,
            sequence_parallel=mesh.sequence_parallel,
        ),
        # Interleaved stages take turns in rounds of as many micro-batches as there are stages.
        count_multiple=mesh.pipeline_size if mesh.virtual_size > 1 else 1,
        attention_cost=2 * shape.layers * width / each_token,
    )


def _finalize(
    model: list[torch.nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Megatron's reductions without its division by a token count."""
    finalize_model_grads(model, None, pg_collection, force_all_reduce)
