"""One optimizer step of the policy: ratios, group masses, weights, gradient, update.

Weights may need whole groups, or the whole batch. Where each of those lies in one micro-batch they
are formed in the loss, from the training forward itself (single pass). Otherwise a forward without
gradient scores the batch first, and the weights of the whole batch are known before the weighted
pass (two pass). Both give the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gmc.config import LearnerConfig, ObjectiveConfig
from megatron_gmc.errors import NonFiniteError
from megatron_gmc.estimators import (
    Denominator,
    Estimator,
    TokenEstimator,
    TokenRatios,
    TrajectoryRatios,
    advantages,
    k3_sums,
    policy_loss,
    step_diagnostics,
    trajectory_means,
    trajectory_sums,
)
from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.micro_batch import MicroBatch, micro_batches_of
from megatron_gmc.learner.plan import plan_micro_batches

# Columns of the per-trajectory record that a pass fills, float64 [N, 4].
_LOG_RATIO, _WEIGHT, _K3, _CLIPPED = range(4)


@dataclass(frozen=True)
class Objective:
    """What is optimised: the estimator and how rewards and tokens enter."""

    estimator: Estimator
    settings: ObjectiveConfig
    temperature: float


@dataclass(frozen=True)
class StepRecord:
    """What the learner made of a batch, for the record; on the CPU, in the batch's order."""

    log_prob_K: Tensor  # float32, current log-prob of each loss token
    log_ratio_N: Tensor  # float64
    weight_N: Tensor  # float64; a token method's mean over the trajectory
    advantage_N: Tensor


class BatchPass:
    """The loss over one batch's micro-batches, and what a pass records of each trajectory.

    The record is partial on each rank while a pass runs; `Learner.sum_over_batch` completes it.
    """

    def __init__(self, batch: Batch, objective: Objective, device: torch.device) -> None:
        self._estimator = objective.estimator
        self._aggregation = objective.settings.aggregation
        self.group_N = batch.group_N.to(device)
        self.groups = batch.groups
        self._trajectory_K = batch.trajectory_of_loss_tokens().to(device)
        self.tokens_N = torch.bincount(self._trajectory_K, minlength=batch.trajectories)
        self.advantage_N = advantages(
            batch.reward_N, batch.group_N, batch.groups, objective.settings.advantage
        ).to(device)
        self.denominator = Denominator(batch.trajectories, int(self.tokens_N.sum()))
        self._behaviour_log_prob_N = trajectory_sums(
            batch.behaviour_log_prob_S[batch.loss_mask_S].to(device),
            self._trajectory_K,
            batch.trajectories,
        )
        self.record = torch.zeros(batch.trajectories, 4, dtype=torch.float64, device=device)
        self.log_prob_K = torch.zeros(len(self._trajectory_K), device=device)
        # Filled by the first of two passes, for a token method that looks at the whole batch.
        self._log_ratio_K = torch.zeros(len(self._trajectory_K), dtype=torch.float64, device=device)
        # Set between two passes: weights and coefficients of the batch's trajectories or tokens.
        self._fixed: tuple[Tensor, Tensor] | None = None

    @property
    def ratios(self) -> TrajectoryRatios:
        """The whole batch's ratios, once its record is complete."""
        return TrajectoryRatios(
            log_ratio_N=self.record[:, _LOG_RATIO],
            group_N=self.group_N,
            advantage_N=self.advantage_N,
            tokens_N=self.tokens_N,
            groups=self.groups,
            behaviour_log_prob_N=self._behaviour_log_prob_N,
        )

    @property
    def weight_N(self) -> Tensor:
        """The weights, once the record is complete; a token method's mean over the trajectory."""
        return self.record[:, _WEIGHT]

    @property
    def k3_sum_N(self) -> Tensor:
        return self.record[:, _K3]

    @property
    def clipped_N(self) -> Tensor:
        """Loss tokens without a weight although their ratio is not 0, once complete."""
        return self.record[:, _CLIPPED]

    def score(self, micro_batch: MicroBatch, log_prob_K: Tensor) -> Tensor:
        """First of two passes: record the ratios; no loss."""
        log_ratio_K = self._record_ratios(micro_batch, log_prob_K)
        self._log_ratio_K[micro_batch.place_K] = log_ratio_K.double()
        return log_prob_K.new_zeros(())

    def fix_weights(self, learner: Learner) -> None:
        """Between two passes: complete what was scored and form the batch's weights from it."""
        if isinstance(self._estimator, TokenEstimator):
            learner.sum_over_batch(self._log_ratio_K)
            tokens = TokenRatios(self._log_ratio_K, self._trajectory_K, self.advantage_N)
            self._fixed = self._estimator.weights(tokens), self._estimator.coefficients(tokens)
        else:
            learner.sum_over_batch(self.record)
            ratios = self.ratios
            self._fixed = self._estimator.weights(ratios), self._estimator.coefficients(ratios)
        self.record.zero_()
        self.log_prob_K.zero_()

    def loss(self, micro_batch: MicroBatch, log_prob_K: Tensor) -> Tensor:
        """This micro-batch's share of the batch's loss; records ratios and weights."""
        log_ratio_K = self._record_ratios(micro_batch, log_prob_K)
        index_N, row_K = micro_batch.index_N, micro_batch.row_K
        if isinstance(self._estimator, TokenEstimator):
            if self._fixed is not None:
                weight_K, coefficient_K = (fixed[micro_batch.place_K] for fixed in self._fixed)
            else:
                tokens = TokenRatios(log_ratio_K, row_K, self.advantage_N[index_N])
                weight_K = self._estimator.weights(tokens)
                coefficient_K = self._estimator.coefficients(tokens)
            weight_N = trajectory_means(weight_K, row_K, len(index_N))
        else:
            if self._fixed is not None:
                weight_N, coefficient_N = (fixed[index_N] for fixed in self._fixed)
            else:
                ratios = self._ratios_of(index_N)
                weight_N = self._estimator.weights(ratios)
                coefficient_N = self._estimator.coefficients(ratios)
            weight_K, coefficient_K = weight_N[row_K], coefficient_N[row_K]
            log_ratio_K = self.record[index_N, _LOG_RATIO][row_K]
        clipped_K = (weight_K == 0) & (log_ratio_K != -torch.inf)
        self.record[index_N, _WEIGHT] = weight_N
        self.record[index_N, _CLIPPED] = trajectory_sums(clipped_K, row_K, len(index_N))
        return policy_loss(
            log_prob_K,
            coefficient_K,
            row_K,
            self.tokens_N[index_N],
            self.denominator,
            self._aggregation,
        )

    def step_record(self) -> StepRecord:
        """For the record, once a pass is complete."""
        return StepRecord(
            self.log_prob_K.cpu(),
            self.record[:, _LOG_RATIO].cpu(),
            self.weight_N.cpu(),
            self.advantage_N.cpu(),
        )

    def not_finite(self) -> list[int]:
        """Trajectories, as indexes into the batch, whose part in the gradient is not finite.

        A weight that float32 cannot hold counts, unless its advantage is 0: then it takes no part.
        """
        ratio_N, weight_N = self.record[:, _LOG_RATIO], self.weight_N
        bad_N = ratio_N.isnan() | (ratio_N == torch.inf)
        # A bad ratio spoils its whole group's mass: the other members' weights are not to blame.
        if not bad_N.any():
            too_large_N = weight_N.abs() * self.advantage_N.abs() > torch.finfo(torch.float32).max
            bad_N = weight_N.isnan() | (too_large_N & (self.advantage_N != 0))
        return [int(i) for i in bad_N.nonzero()]

    def _record_ratios(self, micro_batch: MicroBatch, log_prob_K: Tensor) -> Tensor:
        self.log_prob_K[micro_batch.place_K] = log_prob_K.detach()
        log_ratio_K = log_prob_K.detach() - micro_batch.behaviour_log_prob_K
        index_N, row_K = micro_batch.index_N, micro_batch.row_K
        self.record[index_N, _LOG_RATIO] = trajectory_sums(log_ratio_K, row_K, len(index_N))
        self.record[index_N, _K3] = k3_sums(log_ratio_K, row_K, len(index_N))
        return log_ratio_K

    def _ratios_of(self, index_N: Tensor) -> TrajectoryRatios:
        present, dense_N = self.group_N[index_N].unique(return_inverse=True)
        return TrajectoryRatios(
            log_ratio_N=self.record[index_N, _LOG_RATIO],
            group_N=dense_N,
            advantage_N=self.advantage_N[index_N],
            tokens_N=self.tokens_N[index_N],
            groups=len(present),
            behaviour_log_prob_N=self._behaviour_log_prob_N[index_N],
        )


def policy_step(
    learner: Learner,
    batch: Batch,
    objective: Objective,
    settings: LearnerConfig,
    seen: Callable[[StepRecord], None] | None = None,
) -> dict[str, float]:
    """Take one optimizer step on `batch`; return its metrics, the same on every rank.

    A batch without one loss token leaves the optimizer untouched and says so in `step/skipped`;
    the version advances all the same, since lags count steps. Raises NonFiniteError, before the
    optimizer, naming the trajectories; ValueError where the batch does not fit the micro-batch
    limit. `seen` is called before the optimizer, and also where the step is not finite.
    """
    lag_N = (learner.version - batch.oldest_version_N).to(learner.mesh.device)
    loss, batch_pass, two_pass = policy_gradient(learner, batch, objective, settings, seen)
    skipped = batch_pass.denominator.tokens == 0
    norm = learner.skip() if skipped else learner.apply()
    return {
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": learner.learning_rate,
        "step/skipped": float(skipped),
        "step/two_pass": float(two_pass),
        **step_diagnostics(
            batch_pass.ratios,
            batch_pass.weight_N,
            epsilon=objective.estimator.epsilon,
            k3_sum_N=batch_pass.k3_sum_N,
            clipped_N=batch_pass.clipped_N,
            lag_N=lag_N,
        ),
    }


def policy_gradient(
    learner: Learner,
    batch: Batch,
    objective: Objective,
    settings: LearnerConfig,
    seen: Callable[[StepRecord], None] | None = None,
) -> tuple[float, BatchPass, bool]:
    """Leave the batch's gradient in the model, checked; see `policy_step`.

    Returns the batch's loss, its record, and whether two passes were needed.
    """
    plan = plan_micro_batches(
        batch.length_N,
        batch.group_N,
        data_size=learner.mesh.data_size,
        token_limit=settings.micro_batch_tokens,
        scope=objective.estimator.scope,
        passes=settings.passes,
    )
    micro_batches = micro_batches_of(batch, plan, learner.mesh)
    batch_pass = BatchPass(batch, objective, learner.mesh.device)
    temperature = objective.temperature
    if plan.two_pass:
        learner.run(micro_batches, batch_pass.score, temperature=temperature, forward_only=True)
        batch_pass.fix_weights(learner)
    loss = learner.run(micro_batches, batch_pass.loss, temperature=temperature)
    learner.sum_over_batch(batch_pass.record)
    learner.sum_over_batch(batch_pass.log_prob_K)
    if seen is not None:
        seen(batch_pass.step_record())
    bad = batch_pass.not_finite()
    if bad or not math.isfinite(loss):
        ids = ", ".join(str(int(batch.id_N[i])) for i in bad) or "none alone"
        raise NonFiniteError(f"loss {loss}; trajectories that are not finite: {ids}", bad)
    return loss, batch_pass, plan.two_pass
