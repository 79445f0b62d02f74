"""Batched sampling with a KV cache; log-probs are those of the distribution that was sampled.

The forward pass is transformers'; the loop around it is ours because `generate` carries finished
rows to the end of the batch and has one random stream for all rows. Here finished rows leave the
batch, and each prompt has its own stream, so what it samples does not depend on its batch-mates
(beyond the rounding of a matrix product of another size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

MAX_ROWS = 2048  # beyond this a larger batch was no faster: the caches no longer fit the CPU's
MAX_LOGITS = 2**25  # elements of one step's logits; bounds memory for large vocabularies


class NonFiniteLogProbError(ArithmeticError):
    """The model gave a log-prob that is NaN or infinite."""


@dataclass(frozen=True)
class SamplingJob:
    """`count` samples of each prompt, in prompt order. `seeds` has one entry per prompt."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    count: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: Sequence[int]


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows = prompts × count, prompt-major; only the first `lengths` entries of a row are valid.

    tokens int64 [rows, max_new_tokens]; log_probs float32, same shape; lengths int64 [rows];
    stopped bool [rows], True where the last token is one of the stop tokens.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    stopped: Tensor


@torch.inference_mode()
def sample(model: PreTrainedModel, job: SamplingJob) -> Samples:
    """Sample every row of `job`; the same job and weights give the same bits.

    Raises NonFiniteLogProbError when the model's output is not finite.
    """
    vocabulary = model.config.get_text_config().vocab_size
    prompts_per_batch = max(1, min(MAX_ROWS, MAX_LOGITS // vocabulary) // job.count)
    batches = []
    for start in range(0, len(job.prompts), prompts_per_batch):
        chosen = slice(start, start + prompts_per_batch)
        batches.append(_sample_batch(model, job, job.prompts[chosen], job.seeds[chosen]))
    return Samples(
        tokens=torch.cat([batch.tokens for batch in batches]),
        log_probs=torch.cat([batch.log_probs for batch in batches]),
        lengths=torch.cat([batch.lengths for batch in batches]),
        stopped=torch.cat([batch.stopped for batch in batches]),
    )


def _sample_batch(
    model: PreTrainedModel,
    job: SamplingJob,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
) -> Samples:
    rows = len(prompts) * job.count
    uniforms = _uniforms(seeds, job.count, job.max_new_tokens)
    stop = torch.tensor(list(job.stop_token_ids), dtype=torch.int64)
    out = Samples(
        tokens=torch.zeros(rows, job.max_new_tokens, dtype=torch.int64),
        log_probs=torch.zeros(rows, job.max_new_tokens),
        lengths=torch.full((rows,), job.max_new_tokens),
        stopped=torch.zeros(rows, dtype=torch.bool),
    )
    decoder = _Decoder(model, prompts, job.count, job.max_new_tokens)
    logits = decoder.prefill()
    alive = torch.arange(rows)  # the output row of each row still in the batch
    for step in range(job.max_new_tokens):
        token, log_prob = draw(logits, job.temperature, uniforms[alive, step])
        out.tokens[alive, step] = token
        out.log_probs[alive, step] = log_prob
        ended = torch.isin(token, stop)
        if ended.any():
            out.lengths[alive[ended]] = step + 1
            out.stopped[alive[ended]] = True
            keep = (~ended).nonzero().squeeze(1)
            alive, token = alive[keep], token[keep]
            decoder.keep(keep)
        if len(alive) == 0 or step + 1 == job.max_new_tokens:
            break
        logits = decoder.advance(token)
    if not out.log_probs.isfinite().all():
        raise NonFiniteLogProbError("the model's log-probs are not finite")
    return out


def _uniforms(seeds: Sequence[int], count: int, steps: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [len(seeds) * count, steps]: one stream per seed.

    Philox takes all 64 bits of a seed; torch's CPU generator would use the low 32 alone.
    """
    streams = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]
    return torch.from_numpy(np.concatenate([stream.random((count, steps)) for stream in streams]))


def draw(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF draw from softmax(logits / temperature).

    logits [rows, vocabulary], uniform float64 [rows] in [0, 1); returns token int64 [rows] and
    its log-prob float32 [rows]. The cumulative sum is float64: in float32 its rounding would
    be as large as the probabilities of a large vocabulary.
    """
    log_prob = torch.log_softmax(logits.float() / temperature, dim=-1)
    cumulative = log_prob.double().exp_().cumsum(dim=-1)
    # right=True never picks a token of probability 0: its sum equals that of the one before
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    token.clamp_(max=logits.shape[-1] - 1)  # NaN alone gets past the end; refused by the caller
    return token.squeeze(1), log_prob.gather(1, token).squeeze(1)


class _Decoder:
    """The rows of a batch with their cache, one token per row at a time.

    Each prompt is computed once and its cache copied for its samples. Shorter prompts are padded
    on the left; the padding is masked and positions count from a prompt's first token.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int, steps: int
    ) -> None:
        self._model = model
        self._count = count
        self._cache = DynamicCache(config=model.config)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self._cached = int(lengths.max())
        padding = self._cached - lengths
        self._ids = torch.tensor(
            [[0] * (self._cached - len(prompt)) + list(prompt) for prompt in prompts]
        )
        self._position = lengths
        self._mask: Tensor | None = None  # without padding the model's own causal mask is enough
        if padding.any():
            columns = torch.arange(self._cached + steps)
            self._mask = (columns >= padding[:, None]).long()

    def prefill(self) -> Tensor:
        """Logits of each row's first response token, [prompts * count, vocabulary]."""
        positions = torch.arange(self._cached) - (self._cached - self._position)[:, None]
        logits = self._forward(self._ids, positions.clamp_(min=0))
        self._cache.batch_repeat_interleave(self._count)
        self._position = self._position.repeat_interleave(self._count)
        if self._mask is not None:
            self._mask = self._mask.repeat_interleave(self._count, dim=0)
        return logits.repeat_interleave(self._count, dim=0)

    def advance(self, token: Tensor) -> Tensor:
        """Append `token` [rows] and return the logits of the next one, [rows, vocabulary]."""
        self._cached += 1
        logits = self._forward(token[:, None], self._position[:, None])
        self._position = self._position + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self._cache.batch_select_indices(rows)
        self._position = self._position[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[:, : self._cached],
            position_ids=positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits
