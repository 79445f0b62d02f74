"""The arithmetic demo's data, checked by a reader written apart from the script that makes it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tests.tasks.conftest import make_data

SYMBOLS = "0123456789+=>$^_;,|:"
FORMS = (
    r"(\d)\+(\d)\+(\d)=(\d\d)",
    r"(\d)(\d)(\d)=(\d\d)",
    r"(\d)(\d)(\d)(\d\d)",
)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Work:
    """What a demonstration's steps say: (a, b, carry used, sum) from the last digit on."""

    form: int
    separator: str
    steps: list[tuple[int, int, int, int]]
    result: str


def parse(response: str) -> Work:
    work, mark, result = response.partition(">")
    assert mark and re.fullmatch(r"\d{4}", result), response
    if not work:
        return Work(-1, "", [], result)
    for form, pattern in enumerate(FORMS):
        for separator in ";,|:":
            whole = "".join([pattern + re.escape(separator)] * 3)
            if match := re.fullmatch(whole, work):
                digits = [int(group) for group in match.groups()]
                steps = [tuple(digits[place : place + 4]) for place in (0, 4, 8)]
                return Work(form, separator, steps, result)  # type: ignore[arg-type]
    raise AssertionError(f"no notation reads {response!r}")


@pytest.fixture(scope="module")
def demonstrations(arithmetic: Path) -> list[tuple[str, Work]]:
    rows = read(arithmetic / "demonstrations.jsonl")
    return [(row["prompt"], parse(row["response"])) for row in rows]


def test_every_demonstration_is_well_formed(
    arithmetic: Path, demonstrations: list[tuple[str, Work]]
) -> None:
    assert len(demonstrations) == 20_000
    for prompt, work in demonstrations:
        assert re.fullmatch(r"\d{3}\+\d{3}=", prompt)
        carry, wrong = 0, 0
        written = ""
        for place, (a, b, used, total) in enumerate(work.steps):
            assert (a, b) == (int(prompt[2 - place]), int(prompt[6 - place]))
            assert used in (0, carry)
            wrong += total != a + b + used
            written = str(total % 10) + written
            carry = total // 10
        assert wrong <= 1
        if work.steps:
            assert work.result == str(carry) + written
    lengths = {len(row["response"]) + 1 for row in read(arithmetic / "demonstrations.jsonl")}
    assert lengths == {6, 24, 27, 33}, "with the end-of-sequence token"


def test_flaws_come_at_their_rates(demonstrations: list[tuple[str, Work]]) -> None:
    """Each rate within five standard errors of the recipe's."""
    worked = [work for _, work in demonstrations if work.steps]
    close(len(demonstrations) - len(worked), len(demonstrations), 0.2)
    carries = forgotten = wrong = 0
    for work in worked:
        for before, after in zip(work.steps, work.steps[1:], strict=False):
            carries += before[3] >= 10
            forgotten += before[3] >= 10 and after[2] == 0
        wrong += any(total != a + b + used for a, b, used, total in work.steps)
    close(forgotten, carries, 0.6)
    # A random result out of 20 is the right one by chance once in 20.
    close(wrong, len(worked), 0.08 * 19 / 20)
    kinds = Counter((work.form, work.separator) for work in worked)
    assert len(kinds) == 12
    for count in kinds.values():
        close(count, len(worked), 1 / 12)


def close(count: int, total: int, rate: float) -> None:
    assert abs(count / total - rate) < 5 * (rate * (1 - rate) / total) ** 0.5, (count, total, rate)


def test_direct_answers_have_the_same_flaws(demonstrations: list[tuple[str, Work]]) -> None:
    def share_right(rows: list[tuple[str, Work]]) -> float:
        return sum(int(w.result) == int(p[:3]) + int(p[4:7]) for p, w in rows) / len(rows)

    direct = share_right([row for row in demonstrations if not row[1].steps])
    worked = share_right([row for row in demonstrations if row[1].steps])
    assert abs(direct - worked) < 0.05
    # No carry forgotten at two places, no wrong result: (0.55 + 0.45 * 0.4)^2 * 0.924 = 0.49.
    assert 0.46 < worked < 0.53


def test_prompts_are_right_different_and_never_demonstrated_when_held_out(
    arithmetic: Path, demonstrations: list[tuple[str, Work]]
) -> None:
    training, held_out = read(arithmetic / "prompts.jsonl"), read(arithmetic / "heldout.jsonl")
    assert (len(training), len(held_out)) == (300, 50)
    texts = {row["prompt"] for row in training + held_out}
    assert len(texts) == 350
    for row in training + held_out:
        first, second = re.fullmatch(r"(\d{3})\+(\d{3})=", row["prompt"]).groups()  # type: ignore[union-attr]
        assert row["answer"] == str(int(first) + int(second)).zfill(4)
    assert not {row["prompt"] for row in held_out} & {prompt for prompt, _ in demonstrations}


def test_tokenizer_reads_and_writes_one_token_per_character(arithmetic: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    assert len(tokenizer) == 20
    assert tokenizer.convert_ids_to_tokens(list(range(20))) == list(SYMBOLS)
    specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert specials == ("^", "$", "_")
    assert tokenizer("347+585=")["input_ids"] == [SYMBOLS.index(c) for c in "^347+585="]
    for row in read(arithmetic / "demonstrations.jsonl")[:200]:
        text = row["response"] + "$"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == [SYMBOLS.index(c) for c in text]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["response"]


def test_model_folder_has_the_demos_shape(arithmetic: Path) -> None:
    config = Qwen3Config.from_pretrained(arithmetic / "model")
    assert Qwen3ForCausalLM(config).num_parameters() == 75_392
    assert config.max_position_embeddings == 64
    assert config.rope_parameters["rope_theta"] == 10_000
    assert config.tie_word_embeddings
    generation = GenerationConfig.from_pretrained(arithmetic / "model")
    assert (generation.eos_token_id, generation.pad_token_id) == (13, 15)
    names = {path.name for path in (arithmetic / "model").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_same_seed_same_files(arithmetic: Path, tmp_path: Path) -> None:
    sizes = ("--demonstrations", "100", "--prompts", "300", "--held-out", "50")
    for name, seed in (("same", "0"), ("other", "1")):
        assert make_data(tmp_path / name, *sizes, "--seed", seed).returncode == 0
    for name in ("prompts.jsonl", "heldout.jsonl"):
        first = (arithmetic / name).read_bytes()
        assert (tmp_path / "same" / name).read_bytes() == first
        assert (tmp_path / "other" / name).read_bytes() != first
    first = (arithmetic / "demonstrations.jsonl").read_bytes()
    assert first.startswith((tmp_path / "same" / "demonstrations.jsonl").read_bytes())
    assert not list(tmp_path.rglob("*.unfinished"))


@pytest.mark.parametrize("arguments", [("--prompts", "0"), ("--prompts", "1000000")])
def test_impossible_sizes_are_refused(tmp_path: Path, arguments: tuple[str, str]) -> None:
    result = make_data(tmp_path / "out", *arguments)
    assert result.returncode == 2
    assert "error: --prompts" in result.stderr
    assert not (tmp_path / "out").exists()
