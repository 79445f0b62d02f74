"""Log-probs and entropies from hidden states against plain torch in float64, on tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gmc.learner import log_probs, output_head
from megatron_gmc.learner.log_probs import token_scores
from megatron_gmc.learner.mesh import Mesh
from tests.distributed import run_ranks
from tests.learner.head_inputs import (
    HIDDEN,
    PADDED,
    TOKENS,
    HeadCase,
    head_cases,
    qwen3_tokens,
)
from tests.learner.head_workers import Result, head_model, results
from tests.models import VOCABULARY, tiny_model

MESHES = ("1", "2", "2sp")
# Of the largest value: what the case's dtype, and blocks added up in it, leave.
PRECISION = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def usual_blocks() -> Iterator[None]:
    usual = dict(log_probs.BLOCK_ELEMENTS)
    yield
    log_probs.BLOCK_ELEMENTS.update(usual)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Result]]]:
    """What each rank of each mesh found."""
    folder = tmp_path_factory.mktemp("heads")
    run_ranks("tests.learner.head_workers", "check", 2, str(folder), "2", "2sp")
    mesh = Mesh.create(1, 1)
    found = {"1": [results(mesh)]}
    mesh.close()
    for name in ("2", "2sp"):
        found[name] = [torch.load(folder / f"{name}.rank{rank}.pt") for rank in range(2)]
    return found


def whole(case: HeadCase, *, entropy: bool) -> Result:
    """The plain way: all logits, their softmax, and autograd through them, in float64."""
    hidden = case.hidden.double().requires_grad_()
    weight = case.weight.double().requires_grad_()
    columns = weight[: case.vocab_size]
    log_p = (hidden[0, case.at_K] @ columns.t() / case.temperature).log_softmax(-1)
    log_prob_K = log_p.gather(-1, case.target_K[:, None])[:, 0]
    entropy_K = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    loss = (log_prob_K * case.log_prob_gradient_K).sum()
    if entropy:
        loss = loss + (entropy_K * case.entropy_gradient_K).sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "log_prob": log_prob_K.detach(),
        "entropy": entropy_K.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def assert_close(value: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    atol = PRECISION[dtype] * max(scale, 1.0)
    torch.testing.assert_close(value.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", head_cases())
@pytest.mark.parametrize("mesh", MESHES)
def test_scores_are_those_of_whole_logits(
    seen: dict[str, list[dict[str, Result]]], mesh: str, name: str, entropy: bool
) -> None:
    """T8: padding columns of enormous logits change nothing. R9: impossible tokens (−inf)."""
    case = head_cases()[name]
    expected, dtype = whole(case, entropy=entropy), case.weight.dtype
    ranks = [record[name] for record in seen[mesh]]
    suffix = " with entropy" if entropy else ""
    for record in ranks:
        assert record[f"log_prob{suffix}"].dtype == torch.promote_types(dtype, torch.float32)
        assert_close(record[f"log_prob{suffix}"], expected["log_prob"], dtype)
        if entropy:
            assert_close(record["entropy"], expected["entropy"], dtype)
    if name == "impossible":
        return  # a head that holds −inf has no gradient to compare with
    weight = torch.cat([record[f"weight{suffix}"] for record in ranks])
    assert_close(weight, expected["weight"], dtype)
    assert not weight[case.vocab_size :].any()
    hidden = [record[f"hidden{suffix}"] for record in ranks]
    for part in [torch.cat(hidden, 1)] if mesh.endswith("sp") else hidden:
        assert_close(part, expected["hidden"], dtype)


def test_an_entropy_over_impossible_tokens(seen: dict[str, list[dict[str, Result]]]) -> None:
    """R9: it equals the entropy over the rest of the vocabulary."""
    case = head_cases()["impossible"]
    finite = case.weight[: case.vocab_size, 0] != -torch.inf
    logits = case.hidden[0, case.at_K] @ case.weight[: case.vocab_size][finite].t()
    expected = torch.distributions.Categorical(logits=logits / case.temperature).entropy()
    for ranks in seen.values():
        for record in ranks:
            torch.testing.assert_close(record["impossible"]["entropy"], expected)


@pytest.mark.parametrize("mesh", MESHES)
def test_whole_logits_for_checks(seen: dict[str, list[dict[str, Result]]], mesh: str) -> None:
    case = head_cases()["plain"]
    logits = torch.cat([record["plain"]["logits"] for record in seen[mesh]], -1)
    torch.testing.assert_close(logits, case.hidden @ case.weight.t())


@pytest.mark.parametrize("mesh", MESHES)
def test_scores_are_those_of_transformers(
    seen: dict[str, list[dict[str, Result]]], mesh: str
) -> None:
    """T8: Qwen3 in float64, vocabulary 101, at one tensor rank and at two."""
    case, model = head_cases()["plain"], tiny_model("qwen3", tied=False).double()
    output = model(qwen3_tokens(), output_hidden_states=True)
    hidden = output.hidden_states[-1]
    hidden.retain_grad()
    log_p = (output.logits[0, case.at_K] / case.temperature).log_softmax(-1)
    expected = log_p.gather(-1, case.target_K[:, None])[:, 0]
    (expected * case.log_prob_gradient_K).sum().backward()
    ranks = [record["qwen3"] for record in seen[mesh]]
    weight = torch.cat([record["weight"] for record in ranks])[:VOCABULARY]
    parts = [record["hidden"] for record in ranks]
    if mesh.endswith("sp"):
        parts = [torch.cat(parts, 1)] * 2
    for record, part in zip(ranks, parts, strict=True):
        assert_close(record["log_prob"], expected.detach(), torch.float64)
        assert_close(part, hidden.grad, torch.float64)
    assert_close(weight, model.lm_head.weight.grad, torch.float64)


class Largest(TorchDispatchMode):
    """The most elements that a tensor made meanwhile has."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(options or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // 8)
        return result


def test_the_whole_logits_never_exist(one_rank: Mesh) -> None:
    """Neither in forward nor in backward is there a tensor of tokens × vocabulary."""
    tokens = 400
    log_probs.BLOCK_ELEMENTS["cpu"] = 20 * tokens
    model = head_model(one_rank, tied=False)
    with torch.no_grad():
        output_head.head_weight(model).normal_()
    hidden = torch.randn(1, tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    at_K = torch.arange(tokens)
    with Largest() as largest:
        scores = token_scores(
            model,
            hidden,
            at_K,
            at_K % PADDED,
            temperature=1.0,
            vocab_size=PADDED,
            mesh=one_rank,
            entropy=True,
        )
        assert scores.entropy_K is not None
        (scores.log_prob_K + scores.entropy_K).sum().backward()
    assert largest.elements == tokens * HIDDEN < tokens * PADDED


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_hands_out_hidden_states(one_rank: Mesh, tied: bool) -> None:
    """Through the head's weight they are the logits of megatron's own model; names stay."""
    torch.manual_seed(0)
    model = head_model(one_rank, tied=tied)
    tokens = torch.randint(0, PADDED, (2, TOKENS))
    positions = torch.arange(TOKENS).expand(2, -1)
    expected, names = model(tokens, positions, None), set(model.state_dict())
    output_head.install(model)
    hidden = model(tokens, positions, None)
    assert hidden.shape == (2, TOKENS, HIDDEN)
    torch.testing.assert_close(output_head.logits(model, hidden), expected)
    assert set(model.state_dict()) == names
