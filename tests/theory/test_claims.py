"""`benchmarks/claims.py`: the short run passes, and a miss is not let through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_short_run_passes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "claims.py"), "--short", "--check", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "claims.json").read_text())["rows"]
    assert {row["claim"] for row in rows} == set(range(8))
    assert not [row for row in rows if row["verdict"] == "MISS"]
    # What is known not to hold, and what did not run, is no pass.
    by_verdict = {
        kind: [row for row in rows if row["verdict"] == kind]
        for kind in ("does not hold", "not run")
    }
    assert [row["claim"] for row in by_verdict["does not hold"]] == [4]
    assert "not run" in {row["verdict"] for row in rows if row["claim"] == 7}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        f"claim{k}.png" for k in range(1, 7)
    ]


def test_a_miss_is_named_and_ends_in_exit_code_1(tmp_path: Path) -> None:
    code = (
        "import sys, claims\n"
        "def off(run):\n"
        "    run.near((5, 'E0'), 'off by one', 1.0, 2.0, 0.5, 'NUM')\n"
        "    run.refuted((4, 'E0'), 'holds after all', 'no', 'yes', False)\n"
        "    run.at_most((3, 'E0'), 'not a number', 1.0, float('nan'), 'NUM')\n"
        "claims.SHORT = (off,)\n"
        f"sys.argv = ['claims.py', '--short', '--check', '--out', {str(tmp_path)!r}]\n"
        "sys.exit(claims.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("off by one", "holds after all", "not a number"):
        assert name in done.stderr
