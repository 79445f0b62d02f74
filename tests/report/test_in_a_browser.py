"""The page in a real browser: it draws, filters, reads out, and runs nothing that a run said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import Open, drawn
from tests.report.records import HOSTILE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCHEMES = ("light", "dark")
WIDTHS = (1280, 360)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_draws_everything_on_any_screen(
    one_run: Path, grid: Path, opened: Open, width: int, scheme: str
) -> None:
    for file in (one_run, grid):
        page = opened(file, width=width, scheme=scheme)
        figures = page.locator("figure")
        assert drawn(page) == figures.count() >= 10
        for place in range(figures.count()):
            figure = figures.nth(place)
            assert figure.locator("svg .mark-group path").count() > 0, figure.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#failure").is_hidden()
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_hostile_run_is_inert(one_run: Path, opened: Open) -> None:
    page = opened(one_run)
    assert page.evaluate("window.hostile") is None
    assert page.locator("img").count() == 0
    assert HOSTILE in (page.locator("#run-table").text_content() or "")
    assert HOSTILE in (page.locator("#refused").text_content() or "")
    prompt = page.locator("#t-detail .text").first
    assert prompt.text_content() == HOSTILE
    page.locator("#t-list button").nth(1).click()
    page.locator("#accuracy .plot svg").hover(position={"x": 200, "y": 100})
    page.locator("#settings summary").first.click()
    assert page.evaluate("window.hostile") is None


def test_nothing_that_slipped_in_could_run(one_run: Path, browser: Browser) -> None:
    """The content security policy stands behind the escaping; the console says that it refused."""
    page = browser.new_page()
    page.goto(one_run.as_uri())
    drawn(page)
    page.evaluate(
        "text => { const s = document.createElement('script'); s.textContent = text;"
        " document.body.append(s); document.body.insertAdjacentHTML('beforeend',"
        " '<img src=x onerror=\"window.hostile=3\">'); }",
        "window.hostile = 4",
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.hostile") is None
    page.close()


def test_filters_change_what_is_drawn(grid: Path, opened: Open) -> None:
    page = opened(grid)
    assert "12 of 12 runs" in (page.locator("#shown").text_content() or "")
    table = page.locator("#accuracy details")
    table.locator("summary").click()
    table.locator("tbody").wait_for()
    everything = table.locator("tbody tr").count()
    page.get_by_label("estimator.name").select_option("none")
    drawn(page)
    assert "6 of 12 runs" in (page.locator("#shown").text_content() or "")
    assert table.locator("tbody tr").count() == everything / 2
    assert {
        row.split("-")[0] for row in table.locator("tbody td:first-child").all_text_contents()
    } == {"none"}
    page.locator("#first-step").fill("11")
    page.locator("#first-step").press("Enter")
    drawn(page)
    steps = table.locator("tbody tr").all_text_contents()
    assert 0 < len(steps) < everything / 2
    page.get_by_role("button", name="Show all").click()
    drawn(page)
    assert table.locator("tbody tr").count() == everything


def test_a_run_can_be_taken_out_with_the_keyboard_alone(grid: Path, opened: Open) -> None:
    page = opened(grid)
    page.locator("#run-table input").first.focus()
    page.keyboard.press("Space")
    drawn(page)
    assert "11 of 12 runs" in (page.locator("#shown").text_content() or "")


def test_a_chart_is_read_with_arrow_keys(one_run: Path, opened: Open) -> None:
    page = opened(one_run)
    plot = page.get_by_role("application", name="Held-out accuracy")
    plot.focus()
    plot.press("ArrowRight")
    reading = page.locator("#accuracy output")
    assert reading.text_content() == "optimizer steps 0: held-out accuracy 0.4"
    plot.press("End")
    assert reading.text_content() == "optimizer steps 40: held-out accuracy 0.9"


def test_the_axis_can_be_wall_time(one_run: Path, opened: Open) -> None:
    """40 steps of 0.45 s, and three checkpoints of 0.5 s before the last step was done."""
    page = opened(one_run)
    page.get_by_label("wall time").check()
    drawn(page)
    plot = page.get_by_role("application", name="Training reward")
    plot.press("End")
    reading = page.locator("#reward output").text_content() or ""
    hours = float(re.search(r"\(hours\) ([\d.]+)", reading).group(1))  # type: ignore[union-attr]
    assert hours == pytest.approx((40 * 0.45 + 3 * 0.5) / 3600, abs=5e-4)


def test_trajectories_are_found_by_what_they_are(one_run: Path, opened: Open) -> None:
    page = opened(one_run)
    listed = page.locator("#t-list tbody tr")
    assert listed.count() == 60
    page.locator("#t-reward").select_option("positive")
    rewards = listed.locator("td:nth-child(2)").all_text_contents()
    assert 0 < len(rewards) < 60 and set(rewards) == {"1"}
    page.locator("#t-reward").select_option("")
    page.locator("#t-order").select_option("weight")
    weights = [float(text) for text in listed.locator("td:nth-child(3)").all_text_contents()]
    assert weights == sorted(weights, reverse=True)
    page.locator("#t-text").fill("no response says this")
    assert listed.count() == 0
    assert "No trajectory fits" in page.locator("#t-detail").inner_text()


def test_tokens_show_ratio_and_version(one_run: Path, opened: Open) -> None:
    page = opened(one_run)
    response = page.locator("#t-detail .text").last
    assert response.locator(".version").all_text_contents() == ["v0", "v1"]
    coloured = response.locator("span[style]")
    assert coloured.count() == len(f"7+5=12;{HOSTILE}")
    titles = [coloured.nth(place).get_attribute("title") or "" for place in range(30)]
    for place, title in enumerate(titles):
        ratio = float(title.split()[1].rstrip(","))
        colour = coloured.nth(place).evaluate("node => node.style.backgroundColor")
        assert ("--up" in colour) == (ratio > 0), (colour, ratio)
    page.get_by_text("Tokens as a table").click()
    page.locator("#t-detail details tbody").wait_for()
    assert page.locator("#t-detail details tbody tr").count() == coloured.count()


def test_the_comparison_has_means_and_standard_errors(grid: Path, opened: Open) -> None:
    """Finals are 0.70, 0.75, 0.80: mean 0.75, standard error 0.05/√3."""
    page = opened(grid)
    rows = page.locator("#comparison-table tbody tr")
    assert rows.count() == 4
    assert "0.75 ± 0.029" in rows.first.inner_text()
    plot = page.get_by_role("application", name="Final held-out accuracy")
    plot.press("Home")
    assert "0.75 ± 0.029" in (page.locator("#by_final output").text_content() or "")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_known_fault_of_accessibility(
    one_run: Path, grid: Path, opened: Open, scheme: str
) -> None:
    """By the rules of axe-core: names, roles, contrast, focus, headings."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    for file in (one_run, grid):
        found = axe.Axe().run(opened(file, scheme=scheme))
        assert found.violations_count == 0, found.generate_report()
        assert len(found.response["passes"]) > 20
