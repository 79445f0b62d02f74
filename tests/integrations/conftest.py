"""`pytest tests/integrations --host NAME` runs the tests of one framework in its environment.

Frameworks whose requirements exclude each other have an environment each; without `--host` their
tests are skipped with that reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--host", help="run test_HOST.py alone, in an environment that has the host")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host(name): needs the framework NAME, see --host")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    host = config.getoption("host", None)
    if host is None or collection_path.suffix != ".py":
        return None
    return collection_path.name != f"test_{host}.py"


@pytest.fixture(autouse=True)
def only_with_its_host(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("host")
    if marker is not None and request.config.getoption("host", None) != marker.args[0]:
        pytest.skip(f"needs {marker.args[0]}: make host-test HOST={marker.args[0]}")
