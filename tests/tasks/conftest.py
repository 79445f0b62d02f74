"""The demo's data at small size, and a byte tokenizer for prompts in plain English."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAKE_DATA = Path(__file__).parents[2] / "examples" / "arithmetic_cpu" / "make_data.py"
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_data(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the demo's data script as a user does."""
    command = [sys.executable, str(MAKE_DATA), str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    result = make_data(folder, "--demonstrations", "20000", "--prompts", "300", "--held-out", "50")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, 256 in all, no special tokens, with a chat template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast
