"""Asynchronous training with a group-mass capped policy gradient; the same program on every rank.

Rank 0's driver keeps the engine sampling at the lag that the scheduler guarantees. Each step takes
the P groups that are its turn, weights every trajectory by its group's mass and takes one optimizer
step; after the S steps of a batch the new version is published to the engine.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from megatron_gmc.config import Config
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.errors import NonFiniteError, blamed_on
from megatron_gmc.lead import Lead
from megatron_gmc.learner import device_memory
from megatron_gmc.learner.batch import broadcast_batch
from megatron_gmc.learner.checkpoint import committed_folder, load_learner, save_learner
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model_weights import load_weights
from megatron_gmc.learner.policy_step import Objective, policy_step
from megatron_gmc.phases import Phases
from megatron_gmc.result import describe_method, finish_run, print_result
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.setup_checks import check_model, check_task, is_lead
from megatron_gmc.storage import writing
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
    checkpoint = folder.last_checkpoint() if resume else None
    lead = _open_lead(config, shape, folder, checkpoint, resume) if is_lead() else None
    try:
        learner = _open_learner(config, shape, checkpoint)
        _loop(config, learner, lead, folder)
        write_weights(learner.weights(), learner.mesh, config.policy.path, folder.huggingface)
    finally:
        if lead is not None:
            lead.close()
    if lead is not None:
        finish_run(folder, config, seconds=time.time() - began)
        print_result(folder)
    learner.mesh.close()
    return 0


def _loop(config: Config, learner: Learner, lead: Lead | None, folder: RunFolder) -> None:
    objective = Objective(config.estimator, config.objective, config.rollout.temperature)
    phases, first = Phases(), learner.version
    _publish(config, learner, lead, folder)
    if lead is not None:
        lead.say(f"{describe_method(config)}; {learner.mesh}; from version {first}")
        lead.evaluate(first, fresh=first == 0)
    size = config.optim.steps_per_batch
    for start in range(first, config.train.steps, size):
        steps = range(start, start + size)
        with phases.during("wait"):
            # All of a batch is there before its first step.
            batches = [
                broadcast_batch(lead.next_batch(step) if lead else None, learner.mesh)
                for step in steps
            ]
        if config.rollout.colocated:
            if lead is not None:
                lead.take_device()
            device_memory.take_back(learner)
        for step, batch in zip(steps, batches, strict=True):
            with phases.during("learn"):
                try:
                    metrics = policy_step(learner, batch, objective, config.learner)
                except NonFiniteError as error:
                    raise _reported(error, lead, step) from error
            if step == steps[-1]:
                with phases.during("publish"):
                    _publish(config, learner, lead, folder)
                if lead is not None:
                    lead.evaluate(learner.version, fresh=True)
            # Before the checkpoint: a crash right after it must not cost this step its record.
            if lead is not None:
                lead.write(learner.version, {**metrics, **phases.take()})
        if _is_due(config, learner.version):
            with phases.during("checkpoint"):
                _save(config, learner, lead, folder)
            seconds = phases.take()["time/checkpoint_s"]
            if lead is not None:
                lead.write_aside(learner.version, {"time/checkpoint_s": seconds})


def _open_lead(
    config: Config, shape: ModelShape, folder: RunFolder, checkpoint: Path | None, resume: bool
) -> Lead:
    """Check everything, claim the run's folder and start the engine."""
    task = check_task(config, shape)
    folder.open(config, resume=resume)
    lead = Lead(config, shape, task, folder, checkpoint)
    lead.start()
    return lead


def _open_learner(config: Config, shape: ModelShape, checkpoint: Path | None) -> Learner:
    mesh = Mesh.create(config.mesh.tensor, config.mesh.pipeline)
    learner = Learner(shape, mesh, config.optim, config.train.steps)
    if checkpoint is not None:
        with blamed_on("--resume"):
            load_learner(checkpoint / "learner", learner)
        return learner
    with blamed_on("policy.path"):
        load_weights(learner.module, shape, mesh, stream_tensors(config.policy.path))
    return learner


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


def _save(config: Config, learner: Learner, lead: Lead | None, folder: RunFolder) -> None:
    target = folder.checkpoints / f"step_{learner.version:06d}"
    with writing(target), committed_folder(target, learner.mesh) as partial:
        save_learner(partial / "learner", learner)
        if lead is not None:
            lead.save(partial, learner.version)
    if lead is not None:
        folder.drop_old_checkpoints(config.train.keep_checkpoints)


def _reported(error: NonFiniteError, lead: Lead | None, step: int) -> NonFiniteError:
    text = f"step {step} was stopped before the optimizer: {error}"
    if lead is not None:
        text += f"; the trajectories are in {lead.save_non_finite(error, step)}"
    return NonFiniteError(text, error.trajectories)
