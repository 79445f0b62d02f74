"""How a run begins: what it goes on from, rank 0's side of it, and the learner."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_gmc.checkpoints import last_good, resume_from
from megatron_gmc.config import Config
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.errors import blamed_on
from megatron_gmc.lead import NO_CHECKPOINT, Lead
from megatron_gmc.learner.checkpoint import load_learner
from megatron_gmc.learner.learner import DTYPES, Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.reference import ReferencePolicy
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.setup_checks import check_task


def open_lead(config: Config, shape: ModelShape, folder: RunFolder, resume: bool) -> Lead:
    """Check everything, claim the run's folder, choose the checkpoint and start the engine."""
    task = check_task(config, shape)
    goes_on = resume or config.train.resume == "must"
    if config.train.resume == "auto":
        goes_on = goes_on or folder.holds_a_run()
    folder.open(config, resume=goes_on)
    with blamed_on("train.output_dir"):
        chosen, faults = last_good(folder) if goes_on else (None, [])
    lead = Lead(config, shape, task, folder, chosen)
    if goes_on:
        for line in resume_from(folder, chosen, faults):
            lead.say(line)
    lead.start()
    return lead


def open_learner(
    config: Config, shape: ModelShape, folder: RunFolder, lead: Lead | None
) -> Learner:
    """Join the mesh and build the learner, at the version that rank 0 chose; collective."""
    mesh = Mesh.of(config.mesh)
    dtype = DTYPES[config.policy.dtype]
    learner = Learner(shape, mesh, config.optim, config.train.steps, dtype)
    # Rank 0 alone has looked which checkpoint is good.
    version = torch.tensor(lead.resumes_at if lead else NO_CHECKPOINT, device=mesh.device)
    dist.broadcast(version, src=0)
    if version != NO_CHECKPOINT:
        with blamed_on("--resume"):
            load_learner(folder.checkpoint(int(version)) / "learner", learner)
        return learner
    with blamed_on("policy.path"):
        learner.load(stream_tensors(config.policy.path))
    return learner


def open_reference(config: Config, learner: Learner) -> ReferencePolicy | None:
    """The reference policy of a KL term, None where there is no such term; collective."""
    kl = config.objective.kl
    if kl is None:
        return None
    with blamed_on("objective.kl.reference"):
        return ReferencePolicy(learner, stream_tensors(kl.reference or config.policy.path))
