"""Check the claims of arXiv 2610.01896's abstract, as far as they can be checked on a CPU.

    python benchmarks/claims.py --short    the checks that take seconds; CI runs these
    python benchmarks/claims.py            all of them

Prints a row for each measurement and a line for each claim; writes claims.json and one figure for
each claim into --out. With --check the exit code is 1 if a row missed its tolerance. A reading of
a claim that is known not to hold is shown as such: neither a pass nor a miss.

Tags: ABS the paper's abstract says so; PROVEN proved here, see megatron_gmc/theory; RECON our
reconstruction of what the paper must do; NUM a number of ours alone. The environments are ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from claim_checks import exact, figures, laws, optimal, rates, theorem, training
from claim_checks.table import CLAIMS, Run
from rich.console import Console
from rich.table import Table

SHORT: tuple[Callable[[Run], None], ...] = (
    exact.unit_mean, optimal.numerics, laws.member_limit, theorem.terms,
    training.lag_zero, exact.drift,
    optimal.least_bound, optimal.selection, optimal.second_moment, optimal.differentiated,
    rates.epsilon_orders, rates.tuned_orders, exact.overlap,
    laws.closed_forms, laws.deficit_against_group_size, exact.bandit_bias, laws.sub_groups,
    laws.retained, training.language_models,
)  # fmt: skip
LONG: tuple[Callable[[Run], None], ...] = (
    training.lag_grid, training.paired, training.step_size_grid,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="only the checks that take seconds")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a check misses")
    parser.add_argument("--out", type=Path, default=Path("runs/claims"), help="folder for results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    run = Run(short=options.short)
    for check in SHORT if options.short else SHORT + LONG:
        check(run)
    run.rows.sort(key=lambda row: row.claim)
    console = Console(width=None if sys.stdout.isatty() else 180)
    _print(run, console)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"claims": CLAIMS, "rows": [asdict(row) for row in run.rows], "series": run.series}
    (options.out / "claims.json").write_text(
        json.dumps({"short": run.short, **record}, indent=1, ensure_ascii=False) + "\n"
    )
    figures.write_figures(run, options.out)
    misses = [row for row in run.rows if row.verdict == "MISS"]
    console.print(
        f"{len(run.rows)} rows in {time.perf_counter() - began:.0f} s, {len(misses)} missed; "
        f"claims.json and figures in {options.out}",
        highlight=False,
    )
    for row in misses:
        print(f"missed: claim {row.claim}, {row.experiment}: {row.what}: expected {row.expected}, "
              f"measured {row.measured}", file=sys.stderr)  # fmt: skip
    return 1 if options.check and misses else 0


def _print(run: Run, console: Console) -> None:
    table = Table("claim", "check", "what", "expected", "measured", "tolerance", "verdict", "tag")
    for before, row in zip([None, *run.rows], run.rows, strict=False):
        if before is not None and before.claim != row.claim:
            table.add_section()
        table.add_row(
            str(row.claim or "–"), row.experiment, row.what, row.expected, row.measured,
            row.tolerance, row.verdict, row.tag,
        )  # fmt: skip
    console.print(table, highlight=False)
    for claim, text in CLAIMS.items():
        counts = Counter(row.verdict for row in run.rows if row.claim == claim)
        shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        if claim == 7:
            shown = f"NOT RUN. A small environment, which does not stand for it: {shown}"
        console.print(f"{claim}. {text}: {shown}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
