"""Reads a source of prompts into plain records, and refuses a bad record by file and line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from megatron_gmc.tasks.config import (
    HuggingFaceSource,
    JsonlSource,
    ReasoningGymSource,
    SourceConfig,
)
from megatron_gmc.tasks.text import after_last


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Record:
    """One prompt before tokenisation: plain text, or the turns of a chat."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    metadata: str


def read_source(source: SourceConfig) -> list[Record]:
    """Read all records of `source`, in their order. Ids are "<type>:<line or index>".

    Raises ValueError, naming file and line (or dataset and row), for a source that is missing or
    empty and for a record that is broken, lacks a field or has a wrong type.
    """
    if isinstance(source, JsonlSource):
        return _read_jsonl(source)
    if isinstance(source, ReasoningGymSource):
        return _read_reasoning_gym(source)
    return _read_hugging_face(source)


def _read_jsonl(source: JsonlSource) -> list[Record]:
    records = []
    for number, line in enumerate(_lines(source.path), start=1):
        if not line.strip():
            continue
        where = f"{source.path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be a JSON object, got {_kind(row)}")
        records.append(_record(row, source, f"jsonl:{number}", where))
    if not records:
        raise ValueError(f"prompt file {source.path} is empty: it needs one JSON object per line")
    return records


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ValueError(f"prompt file {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"prompt file {path} cannot be read: {error.strerror}") from None


def _read_hugging_face(source: HuggingFaceSource) -> list[Record]:
    # Imported here: it takes a second, and most tasks need no dataset library.
    import datasets

    try:
        rows = datasets.load_dataset(source.name, source.subset, split=source.split)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"Hugging Face dataset {source.name!r} (subset {source.subset}, split {source.split}) "
            f"could not be loaded: {reason}. Check the three names and the network, or export the "
            "prompts and use a jsonl source"
        ) from None
    if len(rows) == 0:
        raise ValueError(f"Hugging Face dataset {source.name!r}: split {source.split} is empty")
    return [
        _record(row, source, f"hugging_face:{index}", f"{source.name} {source.split}, row {index}")
        for index, row in enumerate(rows)
    ]


def _read_reasoning_gym(source: ReasoningGymSource) -> list[Record]:
    # Imported here: it takes a second, and most tasks do without it.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.dataset not in DATASETS:
        near = difflib.get_close_matches(source.dataset, DATASETS, n=3)
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise ValueError(f"reasoning_gym has no dataset {source.dataset!r}{hint}")
    try:
        dataset = reasoning_gym.create_dataset(
            source.dataset, size=source.size, seed=source.seed, **source.params
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"reasoning_gym dataset {source.dataset!r} refuses params {source.params}: {error}"
        ) from None
    records = []
    for index in range(source.size):
        entry = dataset[index]
        metadata = {"dataset": source.dataset, "params": source.params, "entry": entry}
        records.append(
            Record(
                id=f"reasoning_gym:{index}",
                prompt=entry["question"],
                # Some datasets have no single right answer: their scorer reads the entry alone.
                answer="" if entry["answer"] is None else str(entry["answer"]),
                metadata=json.dumps(metadata),
            )
        )
    return records


def _record(
    row: Mapping[str, object], fields: JsonlSource | HuggingFaceSource, id: str, where: str
) -> Record:
    metadata = row.get(fields.metadata_field)
    if metadata is None:
        metadata = ""
    return Record(
        id=id,
        prompt=_prompt(row, fields, where),
        answer=_answer(row, fields, where),
        metadata=metadata if isinstance(metadata, str) else json.dumps(metadata),
    )


def _prompt(
    row: Mapping[str, object], fields: JsonlSource | HuggingFaceSource, where: str
) -> str | tuple[Message, ...]:
    names = (fields.prompt_field, fields.messages_field)
    present = [name for name in names if row.get(name) is not None]
    if not present:
        raise ValueError(
            f"{where}: needs field {names[0]!r} or {names[1]!r}, has {sorted(row) or 'no field'}"
        )
    if len(present) == 2:
        raise ValueError(f"{where}: has both {names[0]!r} and {names[1]!r}: give only one of them")
    value = row[present[0]]
    if present[0] == fields.prompt_field:
        return _text(value, fields.prompt_field, where)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(
            f"{where}: field {present[0]!r} must be a list of messages, got {_kind(value)}"
        )
    return tuple(_message(turn, present[0], where) for turn in value)


def _message(turn: object, field: str, where: str) -> Message:
    if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
        raise ValueError(
            f"{where}: each entry of {field!r} must be an object with 'role' and 'content'"
        )
    return Message(
        role=_text(turn["role"], f"{field}.role", where),
        content=_text(turn["content"], f"{field}.content", where),
    )


def _answer(row: Mapping[str, object], fields: JsonlSource | HuggingFaceSource, where: str) -> str:
    value = row.get(fields.answer_field)
    if value is None:
        raise ValueError(f"{where}: field {fields.answer_field!r} is missing")
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    answer = _text(value, fields.answer_field, where)
    if fields.answer_after is None:
        return answer
    part = after_last(answer, fields.answer_after)
    if part is None or not part.strip():
        raise ValueError(
            f"{where}: field {fields.answer_field!r} has nothing after the marker "
            f"{fields.answer_after!r}"
        )
    return part.strip()


def _text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} must be a string, got {_kind(value)}")
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can escape half of a surrogate pair, which no tokenizer accepts.
        raise ValueError(f"{where}: field {field!r} is not valid Unicode text") from None
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), f"the number {value!r}")
