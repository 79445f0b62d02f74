"""What runs inside a grader's worker process. Light on imports: every worker starts from nothing.

The process is spawned, loads one scorer, and then scores one response at a time in its main
thread. Whatever a scorer does wrong leaves here as a plain text, because an exception of a user's
own class may not survive the way to the parent process.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import numbers
import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any, Literal

Scorer = Callable[[str, str, str], object]
Kind = Literal["math_verify", "reasoning_gym", "function"]
FailureReason = Literal["raised", "not_a_number", "timeout", "died"]

_DETAIL_LIMIT = 500
"""Characters of an exception's text that are kept."""


class ScorerRaised(Exception):
    """The scorer raised; the text is the last line of its traceback."""


def serve(connection: Connection, kind: Kind, option: str | None) -> None:
    """Score what comes through `connection` until the parent closes it.

    Sends True once ready; then, for each (response, answer, metadata), the reward as a float or
    (reason, detail) where there is none.
    """
    # Ctrl-C in a terminal reaches every process; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    scorer = make_scorer(kind, option)
    connection.send(True)
    while True:
        try:
            response, answer, metadata = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(scorer, response, answer, metadata))


def _outcome(
    scorer: Scorer, response: str, answer: str, metadata: str
) -> float | tuple[FailureReason, str]:
    try:
        reward = _score(scorer, response, answer, metadata)
    except ScorerRaised as error:
        return "raised", str(error)
    except TypeError as error:
        return "not_a_number", str(error)
    return reward


def _score(scorer: Scorer, response: str, answer: str, metadata: str) -> float:
    """Raises ScorerRaised, or TypeError where the scorer returns something else than a number."""
    try:
        value = scorer(response, answer, metadata)
        reward = float(value) if isinstance(value, numbers.Real) else None
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        raise ScorerRaised(text[:_DETAIL_LIMIT]) from error
    if reward is None:
        raise TypeError(f"returned {type(value).__name__}, must be a number")
    return reward


def make_scorer(kind: Kind, option: str | None) -> Scorer:
    """Load what `kind` needs. `option` is the function's path or the answer's tag."""
    if kind == "math_verify":
        return _math_scorer()
    if kind == "reasoning_gym":
        # Before the first response, whose time limit must not pay for the import.
        importlib.import_module("reasoning_gym")
        return partial(score_entry, option)
    assert option is not None, "a function grader has a path"
    return load_function(option)


def load_function(path: str) -> Scorer:
    """Import the function at "module:function". Raises ValueError saying what is wrong."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"grader.path {path!r}: cannot import {module_name!r}: {error}. Its folder must be the "
            "working directory or stand in PYTHONPATH"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"grader.path {path!r}: module {module_name!r} has no function {name!r}")
    scorer: Scorer = function
    return scorer


def score_entry(answer_tag: str | None, response: str, answer: str, metadata: str) -> float:
    """Score a response by its reasoning-gym entry, which stands as JSON in `metadata`."""
    from reasoning_gym.utils import extract_answer

    record = json.loads(metadata)
    text = response if answer_tag is None else extract_answer(response, answer_tag)
    if text is None:
        return 0.0
    dataset = _dataset(record["dataset"], json.dumps(record["params"]))
    return float(dataset.score_answer(text, record["entry"]))


@lru_cache(maxsize=8)
def _dataset(name: str, params: str) -> Any:
    # A scorer may look at its dataset's parameters, so it is made with the same ones.
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(params))


def _math_scorer() -> Scorer:
    from math_verify import parse, verify

    # Its own limits are off, as the parent process ends a scorer that runs too long; the library
    # would warn about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Loads its grammars, for which the first response's time limit must not pay.
    parse("$1$", parsing_timeout=None)

    def score_math(response: str, answer: str, metadata: str) -> bool:
        # Without a maths environment the library reads plain LaTeX only in part.
        marked = "$" in answer or "\\boxed" in answer
        gold = parse(answer if marked else f"\\boxed{{{answer}}}", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the answer {answer!r}")
        return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))

    return score_math


def _end_with_parent() -> None:
    """End this process when its parent is gone, even in the middle of a scorer."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a child process"
    parent.join()
    os._exit(1)
