"""Demonstrations for supervised fine-tuning: prompts with the responses to imitate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_gmc.tasks.config import JsonlSource
from megatron_gmc.tasks.sources import read_source
from megatron_gmc.tasks.tokenise import check_vocabulary, encode, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Demonstration:
    """Token ids; `response` ends with the end-of-sequence token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


def load_demonstrations(
    source: JsonlSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocabulary: int,
    max_tokens: int,
) -> list[Demonstration]:
    """Read and tokenise the demonstrations of `source`, whose answer field holds the responses.

    A prompt is tokenised as training does it, chats by the tokenizer's template. Raises
    ValueError for a bad file or record, a tokenizer that does not fit the model, and a
    demonstration of more than `max_tokens` tokens.
    """
    check_vocabulary(tokenizer, vocabulary)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token to end a response with")
    records = read_source(source)
    prompts = tokenise(records, tokenizer)
    responses = encode(records, [(record.answer, False) for record in records], tokenizer)
    demonstrations = [
        Demonstration(prompt.tokens, (*response, tokenizer.eos_token_id))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    for record, one in zip(records, demonstrations, strict=True):
        length = len(one.prompt) + len(one.response)
        if not one.prompt:
            raise ValueError(f"demonstration {record.id}: the prompt has no token")
        if length > max_tokens:
            raise ValueError(
                f"demonstration {record.id} has {length} tokens, the model's context is "
                f"{max_tokens}; shorten or remove it"
            )
    return demonstrations
