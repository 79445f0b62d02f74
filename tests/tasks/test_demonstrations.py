"""Demonstrations become the tokens that training would have sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_gmc.tasks.config import JsonlSource
from megatron_gmc.tasks.demonstrations import load_demonstrations


@pytest.fixture(scope="module")
def tokenizer(arithmetic: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(arithmetic / "model")


def source(path: Path, *rows: dict[str, str]) -> JsonlSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlSource(path=path, answer_field="response")


def test_a_prompt_gets_its_beginning_and_a_response_its_end(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = {"prompt": "347+585=", "response": ">0932"}, {"prompt": "1", "response": "2"}
    found = load_demonstrations(
        source(tmp_path / "d.jsonl", *rows), tokenizer, vocabulary=20, max_tokens=64
    )
    alphabet = "0123456789+=>$^_;,|:"
    assert [alphabet[i] for i in found[0].prompt] == list("^347+585=")
    assert [alphabet[i] for i in found[0].response] == list(">0932$")
    assert [alphabet[i] for i in found[1].response] == list("2$")


def test_a_character_that_the_tokenizer_does_not_know_is_named_by_its_line(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"prompt": "1+1=", "response": "2"} for _ in range(9)]
    rows[6]["response"] = "two"
    with pytest.raises(ValueError, match=r"jsonl:7 cannot be tokenised"):
        load_demonstrations(
            source(tmp_path / "d.jsonl", *rows), tokenizer, vocabulary=20, max_tokens=64
        )


def test_a_demonstration_longer_than_the_context_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = {"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "2" * 60}
    with pytest.raises(ValueError, match=r"jsonl:2 has 66 tokens, the model's context is 64"):
        load_demonstrations(
            source(tmp_path / "d.jsonl", *rows), tokenizer, vocabulary=20, max_tokens=64
        )


def test_a_tokenizer_of_another_model_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="token id 19, the model's vocabulary ends at 9"):
        load_demonstrations(
            source(tmp_path / "d.jsonl", {"prompt": "1", "response": "2"}),
            tokenizer,
            vocabulary=10,
            max_tokens=64,
        )
