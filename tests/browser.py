"""A real browser without a screen, and pages that it opens; fixtures for several rooms' tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Open = Callable[..., "Page"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed after each module: while its driver is open, this thread can run no event loop."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no browser test: pip install playwright drives one"
    )
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        pytest.skip(f"no browser test: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        # The sandbox wants a user other than root; the pages are our own.
        started = driver.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens a page without a network; whatever the console said by the end fails the test."""
    said: list[str] = []
    contexts = []

    def open_page(file: Path, *, width: int = 1280, scheme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
        page.on("request", lambda request: said.extend(_outside(request.url)))
        page.goto(file.as_uri())
        drawn(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def _outside(url: str) -> list[str]:
    return [] if url.startswith(("file:", "data:")) else [f"asked for {url}"]


def drawn(page: Page) -> int:
    """Wait until all charts are drawn; return how many they are."""
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    return int(page.get_attribute("body", "data-drawn") or 0)
