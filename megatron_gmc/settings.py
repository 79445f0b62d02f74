"""Read a config: YAML, then `--section.field value` overrides, then validation in plain words."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_gmc.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
Tree = dict[str, object]

# A section is a union told apart by one of these keys; changing it starts the section afresh,
# since the fields of one kind mean nothing to another.
_TAGS = ("name", "type")
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number, as in YAML 1.2; PyYAML alone wants 3.0e-4."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(kind: type[Model], path: Path | None, overrides: Sequence[str] = ()) -> Model:
    """Read `path` (YAML), apply `overrides` (`--a.b value` or `--a.b=value`), validate as `kind`.

    Override values are YAML too, so numbers, lists and `{…}` work; without a path they are all
    there is. Raises ConfigError.
    """
    tree = {} if path is None else _read_tree(path)
    for keys, value in _parse_overrides(kind, overrides):
        _override(kind, tree, keys, value)
    return validate(kind, tree)


def _read_tree(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_fault(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping of sections such as 'train:' and 'policy:'")
    return tree


def validate(kind: type[Model], tree: Mapping[str, object]) -> Model:
    """Validate a tree; raises ConfigError with one line per fault."""
    try:
        # Strict, so that `true` is no number; as JSON, where strictness still takes paths as text.
        return kind.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        # A missing field beside an unknown one is most often the same typo: say it once.
        lines = [_explain(kind, fault, error.errors()) for fault in error.errors()]
        raise ConfigError("\n".join(line for line in lines if line)) from None


def dump_config(config: BaseModel) -> str:
    """The resolved config as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _yaml_fault(error: yaml.YAMLError) -> str:
    """The error in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def _parse_overrides(
    kind: type[BaseModel], arguments: Sequence[str]
) -> list[tuple[list[str], object]]:
    """Pairs of keys and value; a union's kind comes before its fields, in whatever order given."""
    parsed: list[tuple[list[str], object]] = []
    rest = list(arguments)
    while rest:
        head = rest.pop(0)
        if not head.startswith("--") or head == "--":
            raise ConfigError(f"{head!r} is not an override; write --section.field value")
        key, equals, text = head[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"{head}: a value must follow")
            text = rest.pop(0)
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            fault = _yaml_fault(error)
            raise ConfigError(f"{head}: {text!r} is not a YAML value: {fault}") from error
        parsed.append((key.split("."), value))
    return sorted(parsed, key=lambda one: not _is_tag(kind, one[0]))


def _override(kind: type[BaseModel], tree: Tree, keys: list[str], value: object) -> None:
    node = tree
    for position, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            name = ".".join(keys[: position + 1])
            raise ConfigError(f"--{'.'.join(keys)}: {name} is {child!r}, which has no fields")
        node = child
    if node.get(keys[-1]) not in (None, value) and _is_tag(kind, keys):
        node.clear()
    node[keys[-1]] = value


def _explain(kind: type[BaseModel], fault: ErrorDetails, faults: list[ErrorDetails]) -> str:
    location = _readable(kind, fault["loc"])
    name = ".".join(location) or "config"
    given = fault.get("input")
    if fault["type"] in _UNKNOWN_KEY:
        return f"{name}: unknown key; {_hint(location[-1], _fields_at(kind, fault['loc'][:-1]))}"
    if fault["type"] == "missing":
        unknown = [
            str(f["loc"][-1])
            for f in faults
            if f["type"] in _UNKNOWN_KEY and f["loc"][:-1] == fault["loc"][:-1]
        ]
        typo = difflib.get_close_matches(location[-1], unknown, n=1, cutoff=0.5)
        return "" if typo else f"{name}: missing, and it has no default"
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        members = list(_walk(kind, fault["loc"])[1])
        key = fault["ctx"]["discriminator"].strip("'")
        tag = fault["ctx"].get("tag")
        found = "missing" if tag is None else f"{tag!r} is unknown"
        return f"{name}.{key}: {found}; {_hint(str(tag), members)}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        if not location:
            return message
        # A section's own check begins with the field that it is about.
        inner = message.partition(":")[0].isidentifier()
        return f"{name}.{message}" if inner else f"{name}: {message}"
    return f"{name}: {message[0].lower()}{message[1:]}, got {given!r}"


def _hint(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"


def _is_tag(kind: type[BaseModel], keys: Sequence[str]) -> bool:
    """Whether `keys` lead to what tells the members of a union apart."""
    if keys[-1] not in _TAGS:
        return False
    members = _walk(kind, tuple(keys[:-1]))[1].values()
    return any(_tag_default(member, keys[-1]) is not None for member in members)


def _readable(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Drop the tags that pydantic puts into the location of a union's member."""
    parts: list[str] = []
    for depth, part in enumerate(location):
        if isinstance(part, int):
            parts[-1] = f"{parts[-1]}[{part}]"
        elif part not in _walk(kind, location[:depth])[1]:
            parts.append(part)
    return parts


def _fields_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    return list(_annotations(_walk(kind, location)[0]))


def _walk(kind: type[BaseModel], location: tuple[int | str, ...]) -> tuple[object, dict[str, type]]:
    """What stands at `location`, and the classes by tag if that is a tagged union."""
    node: object = kind
    members: dict[str, type] = {}
    for part in location:
        if part in members:
            node, members = members[str(part)], {}
        else:
            node = _annotations(node).get(str(part))
            members = _members_by_tag(node)
    return node, members


def _annotations(node: object) -> dict[str, object]:
    """The fields of a section or estimator, also of one that is optional."""
    for kind in _alternatives(node):
        if issubclass(kind, BaseModel):
            return {name: field.annotation for name, field in kind.model_fields.items()}
        if dataclasses.is_dataclass(kind):
            return {field.name: field.type for field in dataclasses.fields(kind)}
    return {}


def _members_by_tag(annotation: object) -> dict[str, type]:
    tagged: dict[str, type] = {}
    for member in _alternatives(annotation):
        for tag in _TAGS:
            value = _tag_default(member, tag)
            if value is not None:
                tagged[value] = member
    # One class alone is no union: its literal is a field like any other.
    return tagged if len(tagged) > 1 else {}


def _alternatives(annotation: object) -> list[type]:
    """The classes of a union, also one that is annotated or optional."""
    if isinstance(annotation, type):
        return [annotation]
    return [one for part in getattr(annotation, "__args__", ()) for one in _alternatives(part)]


def _tag_default(member: object, tag: str) -> str | None:
    """The one value that `tag` has in a member of a union; None where it is no tag there."""
    if isinstance(member, type) and issubclass(member, BaseModel):
        field = member.model_fields.get(tag)
        value = getattr(field and field.annotation, "__args__", (None,))[0]
    else:
        fields = getattr(member, "__dataclass_fields__", {})
        value = fields[tag].default if tag in fields else None
    return value if isinstance(value, str) else None
