"""Conversion against copying the same bytes: time each way, and peak memory.

`python benchmarks/conversion.py` prints a table; `--json FILE` writes it, `--check` exits with 1
and names the bounds that were missed. A model of random bfloat16 weights goes Hugging Face →
Megatron → Hugging Face in turns with `dd` and `cp`, each a process of its own; all of them find the
source in the page cache. The bound is on the time over `dd`, which reads and writes the same bytes
through a process as a conversion must; `cp` has the kernel copy them, which takes a fraction of
that. The starting of Python and torch is measured as well and taken off the time, as it does not
grow with the model; memory is the process's peak, torch included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.convert.mapping import layouts
from megatron_gmc.convert.safetensors_stream import Entry, write_files

TIME_BOUND = 2.0
MEMORY_BOUND = 300e6
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


@dataclass(frozen=True)
class Row:
    """One direction."""

    direction: str
    seconds: float
    rewrites: float
    """Its time over that of `dd`, the median over turns."""
    copies: float
    """Its time over that of `cp`."""
    peak_megabytes: float
    memory_limit_megabytes: float

    @property
    def missed(self) -> list[str]:
        missed = []
        if self.rewrites > TIME_BOUND:
            missed.append(f"{self.direction} takes {self.rewrites:.2f} × dd, bound {TIME_BOUND}")
        if self.peak_megabytes > self.memory_limit_megabytes:
            missed.append(
                f"{self.direction} peaks at {self.peak_megabytes:.0f} MB, bound "
                f"{self.memory_limit_megabytes:.0f}"
            )
        return missed


def make_model(folder: Path, layers: int) -> int:
    """A Hugging Face folder of random weights; returns the bytes of its largest tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    shapes = layouts(load_shape(folder))

    def drawn() -> Iterator[tuple[str, Tensor]]:
        for name, layout in shapes.items():
            yield name, torch.empty(layout.shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1)

    entries = [Entry(name, layout.shape) for name, layout in shapes.items()]
    ((path, _),) = write_files(folder, entries, torch.bfloat16, drawn(), 2**62)
    path.rename(folder / "model.safetensors")
    return max(2 * torch.Size(layout.shape).numel() for layout in shapes.values())


def run(command: Sequence[str]) -> tuple[float, float]:
    """Seconds and peak memory, in bytes, of a process; its output is left out."""
    began = time.perf_counter()
    process = os.posix_spawnp(
        command[0],
        command,
        os.environ | {"OMP_NUM_THREADS": "1"},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(process, 0)
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


def measure(folder: Path, layers: int, repeats: int) -> tuple[float, list[Row]]:
    """Size of the model in bytes, and a row for each direction."""
    source, megatron, back = (folder / name for name in ("source", "megatron", "back"))
    largest = make_model(source, layers)
    convert = [sys.executable, "-m", "megatron_gmc", "convert"]
    jobs = {
        "start": [*convert, str(source), str(folder / "never"), "--dry-run"],
        "cp": ["cp", "-r", str(source), str(folder / "copy")],
        "dd": [
            "dd",
            f"if={source / 'model.safetensors'}",
            f"of={folder / 'rewritten'}",
            "bs=4M",
            "status=none",
        ],
        "to Megatron": [*convert, str(source), str(megatron)],
        "to Hugging Face": [*convert, str(megatron), str(back), "--like", str(source)],
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, command in jobs.items():
            result = run(command)
            if repeat > 0:
                measured[name].append(result)
        for made in (folder / "copy", megatron, back):
            shutil.rmtree(made)
        (folder / "rewritten").unlink()
    size = (source / "model.safetensors").stat().st_size
    limit = 3 * largest + MEMORY_BOUND
    start = statistics.median(seconds for seconds, _ in measured["start"])
    rows = []
    for name in ("to Megatron", "to Hugging Face"):
        over = {
            plain: statistics.median(
                (ours - start) / theirs
                for (ours, _), (theirs, _) in zip(measured[name], measured[plain], strict=True)
            )
            for plain in ("dd", "cp")
        }
        rows.append(
            Row(
                name,
                statistics.median(seconds for seconds, _ in measured[name]),
                over["dd"],
                over["cp"],
                max(memory for _, memory in measured[name]) / 1e6,
                limit / 1e6,
            )
        )
    return size, rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--layers", type=int, default=34, help="34 make a model of about 4 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="disk to write on; default: the temporary one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size, rows = measure(Path(folder), options.layers, options.repeats)
    print(f"{size / 1e9:.2f} GB of bfloat16, medians of {options.repeats} turns")
    print(f"{'direction':16} {'seconds':>8} {'× dd':>6} {'× cp':>6} {'peak MB':>8} {'bound':>6}")
    for row in rows:
        print(
            f"{row.direction:16} {row.seconds:8.1f} {row.rewrites:6.2f} {row.copies:6.2f} "
            f"{row.peak_megabytes:8.0f} {row.memory_limit_megabytes:6.0f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [text for row in rows for text in row.missed]
    for text in missed:
        print(f"missed: {text}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
