"""Tokens and log-probs of the embedded engine's sampler, against transformers' plain forward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megatron_gmc.rollout.embedded import sampling
from megatron_gmc.rollout.embedded.sampling import (
    NonFiniteLogProbError,
    Samples,
    SamplingJob,
    draw,
    sample,
)
from megatron_gmc.rollout.embedded.weights import load_folder
from tests.rollout.models import oracle_log_probs, oracle_model, save_tiny_model

PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (3, 2, 1))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_folder(folder)


def job(**changes: object) -> SamplingJob:
    base = SamplingJob(
        prompts=PROMPTS,
        seeds=(10, 11, 12, 13),
        count=5,
        temperature=1.0,
        max_new_tokens=12,
        stop_token_ids=(0, 7, 9),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def row(samples: Samples, index: int) -> list[int]:
    tokens: list[int] = samples.tokens[index, : samples.lengths[index]].tolist()
    return tokens


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_are_those_of_the_tempered_model(
    folder: Path, model: PreTrainedModel, temperature: float
) -> None:
    """T1, T3: padded prompts in one batch, rows that leave it, against unpadded sequences."""
    samples = sample(model, job(temperature=temperature))
    oracle = oracle_model(folder)
    for index in range(len(PROMPTS) * 5):
        response = row(samples, index)
        expected = oracle_log_probs(oracle, PROMPTS[index // 5], response, temperature)
        found = samples.log_probs[index, : len(response)].double()
        assert (found - expected).abs().max() <= 1e-5


def test_a_row_ends_at_its_first_stop_token(model: PreTrainedModel) -> None:
    """T5: any of several stop ids ends a row, is part of it, and is told from running out."""
    samples = sample(model, job(count=40))
    ends = set()
    for index in range(160):
        response = row(samples, index)
        assert not set(response[:-1]) & {0, 7, 9}
        assert bool(samples.stopped[index]) == (response[-1] in {0, 7, 9})
        if samples.stopped[index]:
            ends.add(response[-1])
        else:
            assert len(response) == 12
    assert ends == {0, 7, 9}
    assert not samples.stopped.all()


def test_without_stop_tokens_every_row_runs_to_the_limit(model: PreTrainedModel) -> None:
    samples = sample(model, job(stop_token_ids=()))
    assert samples.lengths.tolist() == [12] * 20
    assert not samples.stopped.any()


def test_one_job_gives_the_same_bits_twice(model: PreTrainedModel) -> None:
    first, second = sample(model, job()), sample(model, job())
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.log_probs, second.log_probs)


def test_samples_depend_on_their_own_seed_and_prompt_alone(model: PreTrainedModel) -> None:
    together = sample(model, job())
    for place, prompt in enumerate(PROMPTS):
        alone = sample(model, job(prompts=(prompt,), seeds=(10 + place,)))
        for member in range(5):
            index = 5 * place + member
            assert row(alone, member) == row(together, index)
            length = int(alone.lengths[member])
            torch.testing.assert_close(
                alone.log_probs[member, :length],
                together.log_probs[index, :length],
                atol=1e-5,
                rtol=0,
            )


def test_batches_are_cut_without_changing_samples(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sample(model, job())
    monkeypatch.setattr(sampling, "MAX_ROWS", 10)  # two prompts of five a batch
    cut = sample(model, job())
    assert torch.equal(whole.tokens, cut.tokens)
    assert torch.equal(whole.lengths, cut.lengths)
    monkeypatch.setattr(sampling, "MAX_ROWS", 2)  # fewer than one prompt's samples
    assert torch.equal(whole.tokens, sample(model, job()).tokens)


def test_seeds_differ_beyond_32_bits(model: PreTrainedModel) -> None:
    low = sample(model, job(prompts=PROMPTS[:1], seeds=(5,)))
    high = sample(model, job(prompts=PROMPTS[:1], seeds=(5 + 2**32,)))
    assert not torch.equal(low.tokens, high.tokens)


def test_frequencies_match_exact_probabilities(tmp_path: Path) -> None:
    """Pearson's chi-square over all pairs of two tokens, vocabulary 6, temperature 0.7."""
    folder = save_tiny_model(tmp_path, seed=3, vocabulary=6)
    count, temperature = 20_000, 0.7
    samples = sample(
        load_folder(folder),
        SamplingJob(((1, 2),), (77,), count, temperature, 2, stop_token_ids=()),
    )
    pairs = samples.tokens[:, 0] * 6 + samples.tokens[:, 1]
    observed = torch.bincount(pairs, minlength=36).double()

    def chi_square(at: float) -> float:
        oracle = oracle_model(folder)
        probabilities = torch.tensor(
            [
                oracle_log_probs(oracle, (1, 2), (first, second), at).sum().exp()
                for first in range(6)
                for second in range(6)
            ],
            dtype=torch.float64,
        )
        assert math.isclose(probabilities.sum().item(), 1, abs_tol=1e-6)
        expected = count * probabilities
        return ((observed - expected).square() / expected).sum().item()

    quantile = 66.62  # 0.999 quantile, 35 degrees of freedom
    assert chi_square(temperature) < quantile
    assert chi_square(1.0) > 10 * quantile  # so the test can tell temperatures apart


def test_draw_inverts_the_distribution_function() -> None:
    """Boundaries of the cumulative sum, with impossible tokens first, in between and last."""
    probability = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    token, log_prob = draw(probability.log().expand(6, -1), 1.0, uniform)
    assert token.tolist() == [1, 1, 3, 3, 4, 4]
    torch.testing.assert_close(log_prob, probability[token].log())


def test_a_broken_model_is_named_and_not_sampled_from(folder: Path) -> None:
    broken = load_folder(folder)
    with torch.no_grad():
        broken.get_input_embeddings().weight[4, 0] = math.nan
    with pytest.raises(NonFiniteLogProbError, match="not finite"):
        sample(broken, job())
