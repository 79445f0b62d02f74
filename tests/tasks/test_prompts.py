"""Tokenised prompts, the held-out split and the endless prompt order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_gmc.rollout.types import Prompt
from megatron_gmc.tasks.config import TaskConfig
from megatron_gmc.tasks.prompts import (
    PromptStream,
    TaskPrompts,
    fingerprint,
    held_out_split,
    load_task,
    response_text,
)


def write(path: Path, texts: list[str]) -> dict[str, str]:
    path.write_text("".join(json.dumps({"prompt": t, "answer": "1"}) + "\n" for t in texts))
    return {"type": "jsonl", "path": str(path)}


def load(
    tokenizer: PreTrainedTokenizerFast, vocabulary: int = 256, limit: int = 100, **config: Any
) -> TaskPrompts:
    task = TaskConfig.model_validate({"grader": {"type": "exact"}, **config})
    return load_task(task, tokenizer, vocabulary=vocabulary, max_prompt_tokens=limit)


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{n}", f"text {n}", (n, n + 1), str(n)) for n in range(count)]


def test_demo_prompts_are_nine_tokens_behind_the_begin_token(arithmetic: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    source = {"type": "jsonl", "path": arithmetic / "prompts.jsonl"}
    held_out = {"type": "jsonl", "path": arithmetic / "heldout.jsonl"}
    task = load(tokenizer, 20, 9, source=source, held_out_source=held_out)
    assert (len(task.train), len(task.held_out), task.dropped) == (300, 50, 0)
    for prompt in task.train + task.held_out:
        assert len(prompt.tokens) == 9
        assert tokenizer.decode(list(prompt.tokens)) == "^" + prompt.text
        first, second = prompt.text.rstrip("=").split("+")
        assert int(prompt.answer) == int(first) + int(second)


def test_chat_prompts_go_through_the_template(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chat = [{"role": "system", "content": "short"}, {"role": "user", "content": "1+1?"}]
    rows = [{"messages": chat, "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    source = {"type": "jsonl", "path": path}
    task = load(byte_tokenizer, source=source, chat=True, instruction=" Digits only.")
    texts = ["<system>short\n<user>1+1?\n<assistant>", "<user>2+2? Digits only.\n<assistant>"]
    assert [prompt.text for prompt in task.train] == texts
    assert [byte_tokenizer.decode(list(prompt.tokens)) for prompt in task.train] == texts
    plain = load(byte_tokenizer, source=source).train[1]
    assert plain.text == "2+2?"


def test_chat_refusals_name_the_prompt(
    byte_tokenizer: PreTrainedTokenizerFast, arithmetic: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jsonl"
    chat = [{"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps({"messages": chat, "answer": "2"}))
    source = {"type": "jsonl", "path": path}
    with pytest.raises(
        ValueError, match="prompt jsonl:1: the chat template refuses it: user first"
    ):
        load(byte_tokenizer, source=source)
    with pytest.raises(ValueError, match="jsonl:1 is a chat, but the tokenizer has no chat temp"):
        load(AutoTokenizer.from_pretrained(arithmetic / "model"), 20, source=source)


def test_bad_prompts_are_named(
    byte_tokenizer: PreTrainedTokenizerFast, arithmetic: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "p.jsonl", ["123", "1234567", "12", "12345678"])
    with pytest.raises(ValueError, match=r"prompt jsonl:2 has 7 tokens, at most 5 .* 2 of 4 prom"):
        load(byte_tokenizer, limit=5, source=source)
    with pytest.raises(ValueError, match="token id 255, the model's vocabulary ends at 254"):
        load(byte_tokenizer, vocabulary=255, source=source)
    demo = AutoTokenizer.from_pretrained(arithmetic / "model")
    source = write(tmp_path / "p.jsonl", ["123", "a"])
    with pytest.raises(ValueError, match="prompt jsonl:2 cannot be tokenised"):
        load(demo, 20, source=source)


def test_an_answer_that_the_grader_cannot_use_is_named(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "3"}\n{"prompt": "b", "answer": "three"}\n')
    with pytest.raises(ValueError, match="prompt jsonl:2: answer 'three' has no number"):
        load(byte_tokenizer, source={"type": "jsonl", "path": path}, grader={"type": "numeric"})


def test_same_prompt_twice_stays_two_prompts(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """G5: two lines with one text are two submissions, so two groups (an id per submission)."""
    task = load(byte_tokenizer, source=write(tmp_path / "p.jsonl", ["same", "same", "other"]))
    assert [prompt.id for prompt in task.train] == ["jsonl:1", "jsonl:2", "jsonl:3"]
    assert task.train[0].tokens == task.train[1].tokens
    stream = PromptStream(task.train, seed=0)
    assert Counter(stream.prompt(n).text for n in range(3)) == {"same": 2, "other": 1}


def test_no_copy_of_a_held_out_prompt_is_trained_on(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = write(tmp_path / "p.jsonl", [str(n % 10) for n in range(30)])
    task = load(byte_tokenizer, source=source, held_out=4)
    assert len({prompt.text for prompt in task.held_out}) == len(task.held_out) == 4
    assert len(task.train) == 18
    assert task.dropped == 8
    assert not {p.tokens for p in task.train} & {p.tokens for p in task.held_out}
    other = write(tmp_path / "h.jsonl", ["3", "77"])
    task = load(byte_tokenizer, source=source, held_out_source=other)
    assert (len(task.train), len(task.held_out), task.dropped) == (27, 2, 3)


def test_a_split_that_leaves_nothing_is_refused(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = write(tmp_path / "p.jsonl", ["1", "2", "2"])
    with pytest.raises(ValueError, match=r"held_out must be below .* different prompts, 2, got 2"):
        load(byte_tokenizer, source=source, held_out=2)
    with pytest.raises(ValueError, match="nothing to train on"):
        load(byte_tokenizer, source=source, held_out_source=source)


@given(count=st.integers(1, 200), seed=st.integers(0, 2**40), data=st.data())
def test_split_covers_everything_once(count: int, seed: int, data: st.DataObject) -> None:
    held_out = data.draw(st.integers(0, count - 1))
    train, test = held_out_split(count, held_out, seed)
    assert len(test) == held_out
    assert sorted([*train, *test]) == list(range(count))
    again = held_out_split(count, held_out, seed)
    assert (list(train), list(test)) == (list(again[0]), list(again[1]))


def test_split_depends_on_its_seed_alone() -> None:
    """Frozen values: another numpy or platform must not move prompts out of the held-out set."""
    assert list(held_out_split(20, 5, 0)[1]) == FROZEN_SPLIT
    assert list(held_out_split(20, 5, 1)[1]) != FROZEN_SPLIT


FROZEN_SPLIT = [2, 3, 11, 13, 15]


@given(count=st.integers(1, 40), seed=st.integers(0, 2**40), epochs=st.integers(1, 4))
def test_every_epoch_uses_each_prompt_once(count: int, seed: int, epochs: int) -> None:
    """D3: after an epoch's last prompt comes the next epoch's first."""
    prompts = make_prompts(count)
    stream = PromptStream(prompts, seed)
    drawn = [stream.prompt(n) for n in range(count * epochs)]
    for epoch in range(epochs):
        part = drawn[epoch * count : (epoch + 1) * count]
        assert {prompt.id for prompt in part} == {prompt.id for prompt in prompts}


def test_stream_has_no_state_but_the_submission_number() -> None:
    """D1, D3: a resumed run, reading at any n and in any order, gets the same prompts."""
    stream = PromptStream(make_prompts(7), seed=5)
    in_order = [stream.prompt(n).id for n in range(70)]
    resumed = PromptStream(make_prompts(7), seed=5)
    assert [resumed.prompt(n).id for n in reversed(range(70))] == in_order[::-1]
    assert len({tuple(in_order[e * 7 : e * 7 + 7]) for e in range(10)}) > 1
    assert [PromptStream(make_prompts(7), seed=6).prompt(n).id for n in range(70)] != in_order


def test_empty_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0)


def test_fingerprint_sees_every_change() -> None:
    """D4: another prompt file has another fingerprint."""
    prompts = make_prompts(3)
    one = prompts[1]
    changed = [
        Prompt("x", one.text, one.tokens, one.answer),
        Prompt(one.id, "x", one.tokens, one.answer),
        Prompt(one.id, one.text, (1, 9), one.answer),
        Prompt(one.id, one.text, one.tokens, "x"),
        Prompt(one.id, one.text, one.tokens, one.answer, "x"),
    ]
    variants = [[prompts[0], other, prompts[2]] for other in changed]
    variants += [prompts[::-1], prompts[:2], [*prompts, prompts[0]]]
    seen = {fingerprint(variant) for variant in [prompts, *variants]}
    assert len(seen) == 1 + len(variants)
    assert fingerprint(make_prompts(3)) == PromptStream(prompts, 0).fingerprint


def test_response_text_hides_only_the_last_stop_token(arithmetic: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    ids = tokenizer(">09_3^2$", add_special_tokens=False)["input_ids"]
    assert response_text(tokenizer, ids, "stop") == ">09_3^2"
    assert response_text(tokenizer, ids[:-1], "length") == ">09_3^2"
    assert response_text(tokenizer, ids[-1:], "stop") == ""
