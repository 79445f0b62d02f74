"""Which room may import which: the estimators know torch alone, engines and learner never meet."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "megatron_gmc"

# Room → what it may import of the package, besides itself. Modules that stand at the top of the
# package (train.py, lead.py, …) are where rooms meet and may import everything.
ALLOWED = {
    "estimators": set(),
    "convert": set(),
    "rollout": set(),
    "tasks": {"megatron_gmc.rollout.types"},
    "learner": {
        "megatron_gmc.estimators",
        "megatron_gmc.convert",
        "megatron_gmc.config",
        "megatron_gmc.optim_config",
        "megatron_gmc.errors",
    },
    "launch": {
        "megatron_gmc.config",
        "megatron_gmc.convert",
        "megatron_gmc.errors",
        "megatron_gmc.failures",
        "megatron_gmc.learner",
        "megatron_gmc.settings",
        "megatron_gmc.setup_checks",
    },
    "theory": {"megatron_gmc.estimators"},
    "integrations": {"megatron_gmc.estimators"},
    "report": {
        "megatron_gmc.errors",
        "megatron_gmc.metrics",
        "megatron_gmc.run_record",
        "megatron_gmc.signs",
    },
    "sweep": {
        "megatron_gmc.config",
        "megatron_gmc.errors",
        "megatron_gmc.run_folder",
        "megatron_gmc.section",
        "megatron_gmc.settings",
    },
    "evaluate": {
        "megatron_gmc.config",
        "megatron_gmc.errors",
        "megatron_gmc.rollout",
        "megatron_gmc.run_folder",
        "megatron_gmc.section",
        "megatron_gmc.settings",
        "megatron_gmc.setup_checks",
        "megatron_gmc.tasks",
    },
}
# Third parties that a room must never import, directly at least.
FORBIDDEN = {
    "estimators": {"megatron", "transformers", "pydantic", "numpy", "torch.distributed"},
    "convert": {"megatron", "transformers", "torch.distributed"},
    "rollout": {"megatron"},
    "tasks": {"megatron", "torch"},
    "learner": {"transformers", "httpx", "starlette"},
    "theory": {"megatron", "transformers", "pydantic", "torch.distributed"},
    "integrations": {"pydantic"},
    "launch": {"transformers", "httpx"},
    "report": {"megatron", "torch", "transformers"},
    "evaluate": {"megatron", "torch"},
    "sweep": {"megatron", "torch"},
}
# Files, and no process groups.
EXCEPT = {"convert": {"torch.distributed.checkpoint"}}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    own = f"megatron_gmc.{room}"
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name in imports(path):
            if not within(name, EXCEPT.get(room, set())):
                assert not within(name, FORBIDDEN[room]), f"{path} imports {name}"
            # `from megatron_gmc import x` reports the package itself as well.
            if name.startswith("megatron_gmc."):
                assert within(name, {own, *ALLOWED[room]}), f"{path} imports {name}"


def test_every_room_is_listed() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(ALLOWED)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from megatron_gmc.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'megatron', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.endswith("[]\n"), shown.stdout
