"""Journeys of people in Chromium: sign in at the OpenID provider, approve a workflow, pause a queue and see who did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.fernet import Fernet
from playwright.async_api import Browser, ConsoleMessage, Request, expect
from pydantic import SecretStr

from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of, serving
from tests.console.conftest import ROLES, THEMES
from tests.console.test_browser import Visit, browser, visit
from tests.console.test_openid import configured, patient
from tests.jobs.conftest import Maker
from tests.support.openid_provider import PASSWORD, Provider, providing
from tests.workflows.shop import app

__all__ = ["browser", "patient", "visit"]


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with providing() as provider:
        yield provider


async def test_somebody_signs_in_at_the_provider_sees_who_they_are_and_signs_out(
    browser: Browser, settings: Settings, provider: Provider
) -> None:
    provider.person("anna", "admins", family_name="Šidlovská")
    async with serving(configured(settings, provider.issuer)) as running:
        provider.client(f"{running.url}/console/oidc/callback")
        context = await browser.new_context()
        context.set_default_timeout(60_000)
        page = await context.new_page()
        wrong: list[str] = []

        def hear(message: ConsoleMessage) -> None:
            """Errors of the provider's own pages are the provider's."""
            if message.type == "error" and not message.location["url"].startswith(provider.issuer):
                wrong.append(f"{message.text} {message.location['url']}")

        def see(request: Request) -> None:
            if not request.url.startswith((running.url, provider.issuer)):
                wrong.append("x")

        page.on("console", hear)
        page.on("request", see)
        await page.goto(f"{running.url}/console/people")
        await page.get_by_role("link", name="Sign in with Canaille").click()
        await page.locator("#login").fill("anna")
        await page.locator("#loginform button[type=submit]").click()
        await page.locator("#password").fill(PASSWORD)
        await page.locator("#passwordform button[type=submit]").click()
        await expect(page.get_by_role("heading", name="People")).to_be_visible()
        row = page.locator("tbody tr")
        await expect(row).to_contain_text("anna@example.org")
        await expect(row).to_contain_text("Šidlovská")
        await expect(row).to_contain_text("you")
        await page.get_by_role("link", name="Audit").click()
        await expect(page.locator("tbody tr").first).to_contain_text("session.began")
        await expect(page.locator("tbody tr").first).to_contain_text("person")
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_role("link", name="Sign in with Canaille")).to_be_visible()
        assert [text for text in wrong if "401" not in text] == []
        await context.close()


@pytest.fixture
async def shop(settings: Settings, tmp_path: Path) -> AsyncIterator[Running]:
    """An API and a worker for the workflows of tests/workflows/shop.py."""
    known = settings.model_copy(
        update={
            "pipelines": "tests.workflows.shop:app",
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "work_dir": str(tmp_path),
            "poll_seconds": 0.1,
        }
    )
    async with serving(known) as running, Worker(known, app.pipelines()):
        yield running


@pytest.mark.parametrize("theme", THEMES)
async def test_a_waiting_workflow_is_approved_by_its_form(
    browser: Browser, shop: Running, rows: Connection, theme: str
) -> None:
    """It waits twice. A viewer sees what it waits for, and no form; an operator and an admin approve it."""
    visit = Visit(browser, shop, rows)
    key = await create_key(rows, tenant_id="acme", client_id="maker", scopes=["runs:write", "jobs:read"])
    async with client_of(shop.url, key.text) as client:
        answer = await client.post("/v1/runs", json={"template": "shop.approved", "payload": {}})
        assert answer.status_code == 202, answer.text
        path = f"/jobs/{answer.json()['id']}"
    waits = "EXISTS (SELECT FROM journal WHERE kind = 'signal' AND state = 'open')"
    async with asyncio.timeout(60):
        while not await rows.fetchval(f"SELECT {waits}"):
            await asyncio.sleep(0.05)
    reader = await create_key(rows, tenant_id="acme", client_id="reader", scopes=["role:viewer"])
    async with client_of(shop.url, reader.text) as client:
        explained = (await client.get(f"/v1{path}/explain")).json()["reasons"]
        assert [(one["code"], one["signals"]) for one in explained] == [("waiting_for_signal", ["approved"])]
        job = (await client.get(f"/v1{path}")).json()
        assert [step.get("available_at") for step in job["steps"]] == [None]
        assert [sorted(one) for one in job["waits_for"]] == [["queue", "state", "step"]]
    viewer = await visit("viewer", path, color_scheme=theme)
    await expect(viewer.get_by_label("Waits for approved")).to_be_visible()
    assert await viewer.locator("main form").count() == 0
    for role in ("operator", "admin"):
        page = await visit(role, path, color_scheme=theme)
        form = page.get_by_label("Waits for approved")
        await form.get_by_label("By").fill(role)
        if role == "operator":  # what is written stays, although the page has news
            await page.get_by_role("heading", name="Timeline").click()
            await rows.execute("UPDATE job SET priority = 2 WHERE id = $1", UUID(path.rpartition("/")[2]))
            await page.wait_for_timeout(4500)
            await expect(form.get_by_label("By")).to_have_value(role)
        await form.get_by_role("button", name="Send approved").click()
        await expect(page.get_by_role("status").first).to_contain_text("The job has your answer to approved.")
        if role == "operator":  # the page comes back when the workflow waits again
            async with asyncio.timeout(60):
                while await rows.fetchval("SELECT count(*) FROM journal WHERE kind = 'signal'") < 2:
                    await asyncio.sleep(0.05)
    await expect(page.locator(".head .state")).to_have_text("succeeded")
    await expect(page.locator("main")).to_contain_text("operator")
    for context in visit.contexts:
        await context.close()
    assert visit.wrong == []
    acts = await rows.fetch("SELECT actor FROM audit WHERE action = 'job.signalled' ORDER BY seq")
    assert [act["actor"] for act in acts] == ["operator", "admin"]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("role", ROLES)
async def test_a_queue_is_paused_and_the_audit_says_by_whom(visit: Visit, maker: Maker, role: str, theme: str) -> None:
    await maker.make("media")
    page = await visit(role, "/queues" if role == "admin" else "/", color_scheme=theme)
    if role != "admin":  # queues serve all tenants, and the audit is the admin's
        assert await page.get_by_role("link", name="Queues").count() == 0
        assert await page.get_by_role("link", name="Audit").count() == 0
        return
    row = page.locator("tr", has_text="media")
    await row.get_by_text("Pause…").click()
    await row.get_by_label("Reason").fill("the disk is full")
    await row.get_by_role("button", name="Pause media").click()
    await page.get_by_role("link", name="Audit").click()
    await page.get_by_label("Did").fill("queue.paused")
    await page.get_by_role("button", name="Filter").click()
    act = page.locator("tbody tr")
    await expect(act).to_have_count(1)
    await expect(act).to_contain_text("media")
    await expect(act).to_contain_text("admin")
    await expect(act).to_contain_text("the disk is full")
    await expect(page.locator(".chain")).to_contain_text("unbroken")


@pytest.mark.parametrize("role", ROLES)
async def test_orders_of_unknown_outcome_are_picked_and_given_up(visit: Visit, maker: Maker, role: str) -> None:
    for _ in range(2):
        await maker.lose_order(await maker.make("generation"))
    page = await visit(role, "/to-settle")
    await expect(page.locator("tbody tr")).to_have_count(2)
    if role == "viewer":
        assert await page.locator("main form").count() == 0
        return
    await page.get_by_label("Pick all on this page").check()
    await page.get_by_role("button", name="Give up").click()
    await expect(page.get_by_role("status").first).to_contain_text("2 of 2 given up.")
    await expect(page.get_by_text("No order waits for a person.")).to_be_visible()


async def test_a_key_is_made_and_revoked_without_a_command(visit: Visit) -> None:
    page = await visit("admin", "/keys")
    await page.get_by_text("Make a key…").click()
    await page.get_by_label("Who uses it").fill("billing")
    await page.get_by_role("button", name="Make the key").click()
    await expect(page.locator(".secret")).to_contain_text("lh_")
    await page.get_by_role("link", name="Keys").last.click()
    row = page.locator("tr", has_text="billing")
    await row.get_by_text("Change…").click()
    await row.get_by_role("button", name="Revoke for good").click()
    await expect(page.get_by_role("status").first).to_contain_text("is revoked.")
    await expect(page.locator("tr", has_text="billing")).to_have_count(0)
    operator = await visit("operator")
    assert await operator.get_by_role("link", name="Keys").count() == 0


@pytest.mark.parametrize("role", ["viewer", "operator"])
async def test_a_silent_external_step_is_found_and_its_end_is_seen(
    visit: Visit, maker: Maker, rows: Connection, running: Running, role: str
) -> None:
    """From the sentence of Overview to the job, which a worker outside then does while the page is open."""
    job_id = await maker.make("run")
    await rows.execute("UPDATE task SET available_at = now() - interval '1 day' WHERE job_id = $1", job_id)
    page = await visit(role)
    await expect(page.get_by_label("Findings")).to_contain_text("One due step has no external worker.")
    await page.get_by_label("Findings").get_by_role("link", name="To settle").click()
    await expect(page.locator("tbody tr")).to_have_count(1)
    await page.locator("tbody a").first.click()
    why = page.get_by_label("Why it waits")
    await expect(why).to_contain_text("waits until an external worker claims tasks of the queue q.")
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=["external:work"])
    async with client_of(running.url, key.text) as worker:
        for step in ("a", "b"):
            asked = {"worker_id": "w1", "queues": ["q"]}
            (task,) = (await worker.post("/v1/external/claim", json=asked)).json()["tasks"]
            if step == "a":
                await expect(why).to_contain_text("a is running.")  # nobody has loaded the page again
            done = {"worker_id": "w1", "epoch": task["epoch"], "result": {"found": 7}}
            assert (await worker.post(f"/v1/external/tasks/{task['task_id']}/complete", json=done)).is_success
    await expect(page.locator(".head .state")).to_have_text("succeeded")
    await expect(page.locator("main")).to_contain_text('"found": 7')
    await expect(page.get_by_role("heading", name="Ledger")).to_be_visible()
    await page.get_by_role("link", name="To settle").click()
    await page.get_by_role("link", name="Silent external steps").click()
    await expect(page.get_by_text("No external step is silent.")).to_be_visible()


async def test_a_view_is_saved_used_and_forgotten(visit: Visit, maker: Maker) -> None:
    await maker.make("media")
    await maker.make("run")
    page = await visit("operator", "/jobs")
    await page.keyboard.press("/")
    await page.keyboard.type("kind:media created:<1h")
    await page.keyboard.press("Enter")
    await page.get_by_text("Save the view…").click()
    await page.get_by_label("Its name, for everybody of acme").fill("Pictures that wait")
    await page.get_by_role("button", name="Save", exact=True).click()
    await expect(page.get_by_role("status").first).to_contain_text("The view Pictures that wait is saved.")
    viewer = await visit("viewer", "/jobs")
    await expect(viewer.locator("tbody tr")).to_have_count(2)
    await viewer.get_by_role("link", name="Pictures that wait").click()
    await expect(viewer.locator("tbody tr")).to_have_count(1)
    await page.get_by_role("button", name="Forget this view").click()
    await expect(page.get_by_role("link", name="Pictures that wait")).to_have_count(0)


async def test_a_backfill_is_seen_before_it_starts(visit: Visit, maker: Maker) -> None:
    await maker.make("run")
    body = {"template": "outside", "cron": "0 9 * * *", "overlap": "allow_all", "scope": "user", "scope_id": "s"}
    made = (await maker.client.post("/v1/schedules", json=body)).json()
    page = await visit("operator", f"/schedules/{made['id']}")
    day = datetime.now(UTC).date()
    await page.get_by_text("Backfill…").click()
    await page.get_by_label("From, in UTC").fill(f"{day - timedelta(days=3)}T12:00")
    await page.get_by_label("Up to; empty: now").fill(f"{day - timedelta(days=1)}T12:00")
    await page.get_by_role("button", name="Preview").click()
    await expect(page.get_by_role("heading", name="Backfill 2 runs")).to_be_visible()
    await page.get_by_role("button", name="Start 2 runs").click()
    await expect(page.get_by_role("status").first).to_contain_text("2 runs have started.")
    await expect(page.locator("table").last.locator("tbody tr")).to_have_count(2)
