"""Checkpoints written without megatron, held to what megatron itself loads and saves."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_gmc.convert.dist_checkpoint import read_tensors, stored_dtype, write_checkpoint
from megatron_gmc.convert.dist_metadata import is_checkpoint, read_metadata
from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import TensorFiles, stream_folder
from megatron_gmc.convert.safetensors_stream import Entry
from tests.distributed import run_ranks
from tests.models import save_tiny_model


@pytest.fixture(
    scope="module",
    params=[("qwen3", True), ("qwen3", False), ("qwen2", False), ("qwen3_moe", False)],
    ids=["tied", "untied", "biases", "experts"],
)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied = request.param
    return save_tiny_model(tmp_path_factory.mktemp("source"), family, tied)


@pytest.fixture(scope="module")
def shape(source: Path) -> ModelShape:
    return load_shape(source)


@pytest.fixture(scope="module")
def checkpoint(source: Path, shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, shape, TensorFiles(source).get, torch.float32)
    return folder


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def test_there_and_back(source: Path, shape: ModelShape, checkpoint: Path) -> None:
    assert is_checkpoint(checkpoint)
    assert not is_checkpoint(source)
    assert_same(dict(read_tensors(checkpoint, shape)), load_file(source / "model.safetensors"))


def test_megatron_loads_it_and_we_read_what_megatron_saves(
    source: Path, shape: ModelShape, checkpoint: Path, tmp_path: Path
) -> None:
    """C2: on two tensor ranks, with a vocabulary that both meshes pad differently."""
    run_ranks(
        "tests.convert.checkpoint_worker", "reload", 2, str(source), str(checkpoint), str(tmp_path)
    )
    theirs = load_file(source / "model.safetensors")
    assert_same(load_file(tmp_path / "loaded.safetensors"), theirs)
    assert_same(dict(read_tensors(tmp_path / "saved", shape)), theirs)
    assert set(read_metadata(tmp_path / "saved").state_dict_metadata) == set(
        read_metadata(checkpoint).state_dict_metadata
    )


def test_another_dtype(source: Path, shape: ModelShape, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shape, TensorFiles(source).get, torch.bfloat16)
    assert stored_dtype(tmp_path, shape) == torch.bfloat16
    rounded = {n: t.bfloat16() for n, t in load_file(source / "model.safetensors").items()}
    assert_same(dict(read_tensors(tmp_path, shape)), rounded)


@pytest.mark.parametrize("max_file_bytes", [2**30, 20_000, 1])
def test_a_streamed_folder_is_what_the_library_reads(
    source: Path, tmp_path: Path, max_file_bytes: int
) -> None:
    theirs = load_file(source / "model.safetensors")
    entries = [Entry(name, tuple(tensor.shape)) for name, tensor in theirs.items()]
    target = tmp_path / "target"
    stream_folder(target, entries, torch.float32, iter(theirs.items()), source, max_file_bytes)
    ours: dict[str, Tensor] = {}
    for file in target.glob("*.safetensors"):
        ours |= load_file(file)
    assert_same(ours, theirs)
    files = TensorFiles(target)
    assert_same({name: files.get(name) for name in theirs}, theirs)


class Runs:
    """What a hostile pickle holds: it runs a command when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def copied(checkpoint: Path, target: Path) -> Path:
    target.mkdir()
    for file in checkpoint.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_an_index_that_would_run_something(
    shape: ModelShape, checkpoint: Path, tmp_path: Path
) -> None:
    """C7."""
    mark, folder = tmp_path / "ran", copied(checkpoint, tmp_path / "hostile")
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(ValueError, match=r"\.metadata: it would run posix\.system"):
        list(read_tensors(folder, shape))
    assert not mark.exists()


class Reads:
    """Not a call of its own, but the way to one: an attribute of a class that may be named."""

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (torch.Size, "__init_subclass__")


def test_only_members_of_enums_are_read_by_name(
    shape: ModelShape, checkpoint: Path, tmp_path: Path
) -> None:
    """Python 3.11.2 pickles a member of an enum as getattr of its class and name."""

    class Named:
        def __reduce__(self) -> tuple[object, tuple[object, str]]:
            return getattr, (WriteItemType, "SHARD")

    folder = copied(checkpoint, tmp_path / "hostile")
    (folder / ".metadata").write_bytes(pickle.dumps(Reads()))
    with pytest.raises(ValueError, match=r"it would read '__init_subclass__'"):
        list(read_tensors(folder, shape))
    (folder / ".metadata").write_bytes(pickle.dumps(Named()))
    with pytest.raises(ValueError, match=r"is no checkpoint index: it holds a WriteItemType"):
        list(read_tensors(folder, shape))


def test_an_object_that_would_run_something(
    shape: ModelShape, checkpoint: Path, tmp_path: Path
) -> None:
    """C7: megatron would unpickle the objects beside the tensors as well."""
    mark, folder = tmp_path / "ran", copied(checkpoint, tmp_path / "hostile")
    index = read_metadata(folder)
    key = next(key for key in index.storage_data if "_extra_state" in key.fqn)
    content = io.BytesIO()
    torch.save(Runs(mark), content)
    place = index.storage_data[key]
    index.storage_data[key] = type(place)("hostile.bin", 0, len(content.getvalue()))
    (folder / "hostile.bin").write_bytes(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"_extra_state.* is refused: "):
        list(read_tensors(folder, shape))
    assert not mark.exists()
    torch.save(Runs(mark), folder / "common.pt")
    with pytest.raises(ValueError, match=r"common\.pt is refused: "):
        read_metadata(folder)
    assert not mark.exists()


def test_damage_is_named(shape: ModelShape, checkpoint: Path, tmp_path: Path) -> None:
    short = copied(checkpoint, tmp_path / "short")
    (data,) = short.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 3])
    with pytest.raises(ValueError, match=r"is damaged|is refused"):
        list(read_tensors(short, shape))
    cut = copied(checkpoint, tmp_path / "cut")
    (cut / ".metadata").write_bytes((cut / ".metadata").read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot read the checkpoint index"):
        list(read_tensors(cut, shape))
    index = read_metadata(checkpoint)
    del index.state_dict_metadata["decoder.final_layernorm.weight"]
    lost = copied(checkpoint, tmp_path / "lost")
    (lost / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"has no tensor decoder\.final_layernorm\.weight"):
        list(read_tensors(lost, shape))


def test_a_folder_without_a_checkpoint(shape: ModelShape, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no Megatron checkpoint"):
        list(read_tensors(tmp_path, shape))
