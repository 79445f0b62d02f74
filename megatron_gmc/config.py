"""The typed configuration tree of a training run, and how it is read from YAML and overridden.

A config is checked whole before anything is built. Unknown keys, wrong types and impossible
values are refused with the field, the value and what is allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from megatron_gmc.engine_config import FleetConfig, SglangConfig, WeightsConfig
from megatron_gmc.estimators import (
    GMC,
    AdvantageKind,
    AggregationKind,
    AnyEstimator,
    AnyMismatch,
    TokenEstimator,
)
from megatron_gmc.lag_config import LagConfig
from megatron_gmc.optim_config import OptimConfig, PolicyOptimConfig
from megatron_gmc.rollout.scheduler import LagScheduler
from megatron_gmc.section import NonNegativeFloat, PositiveFloat, Section
from megatron_gmc.tasks.config import JsonlSource, TaskConfig


class WandbConfig(Section):
    """Where Weights & Biases keeps the run's metrics; the key comes from its own login."""

    project: str
    mode: Literal["online", "offline"] = "online"
    """offline writes to the run's folder alone, for `wandb sync` later."""


class TrainConfig(Section):
    """The run as a whole."""

    output_dir: Path
    """Folder of the run; it must not hold another run."""
    steps: PositiveInt
    """Optimizer steps, which is also the last version."""
    prompts_per_step: PositiveInt
    """P: prompts (groups) that one optimizer step consumes."""
    seed: NonNegativeInt = 0
    """Seeds the prompts' order and the sampling."""
    save_every: PositiveInt | None = None
    """Write a checkpoint every so many steps; one is always written at the end."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay on disk."""
    resume: Literal["never", "auto", "must"] = "never"
    """auto goes on where the folder holds a run and starts one where it does not; must, which
    --resume stands for, needs a run to go on with; never refuses a folder that holds one."""
    stall_timeout_s: PositiveFloat = 1800.0
    """A rank that does not get on for so long ends the run, by name. Waiting for samples does not
    count; the longest forward and backward pass, publishing and checkpoint must fit."""
    save_trajectories: PositiveInt | None = None
    """Write the consumed groups of every so many steps to trajectories/, as Parquet."""
    wandb: WandbConfig | None = None
    """Send the metrics to Weights & Biases as well."""


class PolicyConfig(Section):
    """The model that is trained."""

    path: Path
    """Hugging Face folder with config.json, tokenizer and safetensors."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the learner computes in and publishes. With bfloat16 the optimizer keeps weights of its
    own in float32, and log-probs, their sums and the gradient's reduction stay in float32."""


class MeshConfig(Section):
    """How the ranks are arranged; data parallelism takes what the other axes leave."""

    tensor: PositiveInt = 1
    """Ranks that share every layer's weights."""
    pipeline: PositiveInt = 1
    """Stages that the layers are spread over."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers on each stage, run in turns (interleaved 1F1B)."""
    context: PositiveInt = 1
    """Ranks that share every sequence's tokens."""
    expert: PositiveInt = 1
    """Ranks that a mixture's experts are spread over; they lie inside context × data."""
    sequence_parallel: bool = False
    """Share the tokens between tensor ranks where they would all hold the same."""


class RolloutConfig(Section):
    """Sampling: which engine, how many samples, at which lag."""

    engine: Literal["embedded", "sglang"] = "embedded"
    sglang: SglangConfig | None = None
    """With engine sglang: the servers."""
    fleet: FleetConfig = FleetConfig()
    group_size: PositiveInt
    """G: trajectories of one prompt."""
    max_response_tokens: PositiveInt
    lag: LagConfig
    temperature: float = 1.0
    """Divides the logits on both sides of every ratio."""
    top_p: float = 1.0
    """Only 1: see the error that any other value gives."""
    top_k: int = 0
    """Only 0 (off), for the same reason as top_p."""
    max_attempts: PositiveInt = 4
    """How often a refused sample is sampled again before the run stops."""
    start_timeout_s: PositiveFloat = 120.0
    request_timeout_s: PositiveFloat = 600.0

    @property
    def colocated(self) -> bool:
        """Whether learner and engine take turns with one device."""
        return self.sglang is not None and self.sglang.placement == "colocated"

    @model_validator(mode="after")
    def _engine_has_its_section(self) -> Self:
        if self.engine == "sglang" and self.sglang is None:
            raise ValueError(
                "sglang: engine sglang needs it, as in 'sglang: {servers: 2}', or "
                "'sglang: {addresses: [http://host:port]}' for servers that run"
            )
        if self.engine != "sglang":
            for field, unread in (("sglang", self.sglang), ("fleet", self.fleet)):
                if unread not in (None, FleetConfig()):
                    raise ValueError(f"{field}: engine {self.engine} does not read it; remove it")
        return self

    @model_validator(mode="after")
    def _distribution(self) -> Self:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature: {self.temperature} has no log-probs to weight with; training needs "
                "a temperature above 0 (1.0 is the usual one)"
            )
        if self.top_p != 1:
            raise ValueError(
                f"top_p: {self.top_p} samples from a truncated distribution, under which the mean "
                "ratio is the kept mass and not 1; train with top_p 1.0"
            )
        if self.top_k != 0:
            raise ValueError(
                f"top_k: {self.top_k} samples from a truncated distribution, under which the mean "
                "ratio is the kept mass and not 1; train with top_k 0"
            )
        return self


class KLConfig(Section):
    """What holds the policy to a reference: coefficient · w · k3 of every loss token."""

    coefficient: PositiveFloat
    """Per token term, under the same aggregation as the policy gradient."""
    reference: Path | None = None
    """Hugging Face folder of the reference's weights, null for those of policy.path."""


class ObjectiveConfig(Section):
    """How rewards become advantages, how token terms are added up, and what else is optimised."""

    advantage: AdvantageKind = "leave_one_out"
    aggregation: AggregationKind = "token_sum"
    kl: KLConfig | None = None
    """A reference policy to stay near; null for none."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Of the bonus coefficient · w · entropy of every loss token's distribution; 0 for none."""
    mismatch: Annotated[AnyMismatch, Field(discriminator="name")] | None = None
    """A token factor for engine against learner, with trajectory methods: truncate or mask."""


class LearnerConfig(Section):
    """How a batch is cut into forward passes; no choice here changes the gradient."""

    micro_batch_tokens: PositiveInt = 16384
    """Tokens, padding included, that one forward holds."""
    passes: Literal["auto", "single_pass", "two_pass"] = "auto"
    """single_pass forms weights from the training forward and needs whole groups in a
    micro-batch; two_pass scores the batch first; auto takes single_pass where it can."""
    skip_zero_advantage: bool = True
    """Leave groups whose advantages are all 0 out of forward and backward. They keep their place
    in every denominator. Without effect where such a group has a part in the gradient all the
    same: with a KL term, an entropy bonus, or a method that looks at the whole batch."""


class EvaluationConfig(Section):
    """Held-out accuracy, sampled by the same engines at the run's temperature."""

    every: PositiveInt = 10
    """Evaluate every so many versions, and always the first and the last one."""
    prompts: PositiveInt | None = None
    """How many held-out prompts the curve uses, null for all; the first and the last version are
    evaluated on all."""


def _gmc_unless_named(value: object) -> object:
    """So that `--estimator.epsilon 0.1` needs no name beside it."""
    return {"name": "gmc", **value} if isinstance(value, dict) else value


class Config(Section):
    """A training run: `megatron-gmc train`."""

    train: TrainConfig
    policy: PolicyConfig
    mesh: MeshConfig = MeshConfig()
    task: TaskConfig
    rollout: RolloutConfig
    weights: WeightsConfig = WeightsConfig()
    estimator: Annotated[
        AnyEstimator, Field(discriminator="name"), BeforeValidator(_gmc_unless_named)
    ] = GMC()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: PolicyOptimConfig
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _across_sections(self) -> Self:
        if self.rollout.group_size == 1 and self.objective.advantage != "none":
            raise ValueError(
                f"rollout.group_size: 1 with objective.advantage {self.objective.advantage}, which "
                "needs a second trajectory to compare with; use group_size 2 or more"
            )
        if self.objective.mismatch is not None and isinstance(self.estimator, TokenEstimator):
            raise ValueError(
                f"objective.mismatch: {self.objective.mismatch.name} is a factor for the weights "
                f"of whole trajectories, and estimator {self.estimator.name} weights each token by "
                "its own ratio; take it away, or use a trajectory method such as gmc"
            )
        self.optim.check_fits(self.train.steps)
        self._check_batches()
        self._check_engines()
        return self

    def _check_engines(self) -> None:
        """Raise ValueError where engine, weights and lag do not go together."""
        sglang = self.rollout.sglang
        if sglang is None and self.weights != WeightsConfig():
            raise ValueError("weights: engine embedded reads folders and nothing of it; remove it")
        if not self.rollout.colocated:
            return
        if self.rollout.lag != LagConfig(exact=0):
            raise ValueError(
                "rollout.lag: with rollout.sglang.placement colocated, learner and engine take "
                "turns, so that a step learns from its own version; use {exact: 0}"
            )
        if self.weights.in_flight not in (None, "wait"):
            raise ValueError(
                f"weights.in_flight: {self.weights.in_flight} with rollout.sglang.placement "
                "colocated, where nothing is under way when weights change; use wait"
            )

    def _check_batches(self) -> None:
        """Raise ValueError where a run of these steps, batches and lag cannot be."""
        size = self.optim.steps_per_batch
        held_out = self.task.held_out or self.task.held_out_source is not None
        for field, value, why in (
            ("train.steps", self.train.steps, "a run ends with a whole batch"),
            ("train.save_every", self.train.save_every, "checkpoints are made between batches"),
            (
                "evaluation.every",
                self.evaluation.every if held_out else None,
                "engines get weights between batches",
            ),
        ):
            if value is not None and value % size:
                raise ValueError(
                    f"{field}: {value} is no multiple of optim.steps_per_batch {size}, and {why}; "
                    f"use {value + size - value % size}"
                )
        try:
            self.scheduler()
        except ValueError as error:
            raise ValueError(f"rollout.lag: {error}") from None

    def scheduler(self) -> LagScheduler:
        """What keeps this run's lag."""
        return LagScheduler(
            self.rollout.lag.build(self.optim.steps_per_batch),
            self.train.prompts_per_step,
            self.train.steps,
            self.optim.steps_per_batch,
        )


class DemonstrationsConfig(Section):
    """JSONL of prompts and the responses to imitate."""

    path: Path
    prompt_field: str = "prompt"
    messages_field: str = "messages"
    """Read instead of prompt_field where a line has it: a chat, put through the template."""
    response_field: str = "response"
    """Without the end-of-sequence token, which is appended."""

    def source(self) -> JsonlSource:
        """The file as a source of records whose answers are the responses."""
        return JsonlSource(
            path=self.path,
            prompt_field=self.prompt_field,
            messages_field=self.messages_field,
            answer_field=self.response_field,
        )


class SftTrainConfig(Section):
    """A supervised run as a whole."""

    output_dir: Path
    steps: PositiveInt
    batch_size: PositiveInt
    """Demonstrations of one optimizer step, over all ranks."""
    seed: NonNegativeInt = 0
    """Seeds the order of the demonstrations and, with initial: random, the weights."""


class SftPolicyConfig(PolicyConfig):
    """The model that is fine-tuned."""

    initial: Literal["random", "pretrained"] = "pretrained"
    """random draws the weights from the seed and needs config.json and tokenizer alone."""


class SftConfig(Section):
    """A supervised fine-tuning run: `megatron-gmc sft`."""

    train: SftTrainConfig
    policy: SftPolicyConfig
    mesh: MeshConfig = MeshConfig()
    data: DemonstrationsConfig
    optim: OptimConfig
    learner: LearnerConfig = LearnerConfig()

    @model_validator(mode="after")
    def _across_sections(self) -> Self:
        self.optim.check_fits(self.train.steps)
        return self
