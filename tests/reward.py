"""Rewards for runs on untrained weights: one differs from response to response, one never.

Alone in a module without imports, since a grader's worker process starts from nothing.
"""


def even_digits(response: str, answer: str, metadata: str) -> float:
    """The share of even digits; an empty response has none."""
    return sum(symbol in "02468" for symbol in response) / max(1, len(response))


def nothing(response: str, answer: str, metadata: str) -> float:
    """The same for every response."""
    return 0.0
