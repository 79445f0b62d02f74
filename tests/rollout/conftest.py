"""What the tests on engines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.models import save_tiny_model


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=1)
