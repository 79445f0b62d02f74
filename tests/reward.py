"""A reward for runs on untrained weights: it differs from response to response.

Alone in a module without imports, since a grader's worker process starts from nothing.
"""


def even_digits(response: str, answer: str, metadata: str) -> float:
    """The share of even digits; an empty response has none."""
    return sum(symbol in "02468" for symbol in response) / max(1, len(response))
