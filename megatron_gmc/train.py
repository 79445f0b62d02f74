"""Asynchronous training with a group-mass capped policy gradient; the same program on every rank.

Rank 0's driver keeps the engine sampling at the lag that the scheduler guarantees. Each step takes
the P groups that are its turn, weights every trajectory by its group's mass and takes one optimizer
step; after the S steps of a batch the new version is published to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_gmc.checkpoints import Checkpoints
from megatron_gmc.config import Config
from megatron_gmc.errors import NonFiniteError
from megatron_gmc.failures import EXIT_REQUEUE
from megatron_gmc.lead import Lead
from megatron_gmc.learner import device_memory
from megatron_gmc.learner.batch import Batch, broadcast_batch
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.policy_step import Objective, policy_step, score_proximal
from megatron_gmc.opening import open_lead, open_learner, open_reference
from megatron_gmc.phases import Phases
from megatron_gmc.result import describe_method, finish_run, print_result
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.fleet import FleetDownError
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.setup_checks import check_model, check_reference, is_lead, this_rank
from megatron_gmc.signals import StopRequest
from megatron_gmc.watchdog import Watchdog
from megatron_gmc.weights import write_weights


def train(config: Config, *, resume: bool) -> int:
    """Start or resume a run, on every rank; returns the exit code."""
    began = time.time()
    torch.set_num_threads(1)
    folder = RunFolder(config.train.output_dir)
    if folder.finished():
        if is_lead():
            folder.check_same(config)
            print(f"nothing left to do: the run in {folder.path} has finished")
            print_result(folder)
        return 0
    shape = check_model(config.policy.path, config.mesh, weights=True)
    check_reference(config.objective, shape)
    stop = StopRequest()
    with stop.listening(this_rank()):
        lead = open_lead(config, shape, folder, resume) if is_lead() else None
        try:
            learner = open_learner(config, shape, folder, lead)
            stopped = _loop(config, learner, lead, folder, stop)
            if not stopped:
                write_weights(
                    learner.weights(), learner.mesh, config.policy.path, folder.huggingface
                )
        finally:
            if lead is not None:
                lead.close()
        # A launcher that sees one rank end may signal the others.
        dist.barrier()
    if lead is not None and not stopped:
        finish_run(folder, config, seconds=time.time() - began)
        print_result(folder)
    learner.mesh.close()
    return EXIT_REQUEUE if stopped else 0


def _loop(
    config: Config, learner: Learner, lead: Lead | None, folder: RunFolder, stop: StopRequest
) -> bool:
    """Train to the end; returns whether a request to stop came first."""
    reference = open_reference(config, learner)
    objective = Objective(config.estimator, config.objective, config.rollout.temperature, reference)
    phases, first = Phases(learner.version), learner.version
    watchdog = Watchdog(learner.mesh, phases, stop, config.train.stall_timeout_s)
    keep = config.train.keep_checkpoints
    down: FleetDownError | None = None
    with watchdog.watching(), Checkpoints(folder, learner, keep) as checkpoints:
        with phases.during("begin"):
            _publish(config, learner, lead, folder)
        if lead is not None:
            lead.say(f"{describe_method(config)}; {learner.mesh}; from version {first}")
            lead.evaluate(first, fresh=first == 0)
        size = config.optim.steps_per_batch
        for start in range(first, config.train.steps, size):
            steps = range(start, start + size)
            phases.begin_step(start)
            try:
                with checkpoints.completed_on(EngineError):
                    batches = _next_batches(lead, learner.mesh, steps, phases, stop)
            except FleetDownError as error:
                down = error
                break
            if batches is None:
                break
            _take_device(config, learner, lead)
            metrics = _steps(config, learner, lead, objective, batches, phases, checkpoints)
            with phases.during("publish"):
                _publish(config, learner, lead, folder)
            # Before the checkpoint: a crash right after it must not cost the step its record.
            if lead is not None:
                lead.evaluate(learner.version, fresh=True)
                lead.write(learner.version, {**metrics, **phases.take()})
            if _is_due(config, learner.version):
                _checkpoint(checkpoints, learner, lead, phases)
            else:
                with phases.during("checkpoint"):
                    checkpoints.poll()
        stopped = learner.version < config.train.steps
        if stopped and checkpoints.newest != learner.version:
            _checkpoint(checkpoints, learner, lead, phases)
        with phases.during("end"):
            checkpoints.finish()
    if down is not None:
        raise down
    if stopped and lead is not None:
        lead.say(f"stopped before step {learner.version} by {stop.reason}; --resume goes on there")
    return stopped


def _steps(
    config: Config,
    learner: Learner,
    lead: Lead | None,
    objective: Objective,
    batches: Sequence[Batch],
    phases: Phases,
    checkpoints: Checkpoints,
) -> dict[str, float]:
    """One optimizer step on each of a batch's shares; the last one's metrics are for the caller."""
    with phases.during("learn"):
        proximal = score_proximal(learner, batches, objective, config.learner)
    metrics: dict[str, float] = {}
    for batch, proximal_K in zip(batches, proximal, strict=True):
        step = learner.version
        if lead is not None and metrics:
            lead.write(step, {**metrics, **phases.take()})
        phases.begin_step(step)
        with phases.during("learn"), checkpoints.completed_on(NonFiniteError):
            try:
                metrics = policy_step(
                    learner,
                    batch,
                    objective,
                    config.learner,
                    proximal_K=proximal_K,
                    seen=lead.saw if lead else None,
                )
            except NonFiniteError as error:
                raise _reported(error, lead, step) from error
        if lead is not None:
            lead.save_trajectories(step)
    return metrics


def _next_batches(
    lead: Lead | None, mesh: Mesh, steps: range, phases: Phases, stop: StopRequest
) -> list[Batch] | None:
    """What `steps` consume, all of it there before the first; None where the run is to stop."""
    batches = []
    for step in steps:
        batch = _next_batch(lead, mesh, step, phases, stop)
        if batch is None:
            return None
        batches.append(batch)
    return batches


def _take_device(config: Config, learner: Learner, lead: Lead | None) -> None:
    """Bring the learner's memory back to a device that it shares with an engine."""
    if config.rollout.colocated:
        if lead is not None:
            lead.take_device()
        device_memory.take_back(learner)


def _next_batch(
    lead: Lead | None, mesh: Mesh, step: int, phases: Phases, stop: StopRequest
) -> Batch | None:
    """The batch of `step`, on every rank; None, on every rank, where the run is to stop.

    Raises EngineError, on every rank, where rank 0 gets no more samples; FleetDownError where
    that is for want of engines.
    """
    batch, failure = None, None
    with phases.during("wait"):
        try:
            batch = lead.next_batch(step, stop) if lead else None
        except EngineError as error:
            failure = error
    with phases.during("receive"):
        down = isinstance(failure, FleetDownError)
        turn = torch.tensor([batch is not None, failure is not None, down], device=mesh.device)
        dist.broadcast(turn, src=0)
        go, failed, down = turn.tolist()
        if failed:
            kind = FleetDownError if down else EngineError
            raise failure or kind("rank 0 gets no more samples; its own message says why")
        return broadcast_batch(batch, mesh) if go else None


def _publish(config: Config, learner: Learner, lead: Lead | None, folder: RunFolder) -> None:
    target = folder.weights / f"version_{learner.version:06d}"
    write_weights(learner.weights(), learner.mesh, config.policy.path, target)
    if config.rollout.colocated:
        # before the engine takes its memory back, which it does with these weights
        device_memory.lend(learner)
    if lead is not None:
        lead.publish(learner.version, target)


def _is_due(config: Config, version: int) -> bool:
    every = config.train.save_every
    return version == config.train.steps or (every is not None and version % every == 0)


def _checkpoint(
    checkpoints: Checkpoints, learner: Learner, lead: Lead | None, phases: Phases
) -> None:
    """Begin a checkpoint, and log what the learner waited for."""
    phases.take()
    with phases.during("drain"):
        state = lead.checkpoint_state(learner.version) if lead else None
    with phases.during("checkpoint"):
        checkpoints.begin(state)
    seconds = phases.take()
    if lead is not None:
        waited = {name: seconds[name] for name in ("time/drain_s", "time/checkpoint_s")}
        lead.write_aside(learner.version, waited)


def _reported(error: NonFiniteError, lead: Lead | None, step: int) -> NonFiniteError:
    text = f"step {step} was stopped before the optimizer: {error}"
    if lead is not None:
        text += f"; megatron-gmc inspect {lead.save_non_finite(error, step)} shows it"
    return NonFiniteError(text, error.trajectories)
