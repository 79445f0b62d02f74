"""Folders read tensor by tensor, and written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_gmc.convert.hugging_face import stream_tensors, write_folder
from tests.qwen3 import save_tiny_qwen3, tiny_qwen3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_tiny_qwen3(tmp_path / "source", tied=False)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[n], right[n]) and left[n].dtype == right[n].dtype for n in left)


@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000, 1])
def test_round_trip_and_transformers_loads_it(
    tmp_path: Path, source: Path, max_shard_bytes: int
) -> None:
    """One file, several tensors a shard, and one tensor a shard."""
    target = tmp_path / "target"
    write_folder(target, stream_tensors(source), source, max_shard_bytes)
    assert_same(dict(stream_tensors(target)), load_file(source / "model.safetensors"))
    assert (target / "model.safetensors").exists() == (max_shard_bytes == 2**30)
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(target)(tokens).logits
        expected = tiny_qwen3(tied=False)(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_reads_what_transformers_sharded(tmp_path: Path) -> None:
    model = tiny_qwen3(tied=True)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    expected = {n: p.detach() for n, p in model.named_parameters()}
    assert_same(dict(stream_tensors(tmp_path / "sharded")), expected)


def test_companions_are_carried_along(tmp_path: Path, source: Path) -> None:
    companions = {
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in companions.items():
        (source / name).write_text(text)
    (source / "optimizer.pt").write_text("not ours")
    write_folder(tmp_path / "target", stream_tensors(source), source)
    for name, text in companions.items():
        assert (tmp_path / "target" / name).read_text() == text
    assert not (tmp_path / "target" / "optimizer.pt").exists()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_names_the_dtype_of_the_weights(tmp_path: Path, source: Path, key: str) -> None:
    """Else transformers would round them to the dtype that the source had."""
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps({**config, key: "float32"}))
    halves = ((name, tensor.bfloat16()) for name, tensor in stream_tensors(source))
    write_folder(tmp_path / "target", halves, source)
    written = json.loads((tmp_path / "target" / "config.json").read_text())
    assert written == {**config, key: "bfloat16"}


class Malicious:
    """Its pickle writes a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "weights.pt"])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, source: Path, name: str) -> None:
    """C7."""
    trace = tmp_path / "was_run"
    (source / "model.safetensors").unlink()
    (source / name).write_bytes(pickle.dumps(Malicious(trace)))
    with pytest.raises(ValueError, match=f"{name}, a pickle, .* is not opened"):
        list(stream_tensors(source))
    assert not trace.exists()


def test_a_folder_without_weights(source: Path) -> None:
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights: neither"):
        list(stream_tensors(source))


def test_a_cut_off_file(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        list(stream_tensors(source))


def sharded(folder: Path, weight_map: object) -> Path:
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(1)}, folder / "two.safetensors")
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors, which is missing"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "two.safetensors disagree about b"),
        ({"a": "../one.safetensors"}, "a lies in '../one.safetensors', which is no file of this"),
        ({"a": "/etc/hostname"}, "a lies in '/etc/hostname', which is no file of this"),
        ({"a": 1}, "a lies in 1, which is no file of this"),
        ([], "is no index of safetensors"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, weight_map: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        list(stream_tensors(sharded(tmp_path / "sharded", weight_map)))


def test_an_existing_target_is_left_alone(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ValueError, match="exists already"):
        write_folder(target, stream_tensors(source), source)
    assert list(target.iterdir()) == []


def test_nothing_is_left_when_the_weights_break_off(tmp_path: Path, source: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(stream_tensors(source))[:3]
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        write_folder(tmp_path / "target", broken(), source, max_shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_is_left_when_the_disk_is_full(tmp_path: Path, source: Path) -> None:
    """A limit on file sizes stands in for the disk: writing fails half way through the file."""
    tensors = list(stream_tensors(source))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*File too large"):
            write_folder(tmp_path / "target", tensors, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        write_folder(tmp_path / "target", [], tmp_path)
