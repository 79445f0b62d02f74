"""Tokens per second through the driver, against a bare client on the same SGLang server.

`python benchmarks/rollout_driver.py` prints a table; `--json FILE` writes it, `--check` exits with
1 where the bound was missed. 64 samples are under way at a time, in eight calls of eight: the bare
client posts them and counts tokens, the driver checks, grades and books them as well. They run in
turns, and the ratio is the median over the turns. The bare client with one sample a call, 64 calls
at a time, is shown for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from sglang_server import VOCABULARY, new_engine, new_server, save_model

from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.sampling import GradeJob
from megatron_gmc.rollout.scheduler import BoundedLag, LagScheduler
from megatron_gmc.rollout.sglang.server import SglangServer
from megatron_gmc.rollout.types import Prompt, SamplingParams

BOUND = 0.95
CALLS, GROUP = 8, 8
STOP = (0,)
RESPONSE = 64


def prompt_at(number: int) -> Prompt:
    tokens = tuple(1 + (number * 7 + place) % (VOCABULARY - 1) for place in range(12))
    return Prompt(id=str(number), text="", tokens=tokens, answer="")


def grade(jobs: Sequence[GradeJob]) -> list[float]:
    return [float(len(text) % 2) for _, text, _ in jobs]


def driver_rate(address: str, server: SglangServer, folder: Path, steps: int) -> float:
    """Tokens per second of `steps` batches of CALLS groups, with version 0 all along."""
    driver = RolloutDriver(
        engines=[new_engine(address, server, folder, "disk", 10**8)],
        scheduler=LagScheduler(BoundedLag(steps), CALLS, steps),
        prompt_at=prompt_at,
        grade=grade,
        decode=lambda tokens: " ".join(map(str, tokens)),
        params=SamplingParams(1.0, RESPONSE, STOP),
        group_size=GROUP,
        vocabulary=VOCABULARY,
        seed=0,
        prompt_fingerprint="numbers",
        request_groups=1,
        calls_per_engine=CALLS,
    )
    driver.start()
    try:
        driver.publish(0, folder)
        driver.next_batch(0)  # until here the engine started and loaded
        start, tokens = time.perf_counter(), 0
        for step in range(1, steps):
            groups = driver.next_batch(step)
            tokens += sum(len(t.sample.tokens) for g in groups for t in g.trajectories)
        return tokens / (time.perf_counter() - start)
    finally:
        driver.close()


async def bare_rate(address: str, server: SglangServer, steps: int, group: int) -> float:
    """Tokens per second of `steps` batches, in calls of `group` samples, 64 samples at a time.

    As for the driver, the first batch is not counted and the clock starts at its end.
    """
    calls = CALLS * GROUP // group
    headers = {"Authorization": f"Bearer {server.keys.api}"}
    numbers = iter(range(steps * calls))
    total = 0
    start = 0.0
    first = set(range(calls))
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=600) as client:

        async def work() -> None:
            nonlocal total, start
            for number in numbers:
                params = {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "max_new_tokens": RESPONSE,
                    "stop_token_ids": list(STOP),
                    "n": group,
                }
                body = {
                    "input_ids": [list(prompt_at(number).tokens)],
                    "sampling_params": [params],
                    "return_logprob": True,
                }
                answers = (await client.post("/generate", json=body)).json()
                if number >= calls:
                    total += sum(len(answer["output_ids"]) for answer in answers)
                first.discard(number)
                if not first and not start:
                    start = time.perf_counter()

        await asyncio.gather(*(work() for _ in range(calls)))
        return total / (time.perf_counter() - start)


def measure(python: Path, steps: int, repeats: int) -> list[tuple[float, float, float]]:
    """Tokens per second of the driver, the bare client, and it with one sample a call; by turn."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_model(Path(scratch) / "model", hidden=64, layers=2)
        server = new_server(python, folder, Path(scratch) / "server.log")
        loop = asyncio.new_event_loop()
        address = loop.run_until_complete(server.start())
        try:
            turns = []
            for turn in range(repeats + 1):
                bare, single = (
                    loop.run_until_complete(bare_rate(address, server, steps, group))
                    for group in (GROUP, 1)
                )
                rates = (driver_rate(address, server, folder, steps), bare, single)
                if turn > 0:  # the first warms up
                    turns.append(rates)
            return turns
        finally:
            loop.run_until_complete(server.close())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    turns = measure(options.python, options.steps, options.repeats)
    ratio = statistics.median(driver / bare for driver, bare, _ in turns)
    row = {
        "driver_tokens_per_s": statistics.median(driver for driver, _, _ in turns),
        "bare_tokens_per_s": statistics.median(bare for _, bare, _ in turns),
        "bare_one_sample_a_call": statistics.median(single for _, _, single in turns),
        "ratio": ratio,
        "bound": BOUND,
    }
    print(" ".join(f"{name} {value:.3f}" for name, value in row.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=2) + "\n")
    if ratio < BOUND:
        print(f"missed: the driver reaches {ratio:.3f} of the bare client, bound {BOUND}")
    return 1 if options.check and ratio < BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
