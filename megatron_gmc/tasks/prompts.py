"""Tokenised prompts of a task, the held-out split, and the endless order in which they are used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from megatron_gmc.rollout.types import FinishReason, IntArray, Prompt
from megatron_gmc.tasks.config import TaskConfig
from megatron_gmc.tasks.graders import check_answers
from megatron_gmc.tasks.sources import Record, read_source
from megatron_gmc.tasks.tokenise import check_vocabulary, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TaskPrompts:
    """A task's prompts. No prompt of `train` has the tokens of one in `held_out`.

    `train` may hold a prompt several times: each is submitted as a group of its own. `dropped`
    counts copies of held-out prompts that were left out of `train`.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: int


def load_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocabulary: int,
    max_prompt_tokens: int,
) -> TaskPrompts:
    """Read, check, tokenise and split the prompts of `config`.

    `vocabulary` is the model's. Raises ValueError for a bad source or record, a tokenizer that
    does not fit the model, a prompt of more than `max_prompt_tokens` tokens, an answer that the
    grader cannot use, and a split that leaves nothing to train on.
    """
    check_vocabulary(tokenizer, vocabulary)
    prompts = _load_prompts(config, read_source(config.source), tokenizer, max_prompt_tokens)
    if config.held_out_source is not None:
        records = read_source(config.held_out_source)
        held_out = _load_prompts(config, records, tokenizer, max_prompt_tokens)
    else:
        held_out = _pick_held_out(prompts, config.held_out, config.split_seed)
    kept_out = {prompt.tokens for prompt in held_out}
    train = tuple(prompt for prompt in prompts if prompt.tokens not in kept_out)
    if not train:
        raise ValueError("every prompt of source is also in held_out_source: nothing to train on")
    picked = 0 if config.held_out_source is not None else len(held_out)
    return TaskPrompts(train, tuple(held_out), len(prompts) - len(train) - picked)


def held_out_split(count: int, held_out: int, seed: int) -> tuple[IntArray, IntArray]:
    """Split range(count) into (training, held-out) indices, each rising; held-out has `held_out`.

    A pure function of its arguments. Raises ValueError if nothing is left to train on.
    """
    if held_out >= count:
        raise ValueError(
            f"held_out must be below the number of different prompts, {count}, got {held_out}"
        )
    order = _permutation(count, (seed,))
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 (hex) over every field of every prompt, in order; a resumed run compares it."""
    digest = hashlib.sha256()
    for prompt in prompts:
        fields = [prompt.id, prompt.text, prompt.tokens, prompt.answer, prompt.metadata]
        digest.update(json.dumps(fields).encode())
        digest.update(b"\n")
    return digest.hexdigest()


class PromptStream:
    """The prompt of every submission, without end: its only state is the submission number.

    Submission n belongs to epoch n // len(prompts); each epoch uses every prompt once, in an order
    that is a pure function of (seed, epoch). A resumed run continues with its next n.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self._prompts = tuple(prompts)
        self._seed = seed
        self.fingerprint = fingerprint(self._prompts)

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        return len(self._prompts)

    def prompt(self, n: int) -> Prompt:
        """Return the prompt of submission `n`, n >= 0."""
        assert n >= 0, f"submission numbers start at 0, got {n}"
        epoch, place = divmod(n, len(self._prompts))
        order = _permutation(len(self._prompts), (self._seed, epoch))
        return self._prompts[int(order[place])]


def response_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int] | IntArray, reason: FinishReason
) -> str:
    """Decode a response for its grader: without the end-of-sequence token that stopped it.

    Other special tokens stay visible, so that a response with one inside is not graded as if it
    were the clean text.
    """
    ids = [int(token) for token in tokens]
    if reason == "stop":
        ids = ids[:-1]
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _load_prompts(
    config: TaskConfig,
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Prompt]:
    check_answers(config.grader, records)
    prompts = tokenise(records, tokenizer, chat=config.chat, instruction=config.instruction)
    for prompt in prompts:
        if not prompt.tokens:
            raise ValueError(f"prompt {prompt.id} has no token: {prompt.text!r}")
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > max_prompt_tokens]
    if too_long:
        first = too_long[0]
        raise ValueError(
            f"prompt {first.id} has {len(first.tokens)} tokens, at most {max_prompt_tokens} are "
            f"allowed; {len(too_long)} of {len(prompts)} prompts are too long: shorten or remove "
            "them, or raise the limit"
        )
    return prompts


def _pick_held_out(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """The first copy of each of `count` different prompts."""
    if count == 0:
        return []
    different = {prompt.tokens: prompt for prompt in reversed(prompts)}
    first_copies = [prompt for prompt in prompts if different[prompt.tokens] is prompt]
    _, indices = held_out_split(len(first_copies), count, seed)
    return [first_copies[index] for index in indices]


@lru_cache(maxsize=4)
def _permutation(count: int, seeds: tuple[int, ...]) -> IntArray:
    # Raw bits of a named generator: numpy keeps these the same in every version (NEP 19), which
    # it does not promise of shuffle and permutation.
    bits = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    order: IntArray = np.argsort(bits, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order
