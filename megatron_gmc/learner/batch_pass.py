"""The loss over one batch's micro-batches, and what a pass records of each trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gmc.config import ObjectiveConfig
from megatron_gmc.estimators import (
    Denominator,
    Estimator,
    TokenEstimator,
    TokenRatios,
    TrajectoryRatios,
    advantages,
    k3_sums,
    policy_loss,
    reference_k3,
    trajectory_means,
    trajectory_sums,
    weighted_sum,
)
from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.log_probs import TokenScores
from megatron_gmc.learner.micro_batch import MicroBatch
from megatron_gmc.learner.reference import ReferencePolicy

# Columns of the per-trajectory record that a pass fills, float64 [N, 7].
_LOG_RATIO, _WEIGHT, _K3, _CLIPPED, _MISMATCH, _REFERENCE, _ENTROPY = range(7)


@dataclass(frozen=True)
class Objective:
    """What is optimised: the estimator and how rewards and tokens enter."""

    estimator: Estimator
    settings: ObjectiveConfig
    temperature: float
    reference: ReferencePolicy | None = None
    """What `settings.kl` holds the policy to; None where that is None."""

    def __post_init__(self) -> None:
        assert (self.reference is None) == (self.settings.kl is None)
        assert self.settings.mismatch is None or not isinstance(self.estimator, TokenEstimator)

    @property
    def reads_proximal(self) -> bool:
        """Whether the policy at the start of a batch's steps matters, apart from the current."""
        return self.estimator.reads_proximal or self.settings.mismatch is not None

    @property
    def reads_every_token(self) -> bool:
        """Whether a group whose advantages are all 0 has a part in the gradient or in a weight."""
        penalised = self.settings.kl is not None or self.settings.entropy_coefficient != 0
        return penalised or self.estimator.scope == "batch"

    def advantages(self, batch: Batch) -> Tensor:
        """float32 [N], on the CPU."""
        kind = self.settings.advantage
        return advantages(batch.reward_N, batch.group_N, batch.groups, kind)


@dataclass(frozen=True, eq=False)
class KnownLogProbs:
    """Log-probs of the batch's loss tokens under policies that a step leaves alone, float32 [K]."""

    proximal_K: Tensor | None = None
    """At the start of the batch's steps; None where that is the current policy."""
    reference_K: Tensor | None = None


class BatchPass:
    """The loss over one batch's micro-batches, and what a pass records of each trajectory.

    The record is partial on each rank while a pass runs; `complete` adds it up. Trajectories that
    are in no micro-batch (`take_N`) keep their place in every denominator and a record of zeros.
    """

    def __init__(
        self,
        batch: Batch,
        objective: Objective,
        device: torch.device,
        *,
        take_N: Tensor,
        known: KnownLogProbs,
    ) -> None:
        self._objective = objective
        self._known = known
        self.take_N = take_N.to(device)
        self.group_N = batch.group_N.to(device)
        self.groups = batch.groups
        self._trajectory_K = batch.trajectory_of_loss_tokens().to(device)
        self.tokens_N = torch.bincount(self._trajectory_K, minlength=batch.trajectories)
        self.advantage_N = objective.advantages(batch).to(device)
        self.denominator = Denominator(batch.trajectories, int(self.tokens_N.sum()))
        self._behaviour_K = batch.behaviour_log_prob_S[batch.loss_mask_S].to(device)
        self._behaviour_N = self._sums(self._behaviour_K)
        self.record = torch.zeros(batch.trajectories, 7, dtype=torch.float64, device=device)
        self.log_prob_K = torch.zeros_like(self._behaviour_K)
        # Set between two passes: weights and coefficients of the batch's trajectories or tokens.
        self._fixed: tuple[Tensor, Tensor] | None = None

    # -- once complete -------------------------------------------------------------------------

    @property
    def ratios(self) -> TrajectoryRatios:
        """The ratios that weights are formed of, of every trajectory of the batch."""
        return self._ratios_of(torch.arange(len(self.group_N), device=self.group_N.device))

    @property
    def taken_ratios(self) -> TrajectoryRatios:
        """Those of the groups that went through the model."""
        return self._ratios_of(self.take_N.nonzero()[:, 0])

    @property
    def weight_N(self) -> Tensor:
        """A trajectory method's weights, a token method's means over the trajectory."""
        return self.record[:, _WEIGHT]

    @property
    def k3_sum_N(self) -> Tensor:
        return self.record[:, _K3]

    @property
    def clipped_N(self) -> Tensor:
        """Loss tokens without a weight although their ratio is not 0."""
        return self.record[:, _CLIPPED]

    def complete(self, learner: Learner) -> None:
        """Add up what the ranks have recorded."""
        learner.sum_over_batch(self.record)
        learner.sum_over_batch(self.log_prob_K)

    def term_metrics(self) -> dict[str, float]:
        """Of the terms beside the policy gradient, means over the batch's loss tokens."""
        settings, metrics = self._objective.settings, dict[str, float]()
        tokens = max(1, self.denominator.tokens)
        if settings.kl is not None:
            metrics["reference/k3_kl"] = float(self.record[:, _REFERENCE].sum()) / tokens
        if settings.entropy_coefficient != 0:
            metrics["entropy/mean"] = float(self.record[:, _ENTROPY].sum()) / tokens
        if settings.mismatch is not None:
            taken = int(self.tokens_N[self.take_N].sum())
            mismatch_N = self.record[self.take_N, _MISMATCH]
            metrics["mismatch/kl"] = -float(mismatch_N.sum()) / max(1, taken)
            if len(mismatch_N) >= 2:
                metrics["mismatch/log_ratio_sd"] = float(mismatch_N.std(correction=1))
        return metrics

    def not_finite(self) -> list[int]:
        """Trajectories, as indexes into the batch, whose part in the gradient is not finite.

        A weight that float32 cannot hold counts, unless its advantage is 0: then it takes no part.
        """
        ratio_N, weight_N = self.record[:, _LOG_RATIO], self.weight_N
        bad_N = ratio_N.isnan() | (ratio_N == torch.inf)
        bad_N |= self.record[:, _MISMATCH].isnan() | (self.record[:, _MISMATCH] == torch.inf)
        # A bad ratio spoils its whole group's mass: the other members' weights are not to blame.
        if not bad_N.any():
            too_large_N = weight_N.abs() * self.advantage_N.abs() > torch.finfo(torch.float32).max
            bad_N = weight_N.isnan() | (too_large_N & (self.advantage_N != 0))
            terms_N = self.record[:, _REFERENCE] + self.record[:, _ENTROPY]
            bad_N |= ~terms_N.isfinite() & (weight_N != 0)
        return [int(i) for i in bad_N.nonzero()]

    # -- in the passes -------------------------------------------------------------------------

    def score(self, micro_batch: MicroBatch, scores: TokenScores) -> Tensor:
        """First of two passes: record the ratios; no loss."""
        self._record_ratios(micro_batch, scores.log_prob_K)
        return scores.log_prob_K.new_zeros(())

    def fix_weights(self, learner: Learner) -> None:
        """Between two passes: complete what was scored and form the batch's weights from it."""
        estimator = self._objective.estimator
        if isinstance(estimator, TokenEstimator):
            learner.sum_over_batch(self.log_prob_K)
            tokens = TokenRatios(
                self.log_prob_K.double() - self._behaviour_K,
                self._trajectory_K,
                self.advantage_N,
                self._proximal_log_ratio(slice(None), self._behaviour_K),
            )
            self._fixed = estimator.weights(tokens), estimator.coefficients(tokens)
        else:
            self.complete(learner)
            ratios = self.ratios
            self._fixed = estimator.weights(ratios), estimator.coefficients(ratios)
        self.record.zero_()
        self.log_prob_K.zero_()

    def loss(self, micro_batch: MicroBatch, scores: TokenScores) -> Tensor:
        """This micro-batch's share of the batch's loss; records ratios and weights."""
        index_N, row_K = micro_batch.index_N, micro_batch.row_K
        log_ratio_K = self._record_ratios(micro_batch, scores.log_prob_K)
        if isinstance(self._objective.estimator, TokenEstimator):
            weight_K, coefficient_K = self._token_weights(micro_batch, log_ratio_K)
            weight_N = trajectory_means(weight_K, row_K, len(index_N))
            possible_K = log_ratio_K != -torch.inf
        else:
            weight_N, coefficient_N = self._trajectory_weights(index_N)
            factor_K = self._mismatch_factors(micro_batch, scores.log_prob_K)
            weight_K, coefficient_K = weight_N[row_K] * factor_K, coefficient_N[row_K] * factor_K
            possible_K = self.record[index_N, _LOG_RATIO][row_K] != -torch.inf
        self.record[index_N, _WEIGHT] = weight_N
        clipped_K = (weight_K == 0) & possible_K
        self.record[index_N, _CLIPPED] = trajectory_sums(clipped_K, row_K, len(index_N))
        return self._share(micro_batch, scores, weight_K, coefficient_K)

    def _share(
        self, micro_batch: MicroBatch, scores: TokenScores, weight_K: Tensor, coefficient_K: Tensor
    ) -> Tensor:
        """Policy gradient, KL and entropy, each term of a token with the token's weight."""
        settings, row_K = self._objective.settings, micro_batch.row_K
        tokens_N = self.tokens_N[micro_batch.index_N]
        over = (row_K, tokens_N, self.denominator, settings.aggregation)
        share = policy_loss(scores.log_prob_K, coefficient_K, *over)
        if settings.kl is not None:
            assert self._known.reference_K is not None
            reference_K = self._known.reference_K[micro_batch.place_K]
            # In float64: next to the reference its gradient is a difference of two near 1.
            k3_K = reference_k3(scores.log_prob_K.double(), reference_K)
            self._record(_REFERENCE, micro_batch, k3_K)
            share = share + settings.kl.coefficient * weighted_sum(k3_K, weight_K, *over)
        if settings.entropy_coefficient != 0:
            assert scores.entropy_K is not None
            self._record(_ENTROPY, micro_batch, scores.entropy_K)
            bonus = weighted_sum(scores.entropy_K, weight_K, *over)
            share = share - settings.entropy_coefficient * bonus
        return share.to(scores.log_prob_K.dtype)

    def _token_weights(self, micro_batch: MicroBatch, log_ratio_K: Tensor) -> tuple[Tensor, Tensor]:
        estimator = self._objective.estimator
        assert isinstance(estimator, TokenEstimator)
        if self._fixed is not None:
            weight_K, coefficient_K = (fixed[micro_batch.place_K] for fixed in self._fixed)
            return weight_K, coefficient_K
        proximal_K = self._proximal_log_ratio(micro_batch.place_K, micro_batch.behaviour_log_prob_K)
        advantage_N = self.advantage_N[micro_batch.index_N]
        tokens = TokenRatios(log_ratio_K, micro_batch.row_K, advantage_N, proximal_K)
        return estimator.weights(tokens), estimator.coefficients(tokens)

    def _trajectory_weights(self, index_N: Tensor) -> tuple[Tensor, Tensor]:
        estimator = self._objective.estimator
        assert not isinstance(estimator, TokenEstimator)
        if self._fixed is not None:
            weight_N, coefficient_N = (fixed[index_N] for fixed in self._fixed)
            return weight_N, coefficient_N
        ratios = self._ratios_of(index_N)
        return estimator.weights(ratios), estimator.coefficients(ratios)

    def _mismatch_factors(self, micro_batch: MicroBatch, log_prob_K: Tensor) -> Tensor:
        mismatch = self._objective.settings.mismatch
        if mismatch is None:
            return torch.ones_like(log_prob_K, dtype=torch.float64)
        proximal_K = self._proximal_log_ratio(micro_batch.place_K, micro_batch.behaviour_log_prob_K)
        if proximal_K is None:
            proximal_K = log_prob_K.detach().double() - micro_batch.behaviour_log_prob_K
        return mismatch.factors(proximal_K)

    def _record_ratios(self, micro_batch: MicroBatch, log_prob_K: Tensor) -> Tensor:
        """Current − behaviour log-prob of each token, float64; recorded for each trajectory.

        With a mismatch factor the ratios that are recorded are current − proximal instead.
        """
        place_K, behaviour_K = micro_batch.place_K, micro_batch.behaviour_log_prob_K
        log_prob_K = log_prob_K.detach()
        self.log_prob_K[place_K] = log_prob_K
        log_ratio_K = recorded_K = log_prob_K.double() - behaviour_K
        if self._objective.settings.mismatch is not None:
            proximal_K = self._proximal_log_ratio(place_K, behaviour_K)
            mismatch_K = log_ratio_K if proximal_K is None else proximal_K
            self._record(_MISMATCH, micro_batch, mismatch_K)
            # Where the mismatch's ratio is 0 so is its factor, whatever the steps changed.
            recorded_K = torch.where(mismatch_K == -torch.inf, 0.0, log_ratio_K - mismatch_K)
        self._record(_LOG_RATIO, micro_batch, recorded_K)
        index_N, row_K = micro_batch.index_N, micro_batch.row_K
        self.record[index_N, _K3] = k3_sums(recorded_K, row_K, len(index_N))
        return log_ratio_K

    def _record(self, column: int, micro_batch: MicroBatch, value_K: Tensor) -> None:
        index_N, row_K = micro_batch.index_N, micro_batch.row_K
        self.record[index_N, column] = trajectory_sums(value_K.detach(), row_K, len(index_N))

    def _proximal_log_ratio(self, place_K: Tensor | slice, behaviour_K: Tensor) -> Tensor | None:
        """Proximal − behaviour log-prob, float64; None where the proximal policy is the current."""
        if self._known.proximal_K is None:
            return None
        return self._known.proximal_K[place_K].double() - behaviour_K

    def _ratios_of(self, index_N: Tensor) -> TrajectoryRatios:
        present, dense_N = self.group_N[index_N].unique(return_inverse=True)
        return TrajectoryRatios(
            log_ratio_N=self.record[index_N, _LOG_RATIO],
            group_N=dense_N,
            advantage_N=self.advantage_N[index_N],
            tokens_N=self.tokens_N[index_N],
            groups=len(present),
            # What the ratios are taken to: with a mismatch factor, the proximal policy.
            behaviour_log_prob_N=self._behaviour_N[index_N] + self.record[index_N, _MISMATCH],
        )

    def _sums(self, value_K: Tensor) -> Tensor:
        return trajectory_sums(value_K, self._trajectory_K, len(self.group_N))
