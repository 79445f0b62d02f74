"""A check's outcome as a row, and the run that collects rows and the series behind the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Tag = Literal["PROVEN", "RECON", "ABS", "NUM"]
Verdict = Literal["pass", "MISS", "does not hold", "recorded", "not run"]

CLAIMS = {
    1: "A convergence bound trades the gradient's second moment against its bias",
    2: "With the second moment controlled, delay enters through the bias alone",
    3: "GMC minimises a ratio-based bias bound among weights with a common second-moment bound",
    4: "The fourth-order delay term improves from O(ε⁻⁴) to O(ε⁻²)",
    5: "Under local overlap the tuned delay term falls as G^(−2/5)",
    6: "The group-rescaling bias vanishes as G grows; trajectory-wise clipping bias can persist",
    7: "Qwen3, reasoning benchmarks: best among stable baselines at large rollout delay",
}
"""The abstract of arXiv 2610.01896 in our words; claim 0 is the footing that all of them share."""


@dataclass(frozen=True)
class Row:
    claim: int
    experiment: str
    what: str
    expected: str
    measured: str
    tolerance: str
    verdict: Verdict
    tag: Tag


@dataclass
class Run:
    """What the checks of one call write into."""

    short: bool
    rows: list[Row] = field(default_factory=list)
    series: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Figure → name of the curve → values; "x" holds the abscissa."""

    def pick(self, short: int, full: int) -> int:
        """A number of draws or seeds."""
        return short if self.short else full

    def near(
        self,
        where: tuple[int, str],
        what: str,
        expected: float,
        measured: float,
        tolerance: float,
        tag: Tag,
    ) -> None:
        """measured = expected ± tolerance."""
        good = abs(measured - expected) <= tolerance
        texts = (f"{expected:.5g}", f"{measured:.5g}", f"±{tolerance:.2g}")
        self._add(where, what, texts, good, tag)

    def at_most(
        self, where: tuple[int, str], what: str, limit: float, measured: float, tag: Tag
    ) -> None:
        """measured ≤ limit, where the limit has the tolerance in it."""
        self._add(where, what, (f"≤ {limit:.4g}", f"{measured:.4g}", "in the limit"),
                  measured <= limit, tag)  # fmt: skip

    def holds(
        self,
        where: tuple[int, str],
        what: str,
        expected: str,
        measured: str,
        good: bool,
        tag: Tag,
        tolerance: str = "exact",
    ) -> None:
        """A relation between several numbers, put in words."""
        self._add(where, what, (expected, measured, tolerance), good, tag)

    def refuted(
        self, where: tuple[int, str], what: str, claimed: str, measured: str, as_known: bool
    ) -> None:
        """A reading of a claim that is known not to hold; a miss if it seems to hold after all."""
        verdict: Verdict = "does not hold" if as_known else "MISS"
        self.rows.append(Row(*where, what, claimed, measured, "", verdict, "NUM"))

    def record(self, where: tuple[int, str], what: str, measured: str) -> None:
        """A number without an expectation: neither a pass nor a miss."""
        self.rows.append(Row(*where, what, "", measured, "", "recorded", "NUM"))

    def not_run(self, where: tuple[int, str], what: str, why: str) -> None:
        self.rows.append(Row(*where, what, "", why, "", "not run", "ABS"))

    def _add(
        self,
        where: tuple[int, str],
        what: str,
        texts: tuple[str, str, str],
        good: bool,
        tag: Tag,
    ) -> None:
        self.rows.append(Row(*where, what, *texts, "pass" if good else "MISS", tag))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y against log x."""
    import numpy as np

    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
