"""What a request to the embedded engine may ask: the subset of SGLang's interface that it serves.

Fields, names and nesting are SGLang's (`/generate`, `/update_weights_from_disk`). A field outside
the subset is refused, so that nothing a caller relied on is silently ignored.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron_gmc.rollout.embedded.sampling import SamplingJob


class BadRequestError(ValueError):
    """The request cannot be served; the message says what is wrong with it."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


BodyT = TypeVar("BodyT", bound=_Body)


class SamplingParamsBody(_Body):
    """`sampling_seed` is an integer per prompt; it makes the samples of the prompt repeatable."""

    temperature: float = Field(gt=0, allow_inf_nan=False)
    max_new_tokens: int = Field(ge=1)
    sampling_seed: int = Field(ge=0, lt=2**63)
    n: int = Field(default=1, ge=1)
    top_p: float = 1.0
    stop_token_ids: list[int] = []

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                "must be 1: a cut distribution's log-probs are not those of the policy"
            )
        return value


class GenerateBody(_Body):
    """`POST /generate`. Prompts are token ids; `sampling_params` is one, or one per prompt.

    As in SGLang, a list of parameters lets each prompt have its own `sampling_seed`; all else in
    them must be equal, because one request is one batch.
    """

    input_ids: list[list[int]] = Field(min_length=1)
    sampling_params: SamplingParamsBody | list[SamplingParamsBody]
    return_logprob: Literal[True]

    def job(self, *, vocabulary: int, context: int) -> SamplingJob:
        """The request as a sampling job; raises BadRequestError for what the model cannot do."""
        params = self._params_per_prompt()
        first = params[0]
        for prompt, ids in enumerate(self.input_ids):
            self._check_prompt(prompt, ids, vocabulary, context - first.max_new_tokens)
        _check_ids("sampling_params.stop_token_ids", first.stop_token_ids, vocabulary)
        return SamplingJob(
            prompts=self.input_ids,
            seeds=[each.sampling_seed for each in params],
            count=first.n,
            temperature=first.temperature,
            max_new_tokens=first.max_new_tokens,
            stop_token_ids=first.stop_token_ids,
        )

    def _params_per_prompt(self) -> list[SamplingParamsBody]:
        params = self.sampling_params
        if isinstance(params, SamplingParamsBody):
            return [params] * len(self.input_ids)
        if len(params) != len(self.input_ids):
            raise BadRequestError(
                f"sampling_params: {len(params)} entries for {len(self.input_ids)} prompts"
            )
        shared = params[0].model_dump(exclude={"sampling_seed"})
        if any(each.model_dump(exclude={"sampling_seed"}) != shared for each in params):
            raise BadRequestError("sampling_params: entries may differ in sampling_seed alone")
        return params

    @staticmethod
    def _check_prompt(prompt: int, ids: list[int], vocabulary: int, room: int) -> None:
        if not ids:
            raise BadRequestError(f"input_ids[{prompt}] is empty")
        if len(ids) > room:
            raise BadRequestError(
                f"input_ids[{prompt}] has {len(ids)} tokens; the context leaves room for {room}"
                " beside max_new_tokens"
            )
        _check_ids(f"input_ids[{prompt}]", ids, vocabulary)


class UpdateWeightsBody(_Body):
    """`POST /update_weights_from_disk`. A version is a number, sent as text as in SGLang."""

    model_path: str = Field(min_length=1)
    weight_version: str = Field(pattern=r"^\d{1,18}$")


def parse(body_class: type[BodyT], content: bytes) -> BodyT:
    """Validate a JSON body; raises BadRequestError naming the first field that is wrong."""
    try:
        return body_class.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise BadRequestError(f"{field}: {first['msg']}") from error


def _check_ids(field: str, ids: list[int], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise BadRequestError(
                f"{field}: token id {token} is outside the vocabulary of {vocabulary}"
            )
