"""The demo: warm start, then training at exact lag 16 with group-mass capping and without.

Two torchrun ranks hold the policy (tensor parallel) and a third process samples. Results go to
runs/arithmetic_cpu; a demo that has finished only shows them again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_gmc.result import plot_runs, print_results
from megatron_gmc.run_folder import RunFolder

HERE = Path(__file__).resolve().parent
RUNS = Path("runs/arithmetic_cpu")
RANKS = 2


def main() -> int:
    gmc, none = RUNS / "gmc", RUNS / "none"
    if all(RunFolder(run).finished() for run in (gmc, none)):
        print(f"The demo has finished before. To run it anew: rm -r {RUNS}")
    else:
        make_data()
        step("sft", HERE / "sft.yaml")
        step("train", HERE / "train.yaml")
        step("train", HERE / "train.yaml", "--estimator.name", "none",
             "--train.output_dir", str(none))  # fmt: skip
    print_results([gmc, none])
    plot = RUNS / "lag16.png"
    plot_runs([gmc, none], plot)
    print(f"Both runs in one picture: {plot}")
    print(f"Curves: .venv/bin/tensorboard --logdir {RUNS}")
    return 0


def make_data() -> None:
    target = RUNS / "data"
    if not target.exists():
        run([sys.executable, str(HERE / "make_data.py"), str(target)])


def step(command: str, config: Path, *overrides: str) -> None:
    """Run a command of megatron_gmc on all ranks, as a user would."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone",
              f"--nproc_per_node={RANKS}", "-m", "megatron_gmc"]  # fmt: skip
    run([*launch, command, str(config), *overrides])


def run(command: list[str]) -> None:
    print("$", " ".join(command), flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        # The command has said why; a partial result must not look like one.
        sys.exit(f"The demo stopped. Mend what is named above, or start over with: rm -r {RUNS}")


if __name__ == "__main__":
    sys.exit(main())
