"""Records to token ids, plain text and chats alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from megatron_gmc.rollout.types import Prompt
from megatron_gmc.tasks.sources import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Raise ValueError where the tokenizer has ids that the model does not know."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer has token id {largest}, the model's vocabulary ends at "
            f"{vocabulary - 1}: take the tokenizer that belongs to the model"
        )


def tokenise(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool = False,
    instruction: str = "",
) -> list[Prompt]:
    """The prompts of `records`; chats go through the tokenizer's template.

    `chat` makes a plain-text prompt one user message, `instruction` is added at its end. Raises
    ValueError, naming the record, where a template is missing or refuses, and for text that the
    tokenizer does not know.
    """
    texts = []
    for record in records:
        prompt = record.prompt
        if isinstance(prompt, str):
            prompt += instruction
            if not chat:
                texts.append((prompt, True))
                continue
            prompt = ({"role": "user", "content": prompt},)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {record.id} is a chat, but the tokenizer has no chat template: use "
                "plain-text prompts without `chat`, or the tokenizer of a chat model"
            )
        try:
            rendered = tokenizer.apply_chat_template(
                list(prompt), tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"prompt {record.id}: the chat template refuses it: {error}") from None
        texts.append((rendered, False))
    return [
        Prompt(record.id, text, tokens, record.answer, record.metadata)
        for record, (text, _), tokens in zip(
            records, texts, encode(records, texts, tokenizer), strict=True
        )
    ]


def encode(
    records: Sequence[Record],
    texts: Sequence[tuple[str, bool]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[tuple[int, ...]]:
    """Token ids of each text; the flag says whether the tokenizer adds its special tokens.

    Raises ValueError, naming the record, for text that the tokenizer does not know.
    """
    tokens: list[tuple[int, ...]] = [()] * len(texts)
    for special in (True, False):
        places = [place for place, (_, flag) in enumerate(texts) if flag == special]
        chosen = [texts[place][0] for place in places]
        for place, ids in zip(places, _encode_all(chosen, special, tokenizer), strict=True):
            if isinstance(ids, Exception):
                raise ValueError(f"prompt {records[place].id} cannot be tokenised: {ids}") from ids
            tokens[place] = ids
    return tokens


def _encode_all(
    texts: list[str], special: bool, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...] | Exception]:
    """All at once, which is many times faster; one by one only to find a text that fails."""
    if not texts:
        return []
    try:
        return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=special)["input_ids"]]
    except Exception as error:  # noqa: BLE001 — tokenizers raises bare Exception for bad text
        if len(texts) == 1:
            return [error]
    middle = len(texts) // 2
    return [
        *_encode_all(texts[:middle], special, tokenizer),
        *_encode_all(texts[middle:], special, tokenizer),
    ]
