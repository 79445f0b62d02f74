"""Reading prompts from files, reasoning-gym and Hugging Face datasets; every bad record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gmc.tasks.config import HuggingFaceSource, JsonlSource, ReasoningGymSource
from megatron_gmc.tasks.sources import Record, read_source

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


def read(tmp_path: Path, content: str | bytes, **fields: str) -> list[Record]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_source(JsonlSource.model_validate({"path": path, **fields}))


def test_text_and_chat_records_keep_their_line_numbers(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    lines = [GOOD, "\r\n", json.dumps({"messages": chat, "answer": 4, "metadata": {"k": [1]}})]
    first, second = read(tmp_path, "".join(lines))
    assert first == Record("jsonl:1", "1+1=", "2", "")
    assert second.id == "jsonl:3"
    assert second.prompt == tuple(chat)
    assert second.answer == "4"
    assert json.loads(second.metadata) == {"k": [1]}


def test_field_names_and_answer_marker_are_free(tmp_path: Path) -> None:
    line = json.dumps({"question": "q", "solution": "#### 1 so #### 72 ", "note": "as is"})
    (record,) = read(
        tmp_path,
        line,
        prompt_field="question",
        answer_field="solution",
        answer_after="####",
        metadata_field="note",
    )
    assert record == Record("jsonl:1", "q", "72", "as is")


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbf" + GOOD.encode())[0].prompt == "1+1="


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", ', "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        (b'{"prompt": "\xff", "answer": "2"}', "not valid JSON: 'utf-8' codec"),
        ("[1, 2]", "must be a JSON object, got a list"),
        ("null", "must be a JSON object, got null"),
        ('{"answer": "2"}', r"needs field 'prompt' or 'messages', has \['answer'\]"),
        ("{}", "has no field"),
        ('{"prompt": null, "answer": "2"}', "needs field 'prompt'"),
        ('{"prompt": 3, "answer": "2"}', "'prompt' must be a string, got the number 3"),
        ('{"prompt": "  ", "answer": "2"}', "'prompt' is empty"),
        ('{"prompt": "\\ud800", "answer": "2"}', "'prompt' is not valid Unicode"),
        ('{"prompt": "a"}', "'answer' is missing"),
        ('{"prompt": "a", "answer": null}', "'answer' is missing"),
        ('{"prompt": "a", "answer": ""}', "'answer' is empty"),
        ('{"prompt": "a", "answer": ["2"]}', "'answer' must be a string, got a list"),
        ('{"prompt": "a", "answer": true}', "'answer' must be a string, got true or false"),
        ('{"prompt": "a", "answer": 0.5}', "'answer' must be a string, got the number 0.5"),
        ('{"prompt": "a", "messages": [], "answer": "2"}', "has both 'prompt' and 'messages'"),
        ('{"messages": "hi", "answer": "2"}', "'messages' must be a list of messages, got a str"),
        ('{"messages": [], "answer": "2"}', "'messages' must be a list of messages"),
        ('{"messages": ["hi"], "answer": "2"}', "object with 'role' and 'content'"),
        ('{"messages": [{"role": "user"}], "answer": "2"}', "object with 'role' and 'content'"),
        (
            '{"messages": [{"role": "user", "content": 1}], "answer": "2"}',
            "'messages.content' must be a string",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 3: .*{message}") as error:
        read(tmp_path, GOOD.encode() * 2 + raw + b"\n" + GOOD.encode())
    assert len(str(error.value)) < 400


def test_answer_without_its_marker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: field 'answer' has nothing after the marker"):
        read(tmp_path, GOOD, answer_after="####")


def test_missing_empty_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt file .*nowhere\.jsonl does not exist"):
        read_source(JsonlSource(path=tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match=r"prompt file .* cannot be read: Is a directory"):
        read_source(JsonlSource(path=tmp_path))
    for content in ("", "\n \n"):
        with pytest.raises(ValueError, match=r"prompt file .* is empty"):
            read(tmp_path, content)


def test_reasoning_gym_source_is_a_function_of_its_seed() -> None:
    def gym(seed: int) -> list[Record]:
        params = {"min_terms": 4, "max_terms": 4}
        config = {"dataset": "chain_sum", "size": 5, "seed": seed, "params": params}
        return read_source(ReasoningGymSource.model_validate(config))

    records = gym(3)
    assert records == gym(3)
    assert records != gym(4)
    assert [record.id for record in records] == [f"reasoning_gym:{index}" for index in range(5)]
    for record in records:
        assert record.answer
        assert len(re.findall(r"\d+", str(record.prompt))) == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dataset": "chain_sums"}, "no dataset 'chain_sums'; near names: chain_sum"),
        ({"dataset": "chain_sum", "params": {"terms": 3}}, "refuses params"),
        ({"dataset": "chain_sum", "params": {"min_terms": -3}}, "refuses params"),
        ({"dataset": "chain_sum", "params": {"seed": 3}}, "refuses params"),
    ],
)
def test_reasoning_gym_refusals(source: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_source(ReasoningGymSource.model_validate({"size": 2, **source}))


def test_hugging_face_source_reads_a_local_folder(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1", "answer": f"so #### {n + 1}"} for n in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": str(tmp_path), "prompt_field": "question", "answer_after": "####"}
    records = read_source(HuggingFaceSource.model_validate(source))
    assert records[1] == Record("hugging_face:1", "1+1", "2", "")
    with pytest.raises(ValueError, match=r"row 0: needs field 'prompt' or 'messages', has \["):
        read_source(HuggingFaceSource(name=str(tmp_path)))
    with pytest.raises(ValueError, match="split nonsense"):
        read_source(HuggingFaceSource(name=str(tmp_path), split="nonsense"))


def test_hugging_face_source_without_a_network_says_so(tmp_path: Path) -> None:
    code = (
        "from megatron_gmc.tasks.config import HuggingFaceSource as H\n"
        "from megatron_gmc.tasks.sources import read_source\n"
        "try: read_source(H(name='nobody/nothing'))\n"
        "except ValueError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "'nobody/nothing'" in result.stdout
    assert "the network, or export the prompts and use a jsonl source" in result.stdout
    assert len(result.stdout.strip().splitlines()) == 1
