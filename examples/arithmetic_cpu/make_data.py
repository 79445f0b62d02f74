"""Makes the data of the arithmetic demo: tokenizer, model shape, prompts, demonstrations.

    python examples/arithmetic_cpu/make_data.py FOLDER

writes FOLDER/model (a Hugging Face folder without weights), FOLDER/prompts.jsonl and
FOLDER/heldout.jsonl ({"prompt": "347+585=", "answer": "0932"}) and FOLDER/demonstrations.jsonl
({"prompt": "347+585=", "response": "..."}). The same arguments always write the same files.

A worked response takes the digits from the last to the first, one step `a+b+k=ss` per digit (k is
the carry, ss the two-digit sum) with a separator behind it, and ends in `>` and the sum in four
digits: `7+5+0=12;4+8+1=13;3+5+1=09;>0932`. Three notations and four separators are free on
purpose: they give the policy entropy that has no part in the reward, so that log-ratios spread.

The demonstrations are flawed on purpose: a carry is forgotten with probability 0.6, in 8% of the
responses one step has a random result, and 20% give a (flawed) answer without steps. A policy
warm-started on them is right about 38% of the time, and its likeliest response forgets every carry.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

ALPHABET = "0123456789+=>$^_;,|:"
END, BEGIN, PAD = "$", "^", "_"
DIGITS = 3
PAIRS = 10 ** (2 * DIGITS)
SEPARATORS = ";,|:"
NOTATIONS = ("{a}+{b}+{k}={s:02}", "{a}{b}{k}={s:02}", "{a}{b}{k}{s:02}")
MAX_POSITIONS = 64

FORGET_CARRY = 0.6
RANDOM_STEP = 0.08
DIRECT_ANSWER = 0.2

HELD_OUT = 512
PROMPTS = 8192
DEMONSTRATIONS = 680 * 128


def prompt_text(pair: int) -> str:
    """The prompt of pair number `pair`: both numbers in three digits."""
    first, second = divmod(pair, 10**DIGITS)
    return f"{first:03}+{second:03}="


def answer_text(pair: int) -> str:
    """The sum of pair number `pair` in four digits."""
    return f"{sum(divmod(pair, 10**DIGITS)):04}"


def demonstration(pair: int, rng: Random) -> str:
    """A flawed worked response for pair number `pair`, without the end-of-sequence token."""
    first, second = divmod(pair, 10**DIGITS)
    notation, separator = rng.choice(NOTATIONS), rng.choice(SEPARATORS)
    steps, result, carry = "", "", 0
    random_place = rng.randrange(DIGITS) if rng.random() < RANDOM_STEP else None
    for place in range(DIGITS):
        a, b = first // 10**place % 10, second // 10**place % 10
        if carry and rng.random() < FORGET_CARRY:
            carry = 0
        total = rng.randrange(20) if place == random_place else a + b + carry
        steps += notation.format(a=a, b=b, k=carry, s=total) + separator
        carry, digit = divmod(total, 10)
        result = f"{digit}{result}"
    if rng.random() < DIRECT_ANSWER:
        steps = ""
    return f"{steps}>{carry}{result}"


def write_model_folder(folder: Path) -> None:
    """Write config, generation config and tokenizer; the weights come from the warm start."""
    ids = {symbol: index for index, symbol in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, ids[BEGIN])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    special = {
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(ALPHABET),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        # 2.5 times the usual width: with smaller weights, Adam's steps of fixed size turn the
        # policy so fast that lag 16 is hard for every method.
        initializer_range=0.05,
        dtype="float32",
        **special,
    ).save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)


def write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write one JSON object per line; `path` appears only when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    os.replace(unfinished, path)


def demonstrations(count: int, held_out: set[int], rng: Random) -> Iterator[dict[str, str]]:
    """`count` demonstrations of pairs that are not held out, drawn with replacement."""
    while count:
        pair = rng.randrange(PAIRS)
        if pair not in held_out:
            yield {"prompt": prompt_text(pair), "response": demonstration(pair, rng)}
            count -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data of the arithmetic demo.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--demonstrations", type=int, default=DEMONSTRATIONS)
    args = parser.parse_args()
    if args.prompts < 1 or args.held_out < 1 or args.demonstrations < 1:
        parser.error("--prompts, --held-out and --demonstrations must be at least 1")
    if args.prompts + args.held_out > PAIRS:
        parser.error(f"--prompts and --held-out together: at most {PAIRS} different sums")

    folder: Path = args.folder
    (folder / "model").mkdir(parents=True, exist_ok=True)
    write_model_folder(folder / "model")
    pairs = Random(f"pairs {args.seed}").sample(range(PAIRS), args.held_out + args.prompts)
    held_out, training = pairs[: args.held_out], pairs[args.held_out :]
    for name, chosen in (("heldout", held_out), ("prompts", training)):
        rows = ({"prompt": prompt_text(pair), "answer": answer_text(pair)} for pair in chosen)
        write_lines(folder / f"{name}.jsonl", rows)
    rng = Random(f"demonstrations {args.seed}")
    write_lines(
        folder / "demonstrations.jsonl", demonstrations(args.demonstrations, set(held_out), rng)
    )


if __name__ == "__main__":
    main()
