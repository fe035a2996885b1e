"""An Overview that is open costs little: what many share is made once, and the same state is not rendered again."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest
from fastapi import Request

from leasehold.api.console import overview, rates, rendering
from leasehold.api.console.findings import findings_of
from leasehold.api.console.rates import rates_of
from leasehold.api.console.shared import Shared
from leasehold.api.fleet.health import Readiness
from leasehold.api.process import deadline
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.api.process.tenant_pool import set_tenant
from leasehold.db.database import Connection
from leasehold.db.pool_sizes import pool_of_api
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of
from tests.console.conftest import ROLES, MakePerson, Person
from tests.jobs.conftest import Maker


async def test_an_answer_that_equals_the_one_before_is_that_object() -> None:
    shared: Shared[list[int]] = Shared(0.0)
    answers = iter(([1], [1], [2]))

    async def make() -> list[int]:
        return next(answers)

    first, same, other = [await shared.get("key", make) for _ in range(3)]
    assert same is first
    assert other == [2]


async def test_a_failed_answer_is_asked_for_again() -> None:
    shared: Shared[int] = Shared(60.0)

    async def fail() -> int:
        raise ValueError("no")

    async def make() -> int:
        return 7

    with pytest.raises(ValueError, match="no"):
        await shared.get("key", fail)
    assert await shared.get("key", make) == 7


async def refreshed(somebody: Person, mark: str) -> tuple[int, str]:
    answer = await somebody.http.get("/console/", headers={"X-Console-Mark": mark, "HX-Request": "true"})
    return answer.status_code, answer.headers.get("x-console-mark", mark)


@pytest.mark.usefixtures("patient_readiness")
async def test_the_same_state_is_not_rendered_again_and_another_is_shown(
    person: MakePerson, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "REFRESH_SECONDS", 0)
    somebody, other = await person(), await person()
    async with asyncio.timeout(60):
        while "The broker: " in await somebody.see("/"):  # the API has just started, and connects
            await asyncio.sleep(0.05)
    rendered = []
    environment = rendering._environment

    def counted() -> object:
        rendered.append(1)
        return environment()

    monkeypatch.setattr(rendering, "_environment", counted)
    first = await somebody.http.get("/console/")
    mark = first.headers["x-console-mark"]
    assert [await refreshed(somebody, mark) for _ in range(3)] == [(204, mark)] * 3
    assert len(rendered) == 1
    assert (await refreshed(other, mark))[0] == 200, "a page has the token of its session"
    assert (await refreshed(somebody, "another"))[0] == 200, "a browser that shows another page gets this one"
    await maker.make("run")
    status, newer = await refreshed(somebody, mark)
    assert (status, newer == mark) == (200, False)
    await asyncio.gather(*(refreshed(somebody, newer) for _ in range(3)))
    assert await refreshed(somebody, newer) == (204, newer)


async def test_the_rates_of_a_minute_without_new_jobs_are_equal(
    running: Running, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=sorted(ROLES["viewer"]))
    caller = await running.services.keyring.caller_of_session(key.prefix)
    for _ in range(3):
        await maker.make("run")
    made_at = datetime.now(UTC)
    minute = made_at.replace(second=0, microsecond=0) + timedelta(minutes=1)
    await rows.execute("UPDATE job SET created_at = $1", minute + timedelta(seconds=20))
    first, second, later = [
        await rates_of(running.services, caller, minute + timedelta(seconds=seconds)) for seconds in (21, 59, 61)
    ]
    assert first == second
    assert (first.n, first.parts[-1].n, later.n) == (3, 3, 3)
    assert later != first
    monkeypatch.setattr(rates, "SAMPLE", 2)
    estimated = await rates_of(running.services, caller, minute + timedelta(seconds=40))
    (last,) = [part for part in estimated.parts if part.n]
    assert (last.exact, last.n) == (False, 28), "two in 20 s of 4 min 40 s"


async def test_a_message_is_shown_although_the_state_is_the_same(person: MakePerson) -> None:
    somebody = await person()
    mark = (await somebody.http.get("/console/")).headers["x-console-mark"]
    assert (await refreshed(somebody, mark))[0] == 204
    somebody.http.cookies.set(rendering.FLASH, "W3RydWUsImRvbmUiXQ==", domain="127.0.0.1", path="/console")
    answer = await somebody.http.get("/console/", headers={"X-Console-Mark": mark})
    assert (answer.status_code, "done" in answer.text) == (200, True)


async def test_a_message_waits_for_the_page_that_a_form_leads_to(person: MakePerson) -> None:
    """Another open page that refreshed itself in between once took the message away."""
    somebody = await person()
    mark = (await somebody.http.get("/console/")).headers["x-console-mark"]
    somebody.http.cookies.set(rendering.FLASH, "W3RydWUsImRvbmUiXQ==", domain="127.0.0.1", path="/console")
    for known in (mark, "another"):
        answer = await somebody.http.get("/console/", headers={"X-Console-Mark": known, "HX-Request": "true"})
        assert ("set-cookie" in answer.headers, ">done<" in answer.text) == (False, False)
    assert '<p class="flash good" role="status">done</p>' in await somebody.see("/")


async def test_dead_letters_group_the_latest_alone(
    person: MakePerson, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.api.console.dead_letters._MAX_GROUPED", 2)
    somebody = await person()
    for code in ("oldest", "middle", "newest"):
        await maker.fail(await maker.make("run"), code)
    shown = await somebody.see("/dead-letters")
    assert ("newest" in shown, "middle" in shown, "oldest" in shown) == (True, True, False)
    assert "latest 2 dead letters" in shown
    everything = (await maker.client.get("/v1/dead-letters/groups")).json()["groups"]
    assert {group["code"] for group in everything} == {"oldest", "middle", "newest"}


@pytest.mark.usefixtures("patient_readiness")
async def test_who_looks_at_the_same_moment_sees_what_its_own_key_may(
    person: MakePerson, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant, and a narrower key of the same tenant, while the first answer is being made."""
    admin, stranger = await person(ROLES["admin"]), await person(ROLES["viewer"], tenant="rival")
    blind = await person(frozenset({"media:read"}))
    await maker.make("run")
    callers: list[tuple[str, frozenset[str]]] = []
    all_began = asyncio.Event()

    async def together(request: Request, services: Services, caller: Caller) -> object:
        callers.append((caller.tenant_id, caller.scopes))
        if len(callers) == 3:
            all_began.set()
        async with asyncio.timeout(60):
            await all_began.wait()
        return await findings_of(request, services, caller)

    monkeypatch.setattr(overview, "findings_of", together)
    pages = await asyncio.gather(*(somebody.see("/") for somebody in (admin, stranger, blind)))
    assert len(set(callers)) == 3
    unfinished = [re.findall(r"<dd>(\d+)</dd><dt><a [^>]*>(unfinished jobs[^<]*)<", text) for text in pages]
    assert unfinished == [[("1", "unfinished jobs of acme")], [("0", "unfinished jobs")], []]
    assert ["of all tenants" in text for text in pages] == [True, False, False]


@pytest.mark.usefixtures("patient_readiness")
async def test_a_tenant_whose_requests_wait_does_not_make_the_process_unready(
    running: Running, person: MakePerson, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open Overview starts the checks that /readyz shares: they do not wait for the turn of the viewer's tenant."""
    viewer, is_full, may_end = await person(ROLES["viewer"]), asyncio.Event(), asyncio.Event()
    started = asyncio.Event()
    checks = Readiness.checks

    async def noticed(self: Readiness) -> object:
        running_checks = asyncio.ensure_future(checks(self))
        await asyncio.sleep(0)  # the checks of the first caller have begun
        started.set()
        return await running_checks

    monkeypatch.setattr(Readiness, "checks", noticed)

    async def hold() -> None:
        set_tenant("acme")
        async with AsyncExitStack() as stack:
            for _ in range(pool_of_api(settings) - 1):  # all that a tenant may have
                await stack.enter_async_context(running.services.pool.acquire())
            is_full.set()
            await may_end.wait()

    holding = asyncio.create_task(hold())
    await is_full.wait()
    viewing = asyncio.create_task(viewer.http.get("/console/"))
    await started.wait()
    async with client_of(running.url) as probe:
        answer = await probe.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    may_end.set()
    await holding
    assert (await viewing).status_code == 200


@pytest.mark.usefixtures("patient_readiness")
async def test_the_checks_take_nothing_from_the_request_that_starts_them(running: Running) -> None:
    """Not its deadline either: little of it may be left, and /readyz shares these checks."""
    readiness = Readiness(running.services)
    spent = deadline.begin(0.0)
    assert spent.is_over
    checks = {check.name: check for check in await readiness.checks()}
    assert (checks["database"].ok, checks["migrations"].ok) == (True, True)
