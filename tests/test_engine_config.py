"""What a config may say about engines and weights, and what is chosen where it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gmc.config import Config
from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.engine_config import check_address
from megatron_gmc.engines import build_engines
from megatron_gmc.errors import ConfigError
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.settings import validate
from tests.runs import Tree, train_tree

TWO: Tree = {"engine": "sglang", "sglang": {"servers": 2}}
ADDRESSES = ["http://127.0.0.1:30000", "http://node7.cluster:30001"]


def config_with(task: Path, rollout: Tree, **sections: Tree) -> Config:
    return validate(Config, train_tree(task, Path("run"), rollout=rollout, **sections))


BAD: dict[str, tuple[Tree, dict[str, Tree], str]] = {
    "no section": ({"engine": "sglang"}, {}, "rollout.sglang: engine sglang needs it"),
    "neither": ({"engine": "sglang", "sglang": {}}, {}, "give one of servers or addresses"),
    "both": (
        {"engine": "sglang", "sglang": {"servers": 1, "addresses": ADDRESSES}},
        {},
        "give one of servers or addresses",
    ),
    "twice": (
        {"engine": "sglang", "sglang": {"addresses": ADDRESSES[:1] * 2}},
        {},
        "given twice",
    ),
    "not an address": (
        {"engine": "sglang", "sglang": {"addresses": ["localhost:30000"]}},
        {},
        "no address of the form http://host:port",
    ),
    "unread section": ({"sglang": {"servers": 1}}, {}, "engine embedded does not read it"),
    "unread fleet": ({"fleet": {"attempts": 1}}, {}, "engine embedded does not read it"),
    "unread weights": ({}, {"weights": {"transport": "disk"}}, "weights: engine embedded"),
    "a reserved option": (
        {"engine": "sglang", "sglang": {"servers": 1, "options": {"api-key": "x"}}},
        {},
        "api-key is set by this program",
    ),
    "an option with dashes": (
        {"engine": "sglang", "sglang": {"servers": 1, "options": {"--x; rm": 1}}},
        {},
        "is no option",
    ),
    "two colocated": (
        {"engine": "sglang", "sglang": {"servers": 2, "placement": "colocated"}},
        {},
        "colocated needs servers: 1",
    ),
    "colocated with a lag": (
        {"engine": "sglang", "sglang": {"servers": 1, "placement": "colocated"}},
        {},
        r"use \{exact: 0\}",
    ),
    "unknown transport": (TWO, {"weights": {"transport": "carrier pigeon"}}, "weights.transport"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_name(task: Path, case: str) -> None:
    rollout, sections, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        config_with(task, rollout, **sections)


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:port",
        "http://256.0.0.1:30000",
        "http://user@host:30000",
        "http://host:30000/path",
        "http://host:30000?a=b",
        "http://-host:30000",
        "http://a b:30000",
        "https://host:30000",
        "http://:30000",
        "file:///etc/passwd",
        "",
    ],
)
def test_only_host_and_port_are_an_address(address: str) -> None:
    with pytest.raises(ValueError, match="no address of the form"):
        check_address(address)


@pytest.mark.parametrize("address", [*ADDRESSES, "http://localhost:1", "http://10.0.0.7:65535"])
def test_an_address_is_accepted(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("sglang", "lag", "transport", "in_flight"),
    [
        ({"servers": 2}, {"exact": 2}, "disk", "wait"),
        ({"servers": 2}, {"bounded": 2}, "disk", "pause_in_place"),
        ({"addresses": ADDRESSES[:1]}, {"exact": 2}, "disk", "wait"),
        ({"addresses": ADDRESSES}, {"bounded": 2}, "distributed", "pause_in_place"),
    ],
)
def test_auto_says_what_it_chose(
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sglang: Tree,
    lag: Tree,
    transport: str,
    in_flight: str,
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "one")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "two")
    config = config_with(task, {"engine": "sglang", "sglang": sglang, "lag": lag})
    built = build_engines(config, load_shape(task / "policy"), RunFolder(tmp_path))
    assert f"weights.transport {transport}: " in built.choice
    assert f"weights.in_flight {in_flight}: " in built.choice
    explicit = config_with(
        task,
        {"engine": "sglang", "sglang": sglang, "lag": lag},
        weights={"transport": "tensor", "in_flight": "retract"},
    )
    assert not build_engines(explicit, load_shape(task / "policy"), RunFolder(tmp_path)).choice


def test_a_missing_key_is_named(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    config = config_with(task, {"engine": "sglang", "sglang": {"addresses": ADDRESSES}})
    with pytest.raises(ConfigError, match=r"api_key_variable: the environment has no SGLANG_API"):
        build_engines(config, load_shape(task / "policy"), RunFolder(tmp_path))
