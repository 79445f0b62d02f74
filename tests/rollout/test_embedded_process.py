"""The embedded engine's process: how it starts, dies and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gmc.rollout.engine import EngineError
from tests.rollout.embedded import (
    LONG,
    LONG_PARAMS,
    PARAMS,
    REQUESTS,
    alive,
    new_engine,
    wait_until_gone,
)
from tests.rollout.models import save_tiny_model

pytestmark = pytest.mark.anyio


async def test_a_killed_engine_is_named(folder: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of sampling, then every call."""
    engine = new_engine(folder, tmp_path / "engine.log")
    await engine.start()
    try:
        sampling = asyncio.create_task(engine.sample(LONG, LONG_PARAMS))
        await asyncio.sleep(0.05)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        message = f"embedded-0 .process {engine.pid}. was killed by signal 9"
        with pytest.raises(EngineError, match=message):
            await sampling
        with pytest.raises(EngineError, match=message):
            await engine.sample(REQUESTS, PARAMS)
        with pytest.raises(EngineError, match=message):
            await engine.version()
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(folder, 1)
    finally:
        await engine.close()


async def test_close_ends_a_busy_engine_and_may_be_repeated(folder: Path, tmp_path: Path) -> None:
    engine = new_engine(folder, tmp_path / "engine.log", version=5)
    with pytest.raises(EngineError, match="embedded-0 was not started"):
        await engine.version()
    await engine.start()
    assert await engine.version() == 5
    pid = engine.pid
    assert pid is not None
    sampling = asyncio.create_task(engine.sample(LONG, LONG_PARAMS))
    await asyncio.sleep(0.05)
    await engine.close()
    await engine.close()
    assert not alive(pid)
    assert engine._process is not None
    assert engine._process.returncode == 0  # it needed no force
    with pytest.raises(EngineError, match="embedded-0"):
        await sampling
    with pytest.raises(EngineError, match="embedded-0 was closed"):
        await engine.version()


async def test_a_folder_without_a_model_ends_the_start(tmp_path: Path) -> None:
    engine = new_engine(tmp_path / "nowhere", tmp_path / "run" / "engine.log")
    with pytest.raises(EngineError, match=r"embedded-0 .* exit code 2; .* no config\.json in"):
        await engine.start()
    assert engine.pid is not None
    assert not alive(engine.pid)


async def test_a_start_beyond_its_deadline_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    engine = new_engine(folder, tmp_path / "engine.log", start_timeout_s=0.2)
    with pytest.raises(EngineError, match=r"embedded-0 was not ready within 0\.2 s"):
        await engine.start()
    assert engine.pid is not None
    assert not alive(engine.pid)


async def test_another_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", seed=1, vocabulary=30)
    engine = new_engine(folder, tmp_path / "engine.log")
    with pytest.raises(EngineError, match="vocabulary of 30, the policy's is 24"):
        await engine.start()
    assert engine.pid is not None
    assert not alive(engine.pid)


def test_the_engine_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    """The parent is killed while a process that it forked still holds the engine's pipe."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, sys, time\n"
        "from pathlib import Path\n"
        "from megatron_gmc.rollout.embedded.engine import EmbeddedEngine\n"
        "async def main():\n"
        "    folder, log = map(Path, sys.argv[1:])\n"
        "    engine = EmbeddedEngine('engine', folder, version=0, vocabulary=24, log=log,\n"
        "                            start_timeout_s=120, sample_timeout_s=120)\n"
        "    await engine.start()\n"
        "    fork = os.fork()\n"
        "    if fork == 0:\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    print(engine.pid, fork, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(tmp_path / "engine.log")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, fork = map(int, parent.stdout.readline().split())
    try:
        assert alive(pid)
        parent.kill()
        parent.wait()
        wait_until_gone(pid)
    finally:
        os.kill(fork, signal.SIGKILL)
        parent.stdout.close()


def test_the_engine_ends_when_its_standard_input_closes(folder: Path) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-m", "megatron_gmc.rollout.embedded", str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdin is not None and engine.stdout is not None
    engine.stdin.write("token\n")
    engine.stdin.flush()
    assert "port" in engine.stdout.readline()
    engine.stdin.close()
    assert engine.wait(timeout=60) == 0
    engine.stdout.close()
