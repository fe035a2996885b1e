"""Journeys through the console in Chromium, as viewer, operator and admin.

No page may write an error to the browser's console or ask another origin, and axe finds nothing serious on any page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request, expect

from leasehold.api.console import tickets
from leasehold.db.database import Connection
from leasehold.embedded.process import EmbeddedError
from leasehold.security.credentials import NewKey, create_key, revoke_key
from leasehold.transitions import settlements
from tests.api.conftest import Running
from tests.console.conftest import ROLES, THEMES
from tests.console.test_roles import furnished
from tests.jobs.conftest import Maker
from tests.jobs.test_job_logs import emit, write
from tests.support.chromium import browsing
from tests.support.lock_waits import until_waiting
from tests.support.not_here import not_here

AXE = (Path(__file__).parent / "vendor/axe-4.14.1.min.js").read_text()
#: A machine that runs the whole suite is slow at times.
_PATIENCE = 60_000


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=_PATIENCE)
    try:
        async with browsing() as browser:
            yield browser
    except EmbeddedError as error:
        not_here(f"Chromium, which the console's journeys need: {error}")


@dataclass
class Visit:
    """Somebody with a role opens the console, signed in. `wrong`: the errors of all pages, and requests elsewhere."""

    browser: Browser
    running: Running
    rows: Connection
    wrong: list[str] = field(default_factory=list)
    contexts: list[BrowserContext] = field(default_factory=list)
    key: NewKey | None = None

    async def __call__(self, role: str = "admin", path: str = "/", **options: Any) -> Page:
        self.key = await create_key(self.rows, tenant_id="acme", client_id=role, scopes=sorted(ROLES[role]))
        context = await self.browser.new_context(**{"viewport": {"width": 1440, "height": 900}} | options)
        self.contexts.append(context)
        context.set_default_timeout(_PATIENCE)
        page = await context.new_page()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", self._see)
        ticket = tickets.ticket(self.running.services.settings, self.key.prefix, 600)
        await page.goto(f"{self.running.url}/console/enter?ticket={ticket}&following={path}")
        return page

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.wrong.append(message.text)

    def _see(self, request: Request) -> None:
        if not request.url.startswith(self.running.url):
            self.wrong.append(request.url)

    def forgive(self, *parts: str) -> None:
        """The test itself caused errors with these texts: at least one with the first, and all are gone then."""
        assert any(parts[0] in text for text in self.wrong), self.wrong
        self.wrong[:] = [text for text in self.wrong if not any(part in text for part in parts)]


@pytest.fixture
async def visit(browser: Browser, running: Running, rows: Connection) -> AsyncIterator[Visit]:
    visit = Visit(browser, running, rows)
    yield visit
    for context in visit.contexts:
        await context.close()
    assert visit.wrong == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("role", ["operator", "admin"])
async def test_find_the_failed_pictures_of_the_last_hour_and_retry_them(
    visit: Visit, maker: Maker, rows: Connection, role: str, theme: str
) -> None:
    failed = [await maker.make("media") for _ in range(3)]
    for job_id in failed:
        await maker.fail(job_id, "corrupt_image")
    await maker.make("run")
    page = await visit(role, color_scheme=theme)
    await page.get_by_role("link", name="Dead letters").last.click()
    await expect(page.get_by_role("link", name="corrupt_image")).to_be_visible()
    await page.wait_for_load_state()
    await page.keyboard.press("g")
    await page.keyboard.press("j")
    await expect(page).to_have_url(re.compile(r"/console/jobs$"))
    await page.wait_for_load_state()  # before, nobody hears a key
    await page.keyboard.press("/")
    await page.keyboard.type("kind:media status:failed created:<1h")
    await page.keyboard.press("Enter")
    await expect(page.locator("tbody tr")).to_have_count(3)
    await page.wait_for_load_state()
    await expect(page.get_by_role("button", name="Retry")).to_be_hidden()
    await page.get_by_label("Pick all on this page").check()
    await expect(page.locator("#picked b")).to_have_text("3")
    await page.get_by_role("button", name="Retry").click()
    await expect(page.get_by_role("status")).to_contain_text("3 of 3 jobs retried.")
    assert await rows.fetchval("SELECT count(*) FROM job WHERE id = ANY($1) AND status = 'failed'", failed) == 0


@pytest.mark.parametrize("theme", THEMES)
async def test_a_viewer_finds_them_and_has_no_button(visit: Visit, maker: Maker, theme: str) -> None:
    job_id = await maker.make("media")
    await maker.fail(job_id)
    page = await visit("viewer", "/jobs?q=status:failed", color_scheme=theme)
    await expect(page.locator("tbody tr")).to_have_count(1)
    await expect(page.locator("tbody input")).to_have_count(0)
    await page.locator("tbody a").first.click()
    await expect(page.get_by_role("heading", name="media")).to_be_visible()
    assert await page.locator("main form").count() == 0
    await expect(page.get_by_role("button", name="Copy as curl")).to_be_visible()


async def test_why_does_this_job_wait(visit: Visit, maker: Maker, rows: Connection) -> None:
    await rows.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('acme', 'tenant', 1, true)")
    await maker.make("run", scope="user", scope_id="1")
    waiting = await maker.make("run", scope="user", scope_id="2")
    for role, theme in product(ROLES, THEMES):
        page = await visit(role, f"/jobs/{waiting}", color_scheme=theme)
        await expect(page.get_by_label("Why it waits")).to_contain_text(
            "The limit tenant admits 1 job at once, and 1 is running."
        )


async def test_a_job_is_followed_to_its_end_and_retried_from_a_step(visit: Visit, maker: Maker) -> None:
    job_id = await maker.make("run")
    page = await visit("operator", f"/jobs/{job_id}")
    await expect(page.locator(".head .state")).to_have_text("waiting worker")
    await maker.fail(job_id, "no_space")
    await expect(page.locator(".head .state")).to_have_text("failed")  # nobody has loaded the page again
    await expect(page.locator("section.fault")).to_contain_text("no_space")
    await page.get_by_text("Retry with…").click()
    await page.get_by_label("From step").select_option("a")
    await page.locator("details[open]").get_by_role("button", name="Retry").click()
    await expect(page.get_by_role("status")).to_contain_text("The job runs again.")


async def test_a_job_that_has_failed_shows_that_somebody_else_retried_it(
    visit: Visit, maker: Maker, rows: Connection
) -> None:
    """Two operators have it open. It stayed as it was until somebody loaded it again."""
    job_id = await maker.make("run")
    await maker.fail(job_id)
    one, other = await visit("operator", f"/jobs/{job_id}"), await visit("admin", f"/jobs/{job_id}")
    await one.get_by_role("button", name="Retry", exact=True).click()
    await expect(one.get_by_role("status").first).to_contain_text("The job runs again.")
    await expect(other.locator(".head .state")).to_have_text("waiting worker")
    await expect(other.locator("main")).to_contain_text("operator retried it")
    await expect(other.get_by_role("button", name="Retry", exact=True)).to_have_count(0)


async def test_a_double_click_acts_once(visit: Visit, maker: Maker, rows: Connection) -> None:
    made = [await maker.make("run", scope="user", scope_id=str(n)) for n in range(4)]
    for job_id in made:
        await maker.fail(job_id)
    page = await visit("operator", f"/jobs/{made[0]}")

    async def click_twice(button: Locator) -> None:
        """While the API is at the first click: the second could meet the next page."""
        await button.scroll_into_view_if_needed()
        box = await button.bounding_box()
        assert box is not None
        async with rows.transaction():
            await rows.execute("SELECT 1 FROM job WHERE status = 'failed' FOR UPDATE")
            await page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    await click_twice(page.get_by_role("button", name="Retry", exact=True))
    await expect(page.get_by_role("status").first).to_have_text("The job runs again.")
    await page.get_by_role("link", name="Dead letters").click()
    await page.get_by_role("link", name="broken").click()
    box = await page.get_by_role("button", name="Retry a canary").bounding_box()
    assert box is not None
    place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    async with rows.transaction():  # the API is still at the first click when the second comes
        await rows.execute("SELECT 1 FROM job WHERE status = 'failed' FOR UPDATE")
        await page.mouse.click(*place)
        await until_waiting(rows)
        await page.mouse.click(*place)
    await expect(page.get_by_role("status").first).to_contain_text("as a trial of its group")
    await page.goto(f"{visit.running.url}/console/jobs?q=status:failed")
    await page.get_by_label("Pick all on this page").check()
    await click_twice(page.get_by_role("button", name="Retry"))
    await expect(page.get_by_role("status").first).to_have_text("2 of 2 jobs retried.")
    assert await rows.fetchval("SELECT count(*) FROM audit WHERE action = 'job.retried'") == 4


async def test_what_a_step_emits_and_logs_is_seen_as_it_comes(visit: Visit, maker: Maker, rows: Connection) -> None:
    """Nobody loads the page again. A step that runs again begins its stream again."""
    job_id = await maker.make("run")
    claimed = await maker.claim(job_id)
    await emit(rows, claimed, 1, "Once upon")
    page = await visit("viewer", f"/jobs/{job_id}")
    stream = page.get_by_label("Stream of a")
    await expect(stream).to_contain_text("Once upon")
    await emit(rows, claimed, 2, " a time", {"tokens": 4})
    await write(rows, claimed, 1, "four tokens so far")
    await expect(stream).to_contain_text('Once upon a time {"tokens":4}')
    await expect(page.locator("pre.log", has_text="four tokens so far")).to_be_visible()
    await settlements.release(rows, [claimed.lease])
    claimed = await maker.claim(job_id)
    await emit(rows, claimed, 1, "There was", restarts=True)
    await expect(stream).to_contain_text("There was")
    await expect(stream).not_to_contain_text("Once upon")


async def test_a_hidden_tab_asks_for_nothing_and_a_shown_one_at_once(visit: Visit, maker: Maker) -> None:
    job_id = await maker.make("run")
    page = await visit("viewer")
    await page.clock.install()
    await page.goto(f"{visit.running.url}/console/jobs/{job_id}")
    hide = "Object.defineProperty(document, 'hidden', {get: () => window.isHidden, configurable: true})"
    await page.evaluate(f"window.isHidden = true; {hide}")
    asked: list[str] = []

    def note(request: Any) -> None:
        name = request.url.rpartition("/")[2]
        if name != "icon.svg":  # the browser itself asks for the tab's icon, some time after the page has come
            asked.append(name)

    page.on("request", note)
    await page.clock.run_for(120_000)
    await page.evaluate("fetch('/console/nothing?fence')")  # what was asked for before has been seen when this is
    assert asked == ["nothing?fence"]
    await maker.fail(job_id)
    await page.evaluate("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    await expect(page.locator(".head .state")).to_have_text("failed")
    assert asked[:2] == ["nothing?fence", str(job_id)]  # and again, once its next refresh is due
    visit.forgive("404")


async def test_a_link_to_a_job_leads_through_the_sign_in_to_the_job(visit: Visit, maker: Maker) -> None:
    job_id = await maker.make("run")
    page = await visit("viewer")
    await page.context.clear_cookies()
    link = f"{visit.running.url}/console/jobs/{job_id}"
    await page.goto(link)
    assert visit.key is not None
    await page.get_by_label("API key").fill(visit.key.text)
    await page.keyboard.press("Enter")
    await expect(page.locator(".head .state")).to_have_text("waiting worker")
    assert page.url == link
    visit.forgive("401")


async def test_a_wrong_filter_is_marked_at_its_character_and_mended_in_place(visit: Visit, maker: Maker) -> None:
    await maker.make("media")
    page = await visit("viewer", "/jobs")
    typed = page.get_by_label("Filter", exact=True)
    await typed.fill("kind:media staus:failed")
    await typed.press("Enter")
    await expect(page.get_by_role("alert").locator("mark")).to_have_text("s")
    await expect(page.get_by_role("alert")).to_contain_text("There is no term")
    await expect(typed).to_have_value("kind:media staus:failed")
    await expect(typed).to_be_focused()
    await typed.fill("kind:media")
    await typed.press("Enter")
    await expect(page.locator("tbody tr")).to_have_count(1)
    visit.forgive("422")


async def test_a_queue_is_paused_with_a_reason(visit: Visit, maker: Maker) -> None:
    await maker.make("media")
    page = await visit("admin", "/queues")
    row = page.locator("tr", has_text="media")
    await row.get_by_text("Pause…").click()
    await row.get_by_label("Reason").fill("the disk is full")
    await row.get_by_role("button", name="Pause media").click()
    await expect(page.locator("tr", has_text="media")).to_contain_text("the disk is full")
    await page.get_by_role("link", name="Overview").click()
    await expect(page.get_by_label("Findings")).to_contain_text("The queue media is paused: the disk is full")
    viewer = await visit("viewer")
    assert await viewer.get_by_role("link", name="Queues").count() == 0


async def test_rows_change_and_stay_where_they_are(visit: Visit, maker: Maker) -> None:
    first = await maker.make("run", scope="user", scope_id="1")
    page = await visit("operator", "/jobs")
    row = page.locator(f"#job-{first}")
    await row.get_by_role("checkbox").check()
    before = await row.bounding_box()
    await maker.fail(first)
    await maker.make("run", scope="user", scope_id="2")
    await expect(row).to_contain_text("failed")
    await expect(page.get_by_role("link", name="1 newer")).to_be_visible()
    after = await row.bounding_box()
    assert before is not None
    assert after is not None
    assert after["x"] == before["x"]
    await expect(page.locator("tbody tr")).to_have_count(1)
    await expect(row.get_by_role("checkbox")).to_be_checked()
    await page.get_by_role("link", name="1 newer").click()
    await expect(page.locator("tbody tr")).to_have_count(2)


async def test_a_page_says_when_it_gets_no_answer_and_when_its_session_has_ended(
    visit: Visit, maker: Maker, rows: Connection, running: Running
) -> None:
    await maker.make("run")
    page = await visit("operator", "/jobs")
    await page.context.set_offline(True)
    await expect(page.locator("#lost")).to_contain_text("Not connected. This page shows the state of")
    await page.context.set_offline(False)
    await expect(page.locator("#lost")).to_be_hidden()  # after the next answer
    visit.forgive("ERR_INTERNET_DISCONNECTED", "htmx:")
    assert visit.key is not None
    await revoke_key(rows, visit.key.prefix)
    running.services.keyring._cache.clear()
    await expect(page.locator("#lost")).to_contain_text("Your session has ended.")
    await page.close()  # it goes on asking
    visit.forgive("401", "htmx:")


async def test_an_open_page_says_when_its_job_was_deleted(visit: Visit, maker: Maker) -> None:
    """It once said that it was not connected."""
    job_id = await maker.make("run")
    page = await visit("operator", f"/jobs/{job_id}")
    await expect(page.locator(".head .state")).to_have_text("waiting worker")
    await maker.client.delete(f"/v1/jobs/{job_id}")
    await expect(page.locator("#lost")).to_contain_text("This was deleted. This page shows the state of")
    await page.locator("#lost").get_by_role("link", name="Open it again").click()
    await expect(page.get_by_role("heading", name="Gone")).to_be_visible()
    visit.forgive("410", "htmx:")


async def test_reading_and_acting_need_no_javascript(visit: Visit, maker: Maker) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    page = await visit("operator", "/jobs", java_script_enabled=False)
    await page.locator("tbody a").first.click()
    await expect(page.locator(".head .state")).to_have_text("failed")
    await page.get_by_role("button", name="Retry", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("The job runs again.")
    await page.get_by_role("link", name="Dead letters").click()
    await expect(page.get_by_text("No step has failed for good.")).to_be_visible()


async def test_a_double_click_without_javascript_makes_one_key_and_shows_its_secret(
    visit: Visit, running: Running, rows: Connection
) -> None:
    page = await visit("admin", "/keys", java_script_enabled=False)
    await page.get_by_text("Make a key…").click()
    await page.get_by_label("Who uses it").fill("billing")
    await page.get_by_role("button", name="Make the key").dblclick()
    await expect(page.get_by_role("heading", name="The key of billing")).to_be_visible()
    text = await page.locator("pre.secret code").inner_text()
    assert await rows.fetchval("SELECT count(*) FROM api_key WHERE client_id = 'billing'") == 1
    headers = {"Authorization": f"Bearer {text}"}
    async with httpx2.AsyncClient(base_url=running.url, headers=headers, timeout=40) as billing:
        assert (await billing.get("/v1/jobs")).status_code == 200


async def test_a_long_name_of_a_dead_letter_is_read_whole_on_a_phone(
    visit: Visit, maker: Maker, client: httpx2.AsyncClient
) -> None:
    name = "charge_the_card_of_a_customer_and_archive_the_receipt_of_it"
    template = {"type": name, "steps": [{"id": "a", "queue": "q"}]}
    assert (await client.post("/v1/templates", json=template)).status_code == 201
    await maker.fail(await maker.make("run", template=name))
    page = await visit("viewer", "/dead-letters", viewport={"width": 390, "height": 800})
    await expect(page.get_by_text(name)).to_be_visible()
    wide = page.locator(".wide")
    assert await wide.evaluate("each => each.scrollWidth") == await wide.evaluate("each => each.clientWidth")


#: Writes down the texts that the first label for copying has.
_HEAR_LABEL = """() => {
    const label = document.querySelector("main button.copy code");
    window.labels = [];
    new MutationObserver(() => window.labels.push(label.textContent)).observe(label, {childList: true});
}"""


async def test_the_id_in_a_row_and_on_a_page_is_copied(visit: Visit, maker: Maker, running: Running) -> None:
    job_id = await maker.make("media")
    page = await visit("viewer", permissions=["clipboard-read", "clipboard-write"])
    for path in ("/jobs", f"/jobs/{job_id}"):
        await page.goto(f"{running.url}/console{path}")
        await page.evaluate("navigator.clipboard.writeText('')")
        await page.evaluate(_HEAR_LABEL)
        await page.locator("main button.copy").first.click()
        async with asyncio.timeout(60):
            while "copied" not in await page.evaluate("window.labels"):  # for less than a second
                await asyncio.sleep(0.05)
        assert await page.evaluate("navigator.clipboard.readText()") == str(job_id)


async def test_the_keyboard_goes_everywhere(visit: Visit, maker: Maker) -> None:
    for number in range(3):
        await maker.make("run", scope="user", scope_id=str(number))
    page = await visit("admin")
    await page.keyboard.press("?")
    await expect(page.get_by_role("heading", name="Shortcuts")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press("g")
    await page.keyboard.press("j")
    await expect(page).to_have_url(re.compile(r"/console/jobs$"))
    await page.wait_for_load_state()  # before, nobody hears a key
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("k")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    await page.wait_for_load_state()
    await page.keyboard.press("/")
    await expect(page.get_by_label("Filter", exact=True)).to_be_focused()
    await page.keyboard.press("Escape")
    await page.get_by_role("button", name="Light or dark").click()
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("width", [390, 1024])
async def test_every_menu_is_on_the_screen(visit: Visit, maker: Maker, rows: Connection, width: int) -> None:
    """And no page is wider than the screen, on a phone and on a tablet."""
    paths = await furnished(maker, rows)
    page = await visit("admin", viewport={"width": width, "height": 844})
    opened = 0
    for path in paths:
        await page.goto(f"{visit.running.url}/console{path}")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, path
        menus = page.locator("main details.ask > summary:visible")
        for number in range(min(await menus.count(), 4)):
            await menus.nth(number).click()
            box = await page.locator("details.ask[open] > :not(summary)").bounding_box()
            assert box is not None
            assert box["x"] >= 0, path
            assert box["x"] + box["width"] <= width, path
            assert box["y"] + box["height"] <= 844, path
            opened += 1
            await page.keyboard.press("Escape")
    assert opened > 10


#: The cells of a row whose texts lie over each other.
OVERLAPS = """() => [...document.querySelectorAll('tbody tr')].flatMap((row) => {
    const texts = [...row.cells].flatMap((cell) => {
        const found = [], walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            if (!walker.currentNode.parentElement.checkVisibility()) continue;  // in a menu that is closed
            const range = document.createRange();
            range.selectNodeContents(walker.currentNode);
            found.push(...[...range.getClientRects()].filter((box) => box.width > 1).map((box) => [cell, box]));
        }
        return found;
    });
    return texts.flatMap(([cell, a], n) => texts.slice(n + 1).filter(([other, b]) => other !== cell
        && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2)
        .map(([other]) => cell.innerText + ' | ' + other.innerText));
})"""


async def test_a_late_job_is_marked_on_a_phone_too(visit: Visit, maker: Maker, rows: Connection) -> None:
    """Without the column of waits, and not by its colour alone."""
    job_id = await maker.make("media")
    await rows.execute("UPDATE job SET created_at = created_at - interval '20 minutes' WHERE id = $1", job_id)
    page = await visit("viewer", "/jobs", viewport={"width": 390, "height": 844})
    await expect(page.locator(f"#job-{job_id}").get_by_text("late", exact=True)).to_be_visible()


@pytest.mark.parametrize("width", [390, 1024, 1440])
async def test_no_text_of_a_row_lies_over_another(visit: Visit, maker: Maker, rows: Connection, width: int) -> None:
    """On a phone, when a schedule fires next once lay over its state."""
    paths = await furnished(maker, rows)
    body = {"template": "outside", "cron": "0 9 * * 1-5", "timezone": "Europe/Berlin"}
    assert (await maker.client.post("/v1/schedules", json=body)).status_code == 201
    page = await visit("admin", viewport={"width": width, "height": 844})
    overlapping = {}
    for path in ["/", *paths]:
        await page.goto(f"{visit.running.url}/console{path}")
        overlapping[path] = await page.evaluate(OVERLAPS)
    assert {path: texts[:3] for path, texts in overlapping.items() if texts} == {}


async def test_the_filter_completes_a_word(visit: Visit) -> None:
    page = await visit("viewer", "/jobs")
    await page.get_by_label("Filter", exact=True).press_sequentially("kind:run stat")
    assert await page.locator("#words option").first.get_attribute("value") == "kind:run status:pending"


async def found_by_axe(page: Page, rules: str) -> list[str]:
    answer = await page.evaluate(f"{AXE}; axe.run(document, {rules})")
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary'][:200]}"
        for one in answer["violations"]
        if one["impact"] in ("serious", "critical")
    ]


async def test_axe_finds_nothing_serious_on_any_page_in_both_themes(
    visit: Visit, maker: Maker, rows: Connection, running: Running
) -> None:
    await rows.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('acme', 'tenant', 9, true)")
    paths = ["/", *await furnished(maker, rows), "/nothing", "/jobs?q=no:term"]
    all_rules, colours = "{}", "{runOnly: ['color-contrast']}"
    page = await visit("admin", color_scheme="light")
    found = []
    for path in paths:
        await page.goto(f"{running.url}/console{path}")
        await page.emulate_media(color_scheme="light")
        found += [(path, "light", one) for one in await found_by_axe(page, all_rules)]
        await page.emulate_media(color_scheme="dark")
        found += [(path, "dark", one) for one in await found_by_axe(page, colours)]
    assert found == []
    visit.forgive("404")  # of /nothing
    visit.forgive("422")  # of the wrong filter
    await page.evaluate("document.querySelector('h1').style.color = '#eee'; document.body.append(new Image())")
    await page.emulate_media(color_scheme="light")
    assert [one.partition(":")[0] for one in await found_by_axe(page, all_rules)] == ["color-contrast", "image-alt"]


async def test_no_page_is_wider_than_a_phone(visit: Visit, maker: Maker, rows: Connection, running: Running) -> None:
    tags = {"owner": "a-team-with-a-long-name-that-does-not-end-so-soon", "project": "مشروع الاختبار"}
    name = "a-template-with-a-very-long-name-that-somebody-chose-in-a-hurry"
    await maker.client.post("/v1/templates", json={"type": name, "steps": [{"id": "s" * 60, "queue": "q"}]})
    answer = await maker.client.post("/v1/runs", json={"template": name, "tags": tags})
    assert answer.status_code == 202, answer.text
    paths = ["/", f"/jobs/{answer.json()['id']}", *await furnished(maker, rows)]
    page = await visit("admin", viewport={"width": 390, "height": 844})
    wide = []
    for path in paths:
        await page.goto(f"{running.url}/console{path}")
        width = await page.evaluate("document.documentElement.scrollWidth")
        if width > 390:
            over = "e => e.getBoundingClientRect().right > 391 && !e.closest('.wide, nav')"
            found = f"[...document.querySelectorAll('body *')].filter({over}).map(e => e.outerHTML.slice(0, 150))"
            wide.append((path, width, (await page.evaluate(found))[:3]))
    assert wide == [], "\n".join(map(str, wide))
