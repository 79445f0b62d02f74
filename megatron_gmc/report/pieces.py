"""Token ids to the pieces of text that they stand for, with the policy's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_gmc.report.trajectories import Pieces

_UNFINISHED = "\ufffd"
_LONGEST = 8
"""Tokens that one character can take; what is still unfinished then is shown as it is."""


def text_pieces(folder: Path) -> Pieces | None:
    """The splitter of the tokenizer in `folder`; None where there is none any more."""
    if not (folder / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def pieces(tokens: Sequence[int]) -> list[tuple[str, int]]:
        """(text, tokens) in order; tokens that share a character are one piece."""
        found: list[tuple[str, int]] = []
        waiting: list[int] = []
        for token in tokens:
            waiting.append(token)
            text = tokenizer.decode(waiting, skip_special_tokens=False)
            if not text.endswith(_UNFINISHED) or len(waiting) == _LONGEST:
                found.append((text, len(waiting)))
                waiting = []
        if waiting:
            found.append((tokenizer.decode(waiting, skip_special_tokens=False), len(waiting)))
        return found

    return pieces
