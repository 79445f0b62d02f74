"""The section of a config that describes the optimizer and its schedule."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gmc.section import NonNegativeFloat, PositiveFloat, Section


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: PositiveFloat
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's term in the denominator."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD's momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Not applied to norms and biases."""
    clip_grad: PositiveFloat | None = None
    """Largest global gradient norm; null leaves the gradient as it is."""
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After warm-up: constant, decay to 0 at the last step, or flat and then linear to 0 (wsd)."""
    decay_steps: PositiveInt | None = None
    """Length of the decay at the end; with schedule wsd only."""
    distributed: bool = False
    """Shard the optimizer state over the data-parallel ranks."""

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Self:
        if (self.decay_steps is not None) != (self.schedule == "wsd"):
            raise ValueError(
                f"decay_steps: {self.decay_steps} with schedule {self.schedule}; schedule wsd "
                "needs it and no other schedule reads it"
            )
        if self.distributed and self.name != "adamw":
            raise ValueError(
                f"distributed: {self.name} keeps no state that megatron-core could shard; use "
                "adamw, or distributed false"
            )
        unread = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[self.name]
        for field in unread:
            # The resolved config of a run spells the defaults out, and can be run again.
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}: optimizer {self.name} does not read it; remove it")
        return self

    def check_fits(self, steps: int) -> None:
        """Raise ValueError where warm-up and decay leave no place for each other in the run."""
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > steps:
            raise ValueError(
                f"optim.decay_steps: {self.decay_steps} and optim.warmup_steps "
                f"{self.warmup_steps} are together more than train.steps {steps}"
            )


class PolicyOptimConfig(OptimConfig):
    """The optimizer of a policy, and how often engines see what it did."""

    steps_per_batch: PositiveInt = 1
    """S: optimizer steps on one batch of S × prompts_per_step groups, each on its own share of
    them. Each makes a version; weights are published after the last."""
