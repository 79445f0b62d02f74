"""The Megatron policy against transformers' Qwen3, on real gloo groups of every mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import stream_tensors, write_folder
from megatron_gmc.convert.mapping import layouts, padded_vocab_size
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import initial_weights, load_weights, named_weights
from tests.distributed import run_ranks
from tests.learner.inputs import TEMPERATURE, log_prob_input, model_input, model_rows
from tests.qwen3 import VOCABULARY, save_tiny_qwen3, tiny_qwen3

# world size → meshes, tensor x pipeline; what is left is data parallel.
MESHES = {3: ["1x3"], 4: ["1x1", "2x1", "1x2", "2x2", "4x1"]}
RUNS = [(world, mesh) for world, meshes in MESHES.items() for mesh in meshes]
KINDS = ("tied", "untied")


def run_id(run: tuple[int, str]) -> str:
    return f"{run[1]}-of-{run[0]}"


each_run = pytest.mark.parametrize("run", RUNS, ids=run_id)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One run of the ranks for each world size; its folder holds what each rank saw."""
    folders = {}
    for world, meshes in MESHES.items():
        folder = folders[world] = tmp_path_factory.mktemp(f"world{world}")
        for kind in KINDS:
            save_tiny_qwen3(folder / kind, tied=kind == "tied")
        run_ranks("tests.learner.workers", "check_meshes", world, str(folder), *meshes)
    return folders


def seen(worlds: dict[int, Path], run: tuple[int, str], what: str) -> list[dict[str, object]]:
    """What each rank saved, an empty record for a rank that saved nothing."""
    world, mesh = run
    files = [worlds[world] / f"{what}-{mesh}.rank{rank}.pt" for rank in range(world)]
    return [torch.load(f) if f.exists() else {} for f in files]


def sizes(run: tuple[int, str]) -> tuple[int, int]:
    tensor, pipeline = (int(size) for size in run[1].split("x"))
    return tensor, pipeline


def reference(kind: str) -> Qwen3ForCausalLM:
    return tiny_qwen3(tied=kind == "tied")


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[n], right[n]) and left[n].dtype == right[n].dtype for n in left)


@each_run
@each_kind
def test_logits_are_those_of_transformers(
    worlds: dict[int, Path], run: tuple[int, str], kind: str
) -> None:
    """C1, C3, C5: tied or not, 8 heads in 4 groups of size 16 at hidden 32."""
    tokens, _ = model_input()
    with torch.no_grad():
        expected = reference(kind)(tokens).logits
    tensor, _ = sizes(run)
    parts = [record["logits"] for record in seen(worlds, run, kind) if "logits" in record]
    assert len(parts) == run[0] // sizes(run)[1]  # the ranks of the last stage
    for first in range(0, len(parts), tensor):
        logits = torch.cat(parts[first : first + tensor], -1)
        assert logits.shape[-1] == padded_vocab_size(VOCABULARY, tensor)
        torch.testing.assert_close(logits[..., :VOCABULARY], expected, rtol=0, atol=1e-5)


@each_run
@each_kind
def test_log_probs_and_their_gradient_are_those_of_transformers(
    worlds: dict[int, Path], run: tuple[int, str], kind: str
) -> None:
    """T8, C1, S4: vocabulary 101; every parameter's gradient, a tied one counted once."""
    (tokens, _), (rows, targets, weights) = model_input(), model_rows()
    model = reference(kind)
    logits = model(tokens).logits[rows] / TEMPERATURE
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    (weights * expected).sum().backward()
    records = seen(worlds, run, kind)
    for record in records:
        if "log_probs" in record:
            torch.testing.assert_close(record["log_probs"], expected, rtol=0, atol=1e-5)
    gradient = records[0]["gradient"]
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert gradient.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            gradient[name], tensor, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@each_run
@each_kind
def test_weights_come_out_as_they_went_in(
    worlds: dict[int, Path], run: tuple[int, str], kind: str
) -> None:
    """C1, C2, invariant 13: transformers' own key set, bit exact, on global rank 0 alone."""
    expected = {name: p.detach() for name, p in reference(kind).named_parameters()}
    first, *others = seen(worlds, run, kind)
    assert_equal(first["weights"], expected)
    assert_equal(first["halves"], {name: t.bfloat16() for name, t in expected.items()})
    assert not any(key in other for other in others for key in ("weights", "halves", "gradient"))


@each_run
@each_kind
def test_initial_weights_do_not_depend_on_the_mesh(
    worlds: dict[int, Path], run: tuple[int, str], kind: str
) -> None:
    shape = load_shape(worlds[3] / kind)
    assert_equal(seen(worlds, run, kind)[0]["initial"], dict(initial_weights(shape, seed=7)))


@each_run
@each_kind
def test_sharded_parameters_are_marked(
    worlds: dict[int, Path], run: tuple[int, str], kind: str
) -> None:
    """S3: by its mark Megatron knows whether a gradient's norm is summed over tensor ranks."""
    expected = {
        parameter: layout.split_dim is not None
        for layout in layouts(load_shape(worlds[3] / kind)).values()
        for parameter in layout.parameters
    }
    for record in seen(worlds, run, kind):
        marks = record["sharded"]
        assert marks == {name: expected[name] for name in marks}


@each_run
def test_log_probs_of_spread_logits(worlds: dict[int, Path], run: tuple[int, str]) -> None:
    """T8, R9: against log_softmax in float64; padding columns hold 1e4 and change nothing."""
    tensor, _ = sizes(run)
    records = seen(worlds, run, "log_probs")
    for name, case in log_prob_input().items():
        logits = case.logits.double().requires_grad_()
        expected = (logits / case.temperature).log_softmax(-1)
        expected = expected.gather(-1, case.targets[:, None])[:, 0]
        (expected * case.weights).sum().backward()
        assert logits.grad is not None
        width = records[0][name][1].shape[-1]
        wanted = torch.nn.functional.pad(logits.grad, (0, width * tensor - case.vocab_size))
        precision = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
        for rank, record in enumerate(records):
            log_probs, gradient, untouched = record[name]
            assert untouched
            assert log_probs.dtype == torch.promote_types(case.logits.dtype, torch.float32)
            close = 1e-12 if name == "double" else 3e-7
            torch.testing.assert_close(log_probs.double(), expected, rtol=close, atol=10 * close)
            part = wanted.chunk(tensor, -1)[rank % tensor] if tensor > 1 else wanted
            atol = precision[case.logits.dtype]
            torch.testing.assert_close(gradient.double(), part, rtol=0, atol=atol)
            start = (rank % tensor) * width
            padding = gradient[..., max(case.vocab_size - start, 0) :]
            assert not padding.any()


@each_run
def test_places_on_the_mesh(worlds: dict[int, Path], run: tuple[int, str]) -> None:
    """Tensor neighbours are adjacent, then data, then pipeline stages."""
    world = run[0]
    tensor, pipeline = sizes(run)
    data = world // (tensor * pipeline)
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
    exported = seen(worlds, (4, "2x1"), "untied")[0]["weights"]
    source = worlds[4] / "untied"
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
        for parameter in model.parameters():
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
        ({"model.norm.bias": torch.zeros(1)}, r"tensor model\.norm\.bias: not part of a Qwen3"),
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
