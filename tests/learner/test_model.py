"""The Megatron policy against transformers' models, on real gloo groups of every mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_gmc.convert.experts import separated
from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import stream_tensors, write_folder
from megatron_gmc.convert.mapping import layouts, padded_vocab_size
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import initial_weights, load_weights, named_weights
from tests.distributed import run_ranks
from tests.learner.inputs import LENGTHS, TEMPERATURE, loss_tokens, pack_tokens
from tests.models import save_tiny_model, tiny_model
from tests.qwen3 import VOCABULARY, save_tiny_qwen3


class Run(NamedTuple):
    """One model on one mesh, named as `workers.create_mesh` reads it; data takes what is left."""

    mesh: str
    family: str
    tied: bool
    world: int = 4

    @property
    def model(self) -> str:
        return f"{self.family}-{'tied' if self.tied else 'untied'}"

    def size(self, axis: str) -> int:
        _, found, rest = self.mesh.partition(axis)
        return int(rest[0]) if found else 1


# What a mesh does, it does to every family; what is a family's own is shown on the meshes that
# cut it. Tied and untied differ in the first and last pipeline stage and in the vocabulary's cut.
RUNS = [
    *(Run("p3", "qwen3", tied, world=3) for tied in (True, False)),
    *(
        Run(mesh, "qwen3", tied)
        for mesh in ("t1", "t2", "p2", "t2p2", "t4", "t2s", "p2v3")
        for tied in (True, False)
    ),
    Run("t2p2", "qwen2", True),
    Run("p2v3", "qwen2", False),
    Run("t2s", "qwen2", False),
    Run("t2p2", "llama", True),
    Run("t2", "llama3", False),
    Run("p2v3", "llama3", True),
    *(Run(mesh, "qwen3_moe", tied) for mesh in ("e2", "t2e2s", "p2e2") for tied in (True, False)),
    Run("t1", "qwen3_moe", True),
    Run("e4", "qwen3_moe", False),
    Run("p2v3e2", "qwen3_moe", True),
    Run("t2p2s", "qwen3_moe", False),
    Run("e2", "qwen3_moe_plain_gates", False),
]
each_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.mesh}-{run.model}")
each_mesh = pytest.mark.parametrize(
    "run", {run.mesh: run for run in RUNS}.values(), ids=lambda run: run.mesh
)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One run of the ranks for each world size; its folder holds what each rank saw."""
    folders = {}
    for world in sorted({run.world for run in RUNS}):
        folder = folders[world] = tmp_path_factory.mktemp(f"world{world}")
        runs = sorted(run for run in RUNS if run.world == world)
        for run in runs:
            if not (folder / run.model).exists():
                save_tiny_model(folder / run.model, run.family, run.tied)
        names = [f"{run.model}:{run.mesh}" for run in runs]
        run_ranks("tests.learner.workers", "check_models", world, str(folder), *names, timeout=300)
    return folders


def seen(worlds: dict[int, Path], run: Run, what: str | None = None) -> list[dict[str, object]]:
    """What each rank saved, of the run's model or of `what`."""
    folder = worlds[run.world]
    return [
        torch.load(folder / f"{what or run.model}-{run.mesh}.rank{rank}.pt")
        for rank in range(run.world)
    ]


def reference(run: Run) -> PreTrainedModel:
    """transformers' model in float64."""
    return tiny_model(run.family, run.tied).double()


def logits_of(model: PreTrainedModel) -> Tensor:
    """[24, vocabulary], each trajectory of the pack on its own."""
    parts = [model(tokens[None]).logits[0] for tokens in pack_tokens().split(LENGTHS)]
    return torch.cat(parts)


def by_matrix(tensors: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """With a mixture's experts one by one."""
    return {n: t for pair in tensors.items() for n, t in separated(*pair, shape)}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[n], right[n]) and left[n].dtype == right[n].dtype for n in left)


@each_run
def test_logits_are_those_of_transformers(worlds: dict[int, Path], run: Run) -> None:
    """C1, C3, C5, C6: 8 heads in 4 groups of size 16 at hidden 32; experts on 1, 2 and 4 ranks."""
    with torch.no_grad():
        expected = logits_of(reference(run))
    tensor = run.size("t")
    parts = [record["logits"] for record in seen(worlds, run) if "logits" in record]
    assert len(parts) == run.world // run.size("p")  # the ranks of the last stage
    for first in range(0, len(parts), tensor):
        logits = torch.cat(parts[first : first + tensor], -1)
        assert logits.shape[-1] == padded_vocab_size(VOCABULARY, tensor)
        torch.testing.assert_close(logits[:, :VOCABULARY].double(), expected, rtol=0, atol=1e-5)


@each_run
def test_log_probs_and_their_gradient_are_those_of_transformers(
    worlds: dict[int, Path], run: Run
) -> None:
    """T8, C1, S4, C6: every parameter's gradient, a tied one counted once."""
    at_K, target_K, weight_K = loss_tokens()
    model, shape = reference(run), load_shape(worlds[run.world] / run.model)
    log_p = (logits_of(model)[at_K] / TEMPERATURE).log_softmax(-1)
    expected = log_p.gather(-1, target_K[:, None])[:, 0]
    (weight_K * expected).sum().backward()
    records = seen(worlds, run)
    for record in records:
        if "log_probs" in record:
            torch.testing.assert_close(
                record["log_probs"].double(), expected.detach(), rtol=0, atol=1e-5
            )
    gradient = records[0]["gradient"]
    wanted = by_matrix({name: p.grad for name, p in model.named_parameters()}, shape)
    assert gradient.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = float((gradient[name].double() - tensor).abs().max())
        assert error <= 1e-5 * float(tensor.abs().max()), name


@each_run
def test_weights_come_out_as_they_went_in(worlds: dict[int, Path], run: Run) -> None:
    """C1, C2, C6, invariant 13: the folder's own key set, bit exact, on global rank 0 alone."""
    expected = weights_of(worlds[run.world] / run.model)
    first, *others = seen(worlds, run)
    assert_equal(first["weights"], expected)
    assert_equal(first["halves"], {name: t.bfloat16() for name, t in expected.items()})
    assert not any(key in other for other in others for key in ("weights", "halves", "gradient"))


@each_run
def test_initial_weights_do_not_depend_on_the_mesh(worlds: dict[int, Path], run: Run) -> None:
    shape = load_shape(worlds[run.world] / run.model)
    assert_equal(seen(worlds, run)[0]["initial"], dict(initial_weights(shape, seed=7)))


@each_run
def test_sharded_parameters_are_marked(worlds: dict[int, Path], run: Run) -> None:
    """S3: by its mark Megatron knows whether a gradient's norm is summed over tensor ranks."""
    expected = {
        parameter: layout.split_dim is not None
        for layout in layouts(load_shape(worlds[run.world] / run.model)).values()
        for parameter in layout.parameters
    }
    for record in seen(worlds, run):
        marks = record["sharded"]
        assert marks == {name: expected[name] for name in marks}


@each_mesh
def test_places_on_the_mesh(worlds: dict[int, Path], run: Run) -> None:
    """Tensor neighbours are adjacent, then data, then pipeline stages."""
    tensor, pipeline = run.size("t"), run.size("p")
    data = run.world // (tensor * pipeline)
    for rank, place in enumerate(seen(worlds, run, "place")):
        t, d, p = rank % tensor, rank // tensor % data, rank // (tensor * data)
        assert place == {
            "tensor": (t, tensor),
            "pipeline": (p, pipeline),
            "data": (d, data),
            "stage": (p == 0, p == pipeline - 1),
            "groups": [
                [rank - t + i for i in range(tensor)],
                [t + tensor * (d + data * i) for i in range(pipeline)],
                [t + tensor * (i + data * p) for i in range(data)],
                [i + tensor * (d + data * j) for j in range(pipeline) for i in range(tensor)],
            ],
        }


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.create(tensor=1, pipeline=1)
    yield mesh
    mesh.close()


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return save_tiny_qwen3(tmp_path / "untied", tied=False)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(stream_tensors(folder))


def test_exported_at_two_tensor_ranks_loads_at_one(
    worlds: dict[int, Path], mesh: Mesh, tmp_path: Path
) -> None:
    """C2: vocabulary 101 through TP 2, a folder on disk, and TP 1."""
    exported = seen(worlds, Run("t2", "qwen3", tied=False))[0]["weights"]
    source = worlds[4] / "qwen3-untied"
    write_folder(tmp_path / "exported", exported.items(), source)
    shape = load_shape(tmp_path / "exported")
    model = build_model(shape, mesh)
    load_weights(model, shape, mesh, stream_tensors(tmp_path / "exported"))
    assert_equal(dict(named_weights(model, shape, mesh)), weights_of(source))


def test_exported_weights_do_not_follow_the_model(mesh: Mesh, untied: Path) -> None:
    shape = load_shape(untied)
    model = build_model(shape, mesh)
    load_weights(model, shape, mesh, stream_tensors(untied))
    exported = dict(named_weights(model, shape, mesh))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.zero_()
    assert_equal(exported, weights_of(untied))


def test_a_tied_folder_may_hold_an_equal_output_layer(mesh: Mesh, tmp_path: Path) -> None:
    source = save_tiny_qwen3(tmp_path / "tied", tied=True)
    shape, tensors = load_shape(source), weights_of(source)
    model = build_model(shape, mesh)
    copy = tensors["model.embed_tokens.weight"].clone()
    for pairs in (
        [*tensors.items(), ("lm_head.weight", copy)],
        [("lm_head.weight", copy), *tensors.items()],
    ):
        load_weights(model, shape, mesh, pairs)
        assert_equal(dict(named_weights(model, shape, mesh)), tensors)
        with pytest.raises(ValueError, match=r"embed_tokens.* and lm_head\.weight: they differ"):
            load_weights(model, shape, mesh, [(n, t + (n == "lm_head.weight")) for n, t in pairs])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"model.norm.weight": None}, r"1 of the model's tensors are missing, first model\.norm"),
        ({"model.norm.bias": torch.zeros(1)}, r"tensor model\.norm\.bias: not part of the model"),
        ({"model.layers.6.mlp.up_proj.weight": torch.zeros(1)}, r"layers\.6.*of 6 layers"),
        (
            {"lm_head.weight": torch.zeros(102, 32)},
            r"lm_head\.weight: its shape is \(102, 32\), and by config\.json it should be \(101, 3",
        ),
    ],
    ids=["missing", "unexpected", "layer", "shape"],
)
def test_tensors_that_do_not_fit_are_named(
    mesh: Mesh, untied: Path, change: dict[str, Tensor | None], fault: str
) -> None:
    shape: ModelShape = load_shape(untied)
    changed = {n: t for n, t in (weights_of(untied) | change).items() if t is not None}
    with pytest.raises(ValueError, match=fault):
        load_weights(build_model(shape, mesh), shape, mesh, changed.items())


def test_a_repeated_tensor_is_named(mesh: Mesh, untied: Path) -> None:
    shape, pairs = load_shape(untied), list(stream_tensors(untied))
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight: given twice"):
        load_weights(build_model(shape, mesh), shape, mesh, [*pairs, pairs[0]])


def test_a_mixture_loads_as_transformers_holds_it_in_memory(mesh: Mesh, tmp_path: Path) -> None:
    """C6: stacked experts and single ones give the same model."""
    source = save_tiny_model(tmp_path / "mixture", "qwen3_moe", tied=False)
    shape = load_shape(source)
    model = build_model(shape, mesh)
    stacked = tiny_model("qwen3_moe", tied=False).state_dict()
    assert stacked.keys() != weights_of(source).keys()
    load_weights(model, shape, mesh, stacked.items())
    assert_equal(dict(named_weights(model, shape, mesh)), weights_of(source))


def test_initial_biases_are_zero(tmp_path: Path) -> None:
    shape = load_shape(save_tiny_model(tmp_path / "qwen2", "qwen2", tied=True))
    biases = [t for name, t in initial_weights(shape, seed=0) if name.endswith("bias")]
    assert len(biases) == 3 * shape.layers
    assert not any(bias.any() for bias in biases)


def test_initial_weights_are_drawn_as_transformers_draws_them() -> None:
    """Normal with the config's standard deviation, norms at 1; another seed, other weights."""
    shape = ModelShape(
        layers=1,
        hidden=64,
        ffn=128,
        heads=4,
        query_groups=2,
        head_size=16,
        vocab_size=500,
        max_positions=8,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        tied=False,
        initializer_range=0.02,
    )
    weights = dict(initial_weights(shape, seed=0))
    for name, tensor in weights.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            error = 0.02 / tensor.numel() ** 0.5
            assert abs(float(tensor.mean())) < 5 * error, name
            assert abs(float(tensor.std()) - 0.02) < 5 * error, name
    other = dict(initial_weights(shape, seed=1))
    matrices = [name for name in weights if "norm" not in name]
    assert not any(torch.equal(weights[n], other[n]) for n in matrices)
    assert len({float(weights[n].flatten()[0]) for n in matrices}) == len(matrices)
