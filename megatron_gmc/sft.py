"""Supervised fine-tuning on demonstrations: the warm start before reinforcement learning."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_gmc.config import SftConfig
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.errors import ConfigError, blamed_on
from megatron_gmc.learner.batch import Batch, Row, broadcast_batch
from megatron_gmc.learner.learner import DTYPES, Learner
from megatron_gmc.learner.log_probs import TokenScores
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.micro_batch import MicroBatch, micro_batches_of
from megatron_gmc.learner.model_weights import initial_weights
from megatron_gmc.learner.plan import plan_micro_batches
from megatron_gmc.run_folder import RunFolder, write_atomically
from megatron_gmc.run_log import RunLog
from megatron_gmc.setup_checks import check_model, is_lead, load_tokenizer, padding_of
from megatron_gmc.tasks.demonstrations import Demonstration, load_demonstrations
from megatron_gmc.weights import write_weights


def fine_tune(config: SftConfig) -> int:
    """Run supervised fine-tuning on every rank; returns the exit code."""
    torch.set_num_threads(1)
    folder = RunFolder(config.train.output_dir)
    if folder.finished():
        if is_lead():
            folder.check_same(config)
            print(f"nothing left to do: the weights are in {folder.huggingface}")
        return 0
    pretrained = config.policy.initial == "pretrained"
    shape = check_model(config.policy.path, config.mesh, weights=pretrained)
    demonstrations: list[Demonstration] = []
    if is_lead():
        demonstrations = _load_data(config, shape)
        folder.open(config, resume=False, resumable=False)
    mesh = Mesh.of(config.mesh)
    dtype = DTYPES[config.policy.dtype]
    learner = Learner(shape, mesh, config.optim, config.train.steps, dtype)
    if pretrained:
        with blamed_on("policy.path"):
            learner.load(stream_tensors(config.policy.path))
    else:
        learner.load(initial_weights(shape, config.train.seed))
    _loop(config, learner, demonstrations, folder)
    write_weights(learner.weights(), mesh, config.policy.path, folder.huggingface)
    if mesh.rank == 0:
        write_atomically(folder.result, json.dumps({"steps": config.train.steps}) + "\n")
        print(f"the weights are in {folder.huggingface}")
    mesh.close()
    return 0


def _load_data(config: SftConfig, shape: ModelShape) -> list[Demonstration]:
    with blamed_on("data"):
        demonstrations = load_demonstrations(
            config.data.source(),
            load_tokenizer(config.policy.path),
            vocabulary=shape.vocab_size,
            max_tokens=shape.max_positions,
        )
    longest = max(len(one.prompt) + len(one.response) for one in demonstrations)
    needed = padding_of(config.mesh).of_pack([longest])
    if needed > config.learner.micro_batch_tokens:
        raise ConfigError(
            f"learner.micro_batch_tokens: {config.learner.micro_batch_tokens} is less than the "
            f"longest demonstration, {longest} tokens; raise it to {needed} or more"
        )
    return demonstrations


def _loop(
    config: SftConfig, learner: Learner, demonstrations: list[Demonstration], folder: RunFolder
) -> None:
    steps, lead = config.train.steps, learner.mesh.rank == 0
    log = RunLog(folder.path, title="sft", steps=steps, start=0) if lead else None
    batches = _batches(config, demonstrations) if lead else None
    for step in range(1, steps + 1):
        began = time.perf_counter()
        batch = broadcast_batch(next(batches) if batches else None, learner.mesh)
        loss = imitation_gradient(learner, batch, config.learner.micro_batch_tokens)
        norm = learner.apply()
        if log is not None:
            seconds = time.perf_counter() - began
            metrics = {
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": learner.learning_rate,
                "time/step_s": seconds,
            }
            log.write(step, metrics)
    if log is not None:
        log.close()


def imitation_gradient(learner: Learner, batch: Batch, micro_batch_tokens: int) -> float:
    """Leave the gradient of the mean negative log-prob per response token in the model.

    Returns that mean over the whole batch, in nats.
    """
    plan = plan_micro_batches(
        batch.length_N,
        batch.group_N,
        limits=learner.limits,
        token_limit=micro_batch_tokens,
        scope="trajectory",
        passes="auto",
    )
    tokens = int(batch.loss_tokens_N().sum())

    def loss_of(_: MicroBatch, scores: TokenScores) -> Tensor:
        return -scores.log_prob_K.sum() / tokens

    return learner.run(micro_batches_of(batch, plan, learner.mesh), loss_of)


def _batches(config: SftConfig, demonstrations: list[Demonstration]) -> Iterator[Batch]:
    """Endless batches; every epoch has its own order, drawn from the seed."""
    generator = torch.Generator().manual_seed(config.train.seed)
    size, order = config.train.batch_size, list[int]()
    while True:
        while len(order) < size:
            order += torch.randperm(len(demonstrations), generator=generator).tolist()
        chosen, order = order[:size], order[size:]
        yield Batch.from_rows(
            [_row(place, demonstrations[index]) for place, index in enumerate(chosen)]
        )


def _row(place: int, demonstration: Demonstration) -> Row:
    response = demonstration.response
    return Row(
        id=place,
        group=place,
        prompt_tokens=demonstration.prompt,
        response_tokens=response,
        loss_mask=[True] * len(response),
        behaviour_log_probs=[0.0] * len(response),
        reward=0.0,
        oldest_version=0,
    )
