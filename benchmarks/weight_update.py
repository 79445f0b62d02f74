"""How long a weight update of a real SGLang server takes, against a plain transfer of its bytes.

`python benchmarks/weight_update.py` prints a table; `--json FILE` writes it, `--check` exits with
1 and names the bounds that were missed. A random model of 127 MB, float32, one server on this
machine. The plain transfer reads the same file and copies every tensor (disk); then it also
broadcasts as many bytes to a second process over gloo (distributed), or lets it copy them out of
shared memory (tensor). Everything runs in turns and a ratio is the median over the turns. Memory is
this process's growth during an update, in buckets: its own and shared, without the pages of files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
import torch.multiprocessing
from sglang_server import new_engine, new_server, save_model
from torch import Tensor

from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.rollout.sglang.transports import TransportName

TIME_BOUND = 1.5
MEMORY_BOUND = 2.0


@dataclass(frozen=True)
class Row:
    """One transport: seconds of an update and of the plain transfer, and this process's growth."""

    transport: str
    seconds: float
    plain_seconds: float
    ratio: float
    buckets: float

    @property
    def missed(self) -> list[str]:
        faults = []
        if self.ratio > TIME_BOUND:
            faults.append(f"{self.transport} takes {self.ratio:.2f} × plain, bound {TIME_BOUND}")
        if round(self.buckets, 1) > MEMORY_BOUND:
            faults.append(
                f"{self.transport} holds {self.buckets:.2f} buckets, bound {MEMORY_BOUND}"
            )
        return faults


class PlainTransfer:
    """The same bytes, without an engine: to this process, or to a second one that copies them."""

    def __init__(self, folder: Path, bucket_bytes: int) -> None:
        self._folder = folder
        self._target = {name: torch.empty_like(t) for name, t in stream_tensors(folder)}
        total = sum(tensor.nbytes for tensor in self._target.values())
        self._bucket = torch.zeros(bucket_bytes, dtype=torch.uint8).share_memory_()
        sizes = [bucket_bytes] * (total // bucket_bytes) + [total % bucket_bytes]
        self._sizes = [size for size in sizes if size]
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        context = torch.multiprocessing.get_context("spawn")
        self._peer = context.Process(
            target=receive, args=(store.port, self._sizes, self._bucket), daemon=True
        )
        self._peer.start()
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)

    def copy(self) -> None:
        for name, tensor in stream_tensors(self._folder):
            self._target[name].copy_(tensor)

    def broadcast(self) -> None:
        self._to_peer(shared=False)

    def share(self) -> None:
        self._to_peer(shared=True)

    def _to_peer(self, *, shared: bool) -> None:
        dist.broadcast(torch.tensor([int(shared)]), 0)
        self.copy()  # an update reads the file as well
        for size in self._sizes:
            if shared:
                dist.barrier()
            else:
                dist.broadcast(self._bucket[:size], 0)
        dist.barrier()

    def close(self) -> None:
        self._peer.kill()


def receive(port: int, sizes: list[int], shared_bucket: Tensor) -> None:
    """The other end: takes every bucket and copies it into its place."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    places = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    bucket = torch.empty(max(sizes), dtype=torch.uint8)
    shared = torch.zeros(1, dtype=torch.long)
    while True:
        dist.broadcast(shared, 0)
        for place in places:
            if shared:
                place.copy_(shared_bucket[: len(place)])
                dist.barrier()
            else:
                dist.broadcast(bucket[: len(place)], 0)
                place.copy_(bucket[: len(place)])
        dist.barrier()


class Growth:
    """How far this process's memory rises above its start, in bytes; sampled every millisecond."""

    def __enter__(self) -> Growth:
        self._start = self._peak = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, resident_bytes())

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self._peak - self._start


def resident_bytes() -> int:
    """Anonymous and shared memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return 1024 * (int(values["RssAnon"]) + int(values["RssShmem"]))


async def measure(python: Path, bucket_bytes: int, repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_model(Path(scratch) / "model", hidden=640, layers=6)
        server = new_server(python, folder, Path(scratch) / "server.log")
        address = await server.start()
        plain = PlainTransfer(folder, bucket_bytes)
        try:
            names = get_args(TransportName)
            engines = {
                name: new_engine(address, server, folder, name, bucket_bytes) for name in names
            }
            for engine in engines.values():
                await engine.start()
            references = {
                "disk": plain.copy,
                "distributed": plain.broadcast,
                "tensor": plain.share,
            }
            taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
            version = 0
            for turn in range(repeats + 1):
                for name, engine in engines.items():
                    version += 1
                    start = time.perf_counter()
                    with Growth() as growth:
                        await engine.update_weights(folder, version)
                    seconds = time.perf_counter() - start
                    if turn > 0:  # the first warms up
                        taken[name].append((seconds, _timed(references[name]), growth.bytes))
            return [_row(name, turns, bucket_bytes) for name, turns in taken.items()]
        finally:
            plain.close()
            await server.close()


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _row(name: str, turns: list[tuple[float, float, int]], bucket_bytes: int) -> Row:
    return Row(
        name,
        statistics.median(seconds for seconds, _, _ in turns),
        statistics.median(plain for _, plain, _ in turns),
        statistics.median(seconds / plain for seconds, plain, _ in turns),
        max(growth for _, _, growth in turns) / bucket_bytes,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = asyncio.run(measure(options.python, options.bucket_mb * 10**6, options.repeats))
    print(f"{'transport':12} {'update s':>9} {'plain s':>8} {'ratio':>6} {'buckets':>8}")
    for row in rows:
        print(
            f"{row.transport:12} {row.seconds:9.3f} {row.plain_seconds:8.3f} {row.ratio:6.2f} "
            f"{row.buckets:8.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [fault for row in rows for fault in row.missed]
    for fault in missed:
        print(f"missed: {fault}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
