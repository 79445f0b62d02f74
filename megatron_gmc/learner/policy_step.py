"""One optimizer step of the policy: ratios, group masses, weights, gradient, update.

Weights may need whole groups, or the whole batch. Where each of those lies in one micro-batch they
are formed in the loss, from the training forward itself (single pass). Otherwise a forward without
gradient scores the batch first, and the weights of the whole batch are known before the weighted
pass (two pass). Both give the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gmc.config import LearnerConfig
from megatron_gmc.errors import NonFiniteError
from megatron_gmc.estimators import advantage_metrics, lag_metrics, step_diagnostics
from megatron_gmc.estimators.groups import Groups
from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.batch_pass import BatchPass, KnownLogProbs, Objective
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.log_probs import TokenScores
from megatron_gmc.learner.micro_batch import MicroBatch, micro_batches_of
from megatron_gmc.learner.plan import Plan, plan_micro_batches

__all__ = [
    "Objective",
    "StepRecord",
    "policy_gradient",
    "policy_step",
    "score_proximal",
]


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What a step found out about its batch, on the CPU, the same on every rank.

    NaN in the place of what belongs to a trajectory that did not go through the model.
    """

    log_prob_K: Tensor
    """float32: current log-prob of each loss token, in the batch's order."""
    log_ratio_N: Tensor
    """float64: ℓ, that the weight was formed of."""
    weight_N: Tensor
    """float64; a token method's mean over the trajectory's loss tokens."""
    advantage_N: Tensor
    """float32."""


Seen = Callable[[StepRecord], None]


def policy_step(
    learner: Learner,
    batch: Batch,
    objective: Objective,
    settings: LearnerConfig,
    *,
    proximal_K: Tensor | None = None,
    seen: Seen | None = None,
) -> dict[str, float]:
    """Take one optimizer step on `batch`; return its metrics, the same on every rank.

    `proximal_K` is what `score_proximal` found for this batch. `seen` is told what was found out
    about the batch before anything of it is checked, on the ranks that give one. A batch without
    one loss token leaves the optimizer untouched and says so in `step/skipped`; the version
    advances all the same, since lags count steps. Raises NonFiniteError, before the optimizer,
    naming the trajectories; ValueError where the batch does not fit the micro-batch limit.
    """
    lag_N = (learner.version - batch.oldest_version_N).to(learner.mesh.device)
    loss, batch_pass, two_pass = policy_gradient(
        learner, batch, objective, settings, proximal_K=proximal_K, seen=seen
    )
    skipped = batch_pass.denominator.tokens == 0
    norm = learner.skip() if skipped else learner.apply()
    return {
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": learner.learning_rate,
        "step/skipped": float(skipped),
        "step/two_pass": float(two_pass),
        "step/left_out_share": 1 - float(batch_pass.take_N.double().mean()),
        **_diagnostics(batch_pass, objective, lag_N),
        **batch_pass.term_metrics(),
    }


def score_proximal(
    learner: Learner, batches: Sequence[Batch], objective: Objective, settings: LearnerConfig
) -> list[Tensor | None]:
    """The proximal log-probs of each of the batches on which steps are about to be taken.

    Call it before the first of those steps, with the batches in their order; what belongs to a
    batch goes to its step as `proximal_K`. None where the proximal policy is the current one, as
    at the first step, and where the objective does not look at it. Collective; float32 [K] in the
    batch's order otherwise.
    """
    later = batches[1:] if objective.reads_proximal else ()
    scored = [_log_probs(learner, batch, objective, settings) for batch in later]
    return [None] * (len(batches) - len(scored)) + scored


def _diagnostics(batch_pass: BatchPass, objective: Objective, lag_N: Tensor) -> dict[str, float]:
    """Of the ratios that are known; lags and advantages are those of the whole batch."""
    take_N, metrics = batch_pass.take_N, dict[str, float]()
    if take_N.any():
        metrics = step_diagnostics(
            batch_pass.taken_ratios,
            batch_pass.weight_N[take_N],
            epsilon=objective.estimator.epsilon,
            k3_sum_N=batch_pass.k3_sum_N[take_N],
            clipped_N=batch_pass.clipped_N[take_N],
            lag_N=lag_N[take_N],
        )
    groups = Groups.of(batch_pass.group_N, batch_pass.groups)
    by_lag = {name: value for name, value in metrics.items() if not name.startswith("lag/")}
    return by_lag | lag_metrics(lag_N) | advantage_metrics(batch_pass.advantage_N, groups)


def policy_gradient(
    learner: Learner,
    batch: Batch,
    objective: Objective,
    settings: LearnerConfig,
    *,
    proximal_K: Tensor | None = None,
    seen: Seen | None = None,
) -> tuple[float, BatchPass, bool]:
    """Leave the batch's gradient in the model, checked; see `policy_step`.

    Returns the batch's loss, its record, and whether two passes were needed.
    """
    take_N, plan = _plan(learner, batch, objective, settings)
    micro_batches = micro_batches_of(batch, plan, learner.mesh)
    known = KnownLogProbs(
        proximal_K, _reference_log_probs(learner, batch, micro_batches, objective)
    )
    batch_pass = BatchPass(batch, objective, learner.mesh.device, take_N=take_N, known=known)
    temperature = objective.temperature
    if plan.two_pass:
        learner.run(micro_batches, batch_pass.score, temperature=temperature, forward_only=True)
        batch_pass.fix_weights(learner)
    loss = learner.run(
        micro_batches,
        batch_pass.loss,
        temperature=temperature,
        entropy=objective.settings.entropy_coefficient != 0,
    )
    batch_pass.complete(learner)
    if seen is not None:
        seen(_record_of(batch, batch_pass))
    bad = batch_pass.not_finite()
    if bad or not math.isfinite(loss):
        ids = ", ".join(str(int(batch.id_N[i])) for i in bad) or "none alone"
        raise NonFiniteError(f"loss {loss}; trajectories that are not finite: {ids}", bad)
    return loss, batch_pass, plan.two_pass


def _record_of(batch: Batch, batch_pass: BatchPass) -> StepRecord:
    left_out_N = ~batch_pass.take_N
    left_out_K = left_out_N[batch.trajectory_of_loss_tokens().to(left_out_N.device)]
    return StepRecord(
        batch_pass.log_prob_K.masked_fill(left_out_K, math.nan).cpu(),
        batch_pass.ratios.log_ratio_N.masked_fill(left_out_N, math.nan).cpu(),
        batch_pass.weight_N.masked_fill(left_out_N, math.nan).cpu(),
        batch_pass.advantage_N.cpu(),
    )


def _plan(
    learner: Learner, batch: Batch, objective: Objective, settings: LearnerConfig
) -> tuple[Tensor, Plan]:
    """Which trajectories go through the model, bool [N], and in which micro-batches."""
    take_N = torch.ones(batch.trajectories, dtype=torch.bool)
    if settings.skip_zero_advantage and not objective.reads_every_token:
        groups = Groups.of(batch.group_N, batch.groups)
        take_N = groups.spread(groups.max(objective.advantages(batch).abs()) != 0)
    plan = plan_micro_batches(
        batch.length_N,
        batch.group_N,
        limits=learner.limits,
        token_limit=settings.micro_batch_tokens,
        scope=objective.estimator.scope,
        passes=settings.passes,
        take_N=take_N,
    )
    return take_N, plan


def _reference_log_probs(
    learner: Learner, batch: Batch, micro_batches: Sequence[MicroBatch], objective: Objective
) -> Tensor | None:
    if objective.reference is None:
        return None
    with objective.reference.in_place(learner):
        return _scored(learner, batch, micro_batches, objective.temperature)


def _log_probs(
    learner: Learner, batch: Batch, objective: Objective, settings: LearnerConfig
) -> Tensor:
    _, plan = _plan(learner, batch, objective, settings)
    micro_batches = micro_batches_of(batch, plan, learner.mesh)
    return _scored(learner, batch, micro_batches, objective.temperature)


def _scored(
    learner: Learner, batch: Batch, micro_batches: Sequence[MicroBatch], temperature: float
) -> Tensor:
    """Log-probs of the batch's loss tokens under the weights in the model, float32 [K].

    In the batch's order, the same on every rank; 0 for tokens that are in no micro-batch.
    """
    log_prob_K = torch.zeros(int(batch.loss_mask_S.sum()), device=learner.mesh.device)

    def record(micro_batch: MicroBatch, scores: TokenScores) -> Tensor:
        log_prob_K[micro_batch.place_K] = scores.log_prob_K
        return scores.log_prob_K.new_zeros(())

    learner.run(micro_batches, record, temperature=temperature, forward_only=True)
    return learner.sum_over_batch(log_prob_K)
