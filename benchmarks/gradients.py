"""The gradient of one batch on every mesh of up to four gloo ranks, against one process in float64.

`python -m benchmarks.gradients` prints a table: mesh, pass, estimator, largest relative difference.
`--json FILE` writes it, `--check` exits with 1 and names each row over the bound; `--meshes` takes
a few by name, as in the table. The batch has groups of 3, 4, 8 and 2, masks with holes, a response
of one token, a group of zero advantage and a trajectory whose log-ratio is 300. The reference
is transformers' model in float64, one trajectory at a time (tests/reference.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.learner.gradients import Compared, compare

BOUND = 1e-5
"""Largest difference allowed of the gradient, relative to its largest entry."""

MESHES: dict[int, dict[str, list[str]]] = {
    1: {"tied": ["DP1"], "mixture": ["DP1"]},
    2: {
        "tied": ["DP2", "DP2×ZeRO", "TP2", "TP2×SP", "CP2", "PP2", "PP2×VPP2"],
        "untied": ["TP2×SP", "PP2", "PP2×VPP2"],
        "mixture": ["DP2", "EP2", "CP2×EP2", "TP2×SP", "PP2"],
    },
    3: {"tied": ["DP3", "CP3"]},
    4: {
        "tied": [
            "DP4",
            "TP4",
            "TP4×SP",
            "CP4",
            "PP4",
            "TP2×DP2",
            "TP2×SP×DP2×ZeRO",
            "TP2×CP2",
            "TP2×SP×CP2",
            "TP2×PP2",
            "TP2×SP×PP2",
            "TP2×PP2×VPP2",
            "CP2×DP2",
            "CP2×DP2×ZeRO",
            "CP2×PP2",
            "CP2×PP2×VPP2",
            "PP2×DP2",
            "PP2×VPP2×DP2",
        ],
        "untied": ["TP2×SP×PP2×VPP2", "CP2×PP2"],
        "mixture": ["EP4", "EP2×DP2×ZeRO", "TP2×SP×EP2", "CP2×EP4", "PP2×EP2", "PP2×VPP2×EP2"],
    },
}
"""Number of ranks → kind of model → meshes. All methods on each mesh of the tied model; on the
others gmc and a fifth of the rest, in turns."""


def arguments(chosen: set[str]) -> dict[int, list[str]]:
    """What the ranks of each world run, of the meshes that were asked for; all for an empty set."""
    worlds: dict[int, list[str]] = {}
    for world, kinds in MESHES.items():
        for kind, names in kinds.items():
            for turn, name in enumerate(names):
                if not chosen or name in chosen:
                    jobs = "all" if kind == "tied" else str(turn)
                    worlds.setdefault(world, []).append(f"{kind}/{name}/{jobs}")
    return worlds


def main(options: argparse.Namespace) -> int:
    worlds = arguments(set(options.meshes))
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), worlds, timeout=options.timeout)
    print(f"{'mesh':18} {'model':8} {'pass':7} {'tokens':>6} {'estimator':19} largest difference")
    for row in rows:
        print(
            f"{row.mesh:18} {row.kind:8} {row.passes:7} {row.limit:6} {row.estimator:19} "
            f"{row.differences['gradient']:.1e}"
        )
    print(f"{len(rows)} rows, largest {max(row.differences['gradient'] for row in rows):.1e}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [row for row in rows if not row.differences["gradient"] <= BOUND]
    for row in missed:
        print(f"missed: {_name(row)} is {row.differences['gradient']:.1e} off, bound {BOUND}")
    return 1 if options.check and missed else 0


def _name(row: Compared) -> str:
    return f"{row.estimator} in {row.passes} pass of {row.limit} tokens on {row.mesh} ({row.kind})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    known = {name for kinds in MESHES.values() for names in kinds.values() for name in names}
    parser.add_argument("--meshes", nargs="*", default=[], choices=sorted(known), metavar="MESH")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one world")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_options()))
