"""Small readings of text that sources and graders share."""

from __future__ import annotations

import re

# A sign counts only where no operand stands before it: "10-5" ends in 5, "= -5" in -5.
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?",
    re.ASCII,
)


def after_last(text: str, marker: str) -> str | None:
    """Return what stands after the last `marker` in `text`; None where it has no marker."""
    _, found, rest = text.rpartition(marker)
    return rest if found else None


def last_number(text: str) -> float | None:
    """Return the last decimal number in `text` as a double; None where it has none.

    Understands thousands commas, exponents and the Unicode minus sign; not fractions.
    """
    matches = _NUMBER.findall(text.replace("\u2212", "-"))
    return float(matches[-1].replace(",", "")) if matches else None
