"""How a server is started, as far as that can be seen without SGLang."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_gmc.rollout.sglang.server import (
    CPU_OPTIONS,
    RESERVED_OPTIONS,
    SERVE,
    Keys,
    ServerPlan,
    command,
    environment,
)


def plan(**changes: object) -> ServerPlan:
    settings = {
        "python": Path("python"),
        "folder": Path("/policy"),
        "log": Path("log"),
        "start_timeout_s": 1.0,
    }
    return ServerPlan(**(settings | changes))  # type: ignore[arg-type]


def test_the_command_line_says_all_but_the_keys() -> None:
    options = {"mem-fraction-static": 0.5, "disable-radix-cache": True, "enable-lora": False}
    line = command(plan(options=options, tensor=2, cpu=True), 31000)
    assert line[:2] == ["python", str(SERVE)]
    pairs = dict(pairwise(line))
    assert pairs["--model-path"] == "/policy"
    assert (pairs["--host"], pairs["--port"], pairs["--tp-size"]) == ("127.0.0.1", "31000", "2")
    assert pairs["--weight-version"] == "0" and pairs["--log-level"] == "warning"
    assert pairs["--mem-fraction-static"] == "0.5"  # over the CPU's own
    assert "--disable-radix-cache" in line and "--enable-lora" not in line
    assert not [word for word in line if "key" in word]
    gpu = command(plan(), 31000)
    assert not {f"--{name}" for name in CPU_OPTIONS} & set(gpu)
    assert {f"--{name}" for name in RESERVED_OPTIONS} - set(gpu) == {
        "--api-key",
        "--admin-api-key",
        "--log-level-http",
    }


def test_the_learners_environment_stays_with_the_learner() -> None:
    base = {
        "PATH": "/bin",
        "PYTHONPATH": "/learner",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node0",
        "TORCHELASTIC_RUN_ID": "x",
    }
    assert environment(plan(), base) == {"PATH": "/bin", "HF_HUB_OFFLINE": "1"}
    cpu = environment(plan(cpu=True), base)
    assert cpu["GLOO_SOCKET_IFNAME"] == "lo" and "RANK" not in cpu


def test_keys_are_long_random_and_do_not_print() -> None:
    one, other = Keys(), Keys()
    assert len({one.api, one.admin, other.api, other.admin}) == 4
    assert all(len(key) >= 32 for key in (one.api, one.admin))
    assert one.api not in repr(one) and one.admin not in repr(one)


STAND_INS = """
import importlib.util, sys
sys.path.insert(0, {folder!r})
import cpu_stand_ins
cpu_stand_ins.STOOD_IN_FOR = ("torchvision", "sgl_kernel", "triton", "json", "absent_entirely")
cpu_stand_ins.install()
cpu_stand_ins.install()
assert sum(type(f).__name__ == "_Finder" for f in sys.meta_path) == 1
import json
assert json.loads("[1]") == [1], "what is installed wins"
import absent_entirely.deep.module as module
from absent_entirely.deep.module import Thing, function
class Own(Thing): pass
assert isinstance(Own(1, size=2), Thing) and Own(size=2).size == 2
assert importlib.util.find_spec("absent_entirely") is None, "probes say that it is absent"
assert importlib.util.find_spec("json") is not None
try:
    function(3)
except NotImplementedError as error:
    print(error)
try:
    import nowhere_at_all
except ModuleNotFoundError as error:
    print(error)
if importlib.util.find_spec("triton") is None:
    import triton, triton.language as tl
    def kernel(): return 7
    assert triton.jit(kernel)() == 7 and triton.autotune(configs=[])(kernel)() == 7
    assert triton.cdiv(7, 2) == 4 and [triton.next_power_of_2(n) for n in (1, 5, 8)] == [1, 8, 8]
    assert hasattr(tl, "constexpr")
"""


def test_stand_ins_can_be_imported_and_nothing_else() -> None:
    code = STAND_INS.format(folder=str(SERVE.parent))
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "absent_entirely.deep.module.function needs a GPU build of SGLang" in shown.stdout
    assert "No module named 'nowhere_at_all'" in shown.stdout


@pytest.mark.parametrize("cpu", [True, False])
def test_a_policy_folder_is_given_as_an_absolute_path(cpu: bool) -> None:
    line = command(plan(folder=Path("policy"), cpu=cpu), 1)
    assert Path(line[line.index("--model-path") + 1]) == Path("policy").resolve()
