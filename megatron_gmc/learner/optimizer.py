"""Megatron-core's optimizer and schedule, from the run's config."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_gmc.learner.bucket_padding import keep_bucket_padding
from megatron_gmc.optim_config import OptimConfig

_MEGATRON_NAME = {"adamw": "adam", "sgd": "sgd"}
_MEGATRON_STYLE = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}


def build_optimizer(
    config: OptimConfig, model: list[DistributedDataParallel], steps: int, dtype: torch.dtype
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build the optimizer and its schedule for a run of `steps` optimizer steps.

    For a model of `dtype` bfloat16 it keeps weights in float32, which alone it steps on.
    The n-th step (n = 1 … steps) uses the schedule at n, so warm-up never spends a step at
    learning rate 0, and neither does a decay. Weight decay reaches weights, not norms: megatron
    marks them by `wd_mult`, which only the scheduler applies.
    """
    settings = OptimizerConfig(
        optimizer=_MEGATRON_NAME[config.name],
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        sgd_momentum=config.momentum,
        clip_grad=config.clip_grad or 0.0,
        use_distributed_optimizer=config.distributed,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    optimizer = get_megatron_optimizer(
        settings, model, config_overrides=get_standard_config_overrides(settings)
    )
    keep_bucket_padding(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=0.0,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(steps, config.warmup_steps) + 1,
        lr_decay_style=_MEGATRON_STYLE[config.schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=config.decay_steps,
        lr_wsd_decay_style="linear",
    )
    return optimizer, scheduler
