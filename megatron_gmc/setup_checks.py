"""Everything about a training run that can be wrong and be found out before a model is built."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gmc.config import Config, MeshConfig, ObjectiveConfig
from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import tensor_shapes
from megatron_gmc.convert.inventory import check_tensors
from megatron_gmc.errors import ConfigError, blamed_on
from megatron_gmc.tasks.graders import Grader
from megatron_gmc.tasks.prompts import TaskPrompts, load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_gmc.learner.pack import Padding

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Task:
    """What rank 0 needs to drive rollouts."""

    tokenizer: PreTrainedTokenizerBase
    prompts: TaskPrompts
    grader: Grader
    stop_token_ids: tuple[int, ...]


def is_lead() -> bool:
    """Whether this process is global rank 0, before any process group exists."""
    return this_rank() == 0


def this_rank() -> int:
    """The process's global rank, from its launcher."""
    return int(os.environ.get("RANK", "0"))


def check_model(folder: Path, mesh: MeshConfig, *, weights: bool) -> ModelShape:
    """Read the policy's shape and check the mesh against it and against the launched ranks."""
    from megatron_gmc.learner.mesh import check_mesh

    with blamed_on("policy.path"):
        shape = load_shape(folder)
        if weights:
            check_tensors(tensor_shapes(folder), shape)
    with blamed_on("mesh"):
        check_mesh(int(os.environ.get("WORLD_SIZE", "1")), mesh, shape)
    return shape


def check_reference(objective: ObjectiveConfig, shape: ModelShape) -> None:
    """Check that the reference policy's folder, where one is named, holds the policy's shapes."""
    if objective.kl is None or objective.kl.reference is None:
        return
    with blamed_on("objective.kl.reference"):
        if load_shape(objective.kl.reference) != shape:
            raise ValueError(
                f"{objective.kl.reference} is another architecture than policy.path; a reference "
                "has the policy's own, with other weights"
            )
        check_tensors(tensor_shapes(objective.kl.reference), shape)


def padding_of(mesh: MeshConfig) -> Padding:
    """What the mesh rounds the lengths of trajectories and packs up to."""
    from megatron_gmc.learner.pack import Padding

    return Padding.of(
        tensor=mesh.tensor, context=mesh.context, sequence_parallel=mesh.sequence_parallel
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder; raises ConfigError where there is none."""
    from transformers import AutoTokenizer

    # Without any of these transformers makes a tokenizer that knows no token.
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"policy.path: {folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"policy.path: {folder} has no usable tokenizer: {reason}") from None


def check_task(config: Config, shape: ModelShape) -> Task:
    """Read prompts and tokenizer, and check them against model, context and batch limits."""
    if config.train.wandb is not None and find_spec("wandb") is None:
        raise ConfigError(
            "train.wandb: the package wandb is not installed; pip install 'megatron_gmc[wandb]', "
            "or leave train.wandb out"
        )
    response = config.rollout.max_response_tokens
    context = shape.max_positions - response
    if context < 1:
        raise ConfigError(
            f"rollout.max_response_tokens: {response} leaves no room for a prompt in the model's "
            f"context of {shape.max_positions} tokens; lower it"
        )
    tokenizer = load_tokenizer(config.policy.path)
    with blamed_on("task"):
        prompts = load_task(
            config.task, tokenizer, vocabulary=shape.vocab_size, max_prompt_tokens=context
        )
        grader = Grader(config.task.grader, workers=1)
    _check_batch_limits(config, prompts)
    curve = config.evaluation.prompts
    if curve is not None and curve > len(prompts.held_out):
        raise ConfigError(
            f"evaluation.prompts: {curve} is more than the {len(prompts.held_out)} held-out "
            "prompts; lower it or raise task.held_out"
        )
    stop = stop_token_ids(config.policy.path, tokenizer, shape.vocab_size)
    return Task(tokenizer, prompts, grader, stop)


def _check_batch_limits(config: Config, prompts: TaskPrompts) -> None:
    limit, group = config.learner.micro_batch_tokens, config.rollout.group_size
    longest = max(len(prompt.tokens) for prompt in prompts.train)
    mesh = config.mesh
    padding = padding_of(mesh)
    width = longest + config.rollout.max_response_tokens
    if padding.of_pack([width]) > limit:
        raise ConfigError(
            f"learner.micro_batch_tokens: {limit} is less than the longest possible trajectory, "
            f"{longest} prompt + {config.rollout.max_response_tokens} response tokens; raise it "
            f"to {padding.of_pack([width])} or more"
        )
    whole = {
        "trajectory": ("trajectory", 1),
        "group": ("group", group),
        "batch": ("batch", group * config.train.prompts_per_step),
    }
    what, rows = whole[config.estimator.scope]
    data_ranks = int(os.environ.get("WORLD_SIZE", "1")) // (
        mesh.tensor * mesh.context * mesh.pipeline
    )
    if config.learner.passes == "single_pass" and what == "batch" and data_ranks > 1:
        raise ConfigError(
            f"learner.passes: estimator {config.estimator.name} looks at the whole batch, which "
            f"{data_ranks} data-parallel ranks share; use auto or two_pass"
        )
    if config.learner.passes == "single_pass" and padding.of_pack([width] * rows) > limit:
        raise ConfigError(
            f"learner.passes: single_pass needs a whole {what} in a micro-batch, up to {rows} × "
            f"{width} tokens, and learner.micro_batch_tokens is {limit}; raise that or use auto"
        )


def stop_token_ids(
    folder: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> tuple[int, ...]:
    """Every id that ends a response: generation_config.json's, else the tokenizer's.

    Raises ConfigError where neither names one, or one that is no id of the model's vocabulary.
    """
    path = folder / "generation_config.json"
    try:
        named = json.loads(path.read_text())["eos_token_id"] if path.exists() else None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"policy.path: {path} is no JSON object: {error}") from None
    except KeyError:
        named = None
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        raise ConfigError(
            f"policy.path: {folder} names no end-of-sequence token; set eos_token_id in "
            "generation_config.json"
        )
    ids = tuple(named) if isinstance(named, list) else (named,)
    for one in ids:
        if type(one) is not int or not 0 <= one < vocabulary:
            raise ConfigError(
                f"policy.path: {folder} ends responses with token {one!r}, and the model's ids go "
                f"from 0 to {vocabulary - 1}; mend eos_token_id in generation_config.json"
            )
    return ids
