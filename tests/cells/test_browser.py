"""An operator's journey in Chromium through the cells: the page of one, a job of another, and its console there."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, expect

from leasehold.api.console import tickets
from leasehold.security.credentials import parse_key
from tests.cells.conftest import Cell, Two
from tests.cells.test_all_cells import add_to_map, give_keys, operator, silent_server
from tests.cells.test_move import settings_of, submit
from tests.console.test_browser import browser, found_by_axe

__all__ = ["browser"]

_PATIENCE = 60_000


async def entered(page: Page, cell: Cell, key: str, path: str) -> None:
    presented = parse_key(key)
    assert presented is not None
    ticket = tickets.ticket(settings_of(cell), presented.prefix, 600)
    await page.goto(f"{cell.running.url}/console/enter?ticket={ticket}&following={path}")


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    expect.set_options(timeout=_PATIENCE)
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(_PATIENCE)
    wrong: list[str] = []
    page = await context.new_page()

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error":
            wrong.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    await context.close()
    assert [text for text in wrong if "401" not in text] == []  # the sign-in page of the other cell has this status


async def test_an_operator_finds_a_job_of_another_cell_and_goes_there(two: Two, page: Page, tmp_path: Path) -> None:
    job = await submit(two.b.running.url, await two.b.key())
    keys = {cell.name: await operator(cell) for cell in (two.a, two.b)}
    asked: list[str] = []
    async with silent_server() as address:
        add_to_map(two, c=address)
        give_keys(two.a.running, tmp_path / "keys.json", **keys)
        page.on("request", lambda request: asked.append(request.url))
        await entered(page, two.a, keys["a"], "/")
        await page.get_by_role("link", name="Cells").click()
        row = page.locator("tbody tr")
        await expect(row).to_have_count(3)
        await expect(row.nth(0)).to_contain_text("this cell")
        await expect(row.nth(1).locator("[data-label=due]")).to_have_text("1")
        await expect(row.nth(2)).to_contain_text("silent")
        await submit(two.b.running.url, await two.b.key())
        await expect(row.nth(1).locator("[data-label=due]")).to_have_text("2")  # nobody has loaded the page again
        await page.keyboard.press("/")
        await page.keyboard.type(job)
        await page.keyboard.press("Enter")
        found = page.get_by_label("Found").get_by_role("link", name="in cell b")
        await expect(found).to_be_visible()
        assert all(url.startswith(two.a.running.url) for url in asked)  # the browser asks its own cell alone
        content = await page.content()
        assert not any(key[-43:] in content for key in keys.values())
        await found.click()
        await expect(page).to_have_url(f"{two.b.running.url}/console/jobs/{job}")
        await page.get_by_label("API key").fill(keys["b"])
        await page.get_by_role("button", name="Sign in").click()
        await expect(page).to_have_url(re.compile(rf"/console/jobs/{job}$"))
        await expect(page.get_by_role("heading", name="noop")).to_be_visible()


@pytest.mark.parametrize("width", [390, 1440])
async def test_axe_finds_nothing_serious_in_both_themes(two: Two, browser: Browser, tmp_path: Path, width: int) -> None:
    job = await submit(two.b.running.url, await two.b.key())
    keys = {cell.name: await operator(cell) for cell in (two.a, two.b)}
    add_to_map(two, c="http://127.0.0.1:9", d=two.b.running.url)
    give_keys(two.a.running, tmp_path / "keys.json", **keys, d=keys["b"])
    context = await browser.new_context(viewport={"width": width, "height": 844})
    context.set_default_timeout(_PATIENCE)
    try:
        page = await context.new_page()
        found = []
        await entered(page, two.a, keys["a"], "/cells")
        for path in ("/cells", f"/cells?find={job}", "/cells?find=nobody"):
            await page.goto(f"{two.a.running.url}/console{path}")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, path
            for theme in ("light", "dark"):
                await page.emulate_media(color_scheme="light" if theme == "light" else "dark")
                found += [(path, theme, one) for one in await found_by_axe(page, "{}")]
        assert found == []
    finally:
        await context.close()
