"""User functions for the function grader, most of them broken in some way."""

from __future__ import annotations

import os
import sys
import time


class TwoArguments(Exception):
    """Its pickle cannot be read back: reading calls it with one argument."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def length(response: str, answer: str, metadata: str) -> float:
    return len(response) + 10 * len(answer) + 100 * len(metadata)


def by_command(response: str, answer: str, metadata: str) -> object:
    """Do what the response says."""
    if response == "raise":
        raise KeyError("broken grader")
    if response == "raise unpicklable":
        raise TwoArguments("one", "two")
    if response == "raise unprintable":
        raise Unprintable
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(7)
    if response == "die quietly":
        os._exit(0)
    if response == "hang":
        time.sleep(3600)
    if response == "spin":
        while True:
            pass
    values = {
        "nan": float("nan"),
        "inf": float("inf"),
        "text": "1.0",
        "none": None,
        "list": [1.0],
        "true": True,
        "lambda": lambda: 1,
    }
    return values.get(response, 0.25)


NOT_CALLABLE = 3
