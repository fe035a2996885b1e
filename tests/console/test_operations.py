"""Acting on all that a filter finds: seen first, started once, followed and stopped."""

from __future__ import annotations

import re
from html import unescape
from uuid import UUID

import pytest

from leasehold.api.console import operations
from leasehold.db import operation_reads
from leasehold.db.database import Connection
from tests.api.conftest import Running, client_of
from tests.console.conftest import ROLES, MakePerson, Person
from tests.jobs.conftest import Maker
from tests.jobs.test_operations import submit

_ONCE = re.compile(r'name="once" value="([^"]+)"')


async def test_all_that_match_are_seen_before_and_acted_on_once(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    operator = await person(ROLES["operator"])
    for number in range(3):
        await maker.fail(await maker.make("run", scope="user", scope_id=str(number)))
    await maker.make("run", scope="user", scope_id="waiting")
    page = await operator.see("/jobs?q=status:failed")
    assert "/operations/new?action=retry&amp;q=status%3Afailed" in page
    assert "action=delete" not in page  # the key has no scope for it
    page = await operator.see("/operations/new?action=retry&q=status:failed")
    assert "Retry 3 jobs" in page
    assert page.count("broken") == 3
    assert await rows.fetchval("SELECT count(*) FROM job WHERE pipeline = 'operation'") == 0
    fields = {"action": "retry", "filter": "status:failed", "canary": "1", "once": _ONCE.findall(page)[0]}
    first, second = await operator.send("/operations/new", **fields), await operator.send("/operations/new", **fields)
    assert first.headers["location"] == second.headers["location"]
    path = first.headers["location"].removeprefix("/console")
    page = await operator.see(path)
    assert "status:failed" in page
    assert "not known yet" in page
    assert path in await operator.see("/operations")
    operation_id = path.rpartition("/")[2]
    assert "The job is cancelled." in await operator.do(f"/jobs/{operation_id}/cancel", back=path)


async def test_a_later_page_of_refusals_stays_while_the_operation_goes_on(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "_PAGE", 1)
    operator = await person(ROLES["operator"])
    jobs = [await maker.make("run", scope="user", scope_id=str(number)) for number in range(2)]
    answer = await operator.send("/operations/new", action="cancel", filter="kind:run", once="x")
    path = answer.headers["location"].removeprefix("/console")
    for job_id in jobs:
        await rows.execute(
            "INSERT INTO operation_refusal (operation_id, job_id, tenant_id, code, detail)"
            " VALUES ($1, $2, 'acme', 'odd', 'It is odd.')",
            UUID(path.rpartition("/")[2]), job_id,
        )  # fmt: skip
    (more,) = re.findall(r'rel="next" href="/console([^"]+)"', await operator.see(path))
    page = await operator.see(unescape(more))
    assert re.findall(r'/jobs/([0-9a-f-]{36})">', page.split("Refused")[1]) == [str(jobs[0])]
    assert f'hx-get="/console{more}"' in page


async def test_a_wish_that_cannot_be_is_refused_with_its_reason(person: MakePerson) -> None:
    operator = await person(ROLES["operator"])
    assert "There is no job that it could act on." in await operator.see("/operations/new?action=retry&q=status:failed")
    for path in ("?action=burn&q=status:failed", "?action=retry&q=", "?action=retry&q=no:term"):
        await operator.see(f"/operations/new{path}", 422)
    await operator.see("/operations/new?action=delete&q=status:failed", 403)
    for wrong in ({"canary": "x"}, {"rate": "0"}, {"filter": "no:term"}):
        fields = {"action": "retry", "filter": "status:failed"} | wrong
        assert (await operator.send("/operations/new", **fields)).status_code == 422, wrong
    viewer = await person(ROLES["viewer"])
    await viewer.see("/operations/new?action=retry&q=status:failed", 403)
    await viewer.see("/operations")


async def test_no_page_shows_an_operation_on_other_tenants_jobs_to_other_people_of_the_operators_tenant(
    running: Running, person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """Its error counts jobs of other tenants, and names the codes of their refusals."""
    operator = await person(ROLES["admin"], name="operator")
    plain = await person(ROLES["operator"], name="plain")
    async with client_of(running.url, operator.key.text) as client:
        far, late = [await submit(client, "retry", "kind:run tenant:other") for _ in range(2)]
        near = await submit(client, "retry", "kind:run tenant:acme")
    for operation in (far, near):
        await maker.fail(UUID(operation), "canary_failed")
    await rows.execute("UPDATE job SET created_at = created_at - interval '20 minutes' WHERE id = $1", UUID(late))

    async def seen(somebody: Person) -> tuple[int, bool]:
        page = await somebody.see(f"/jobs/fresh?shown={far},{near}")
        return page.count("canary_failed"), f"/console/jobs/{late}" in await somebody.see("/")

    assert await seen(operator) == (2, True)
    assert await seen(plain) == (1, False)
    # The page of a job links to the operations that acted on it.
    for tenant, linked in ((None, {UUID(far), UUID(near)}), ("acme", {UUID(near)})):
        assert await operation_reads.existing(rows, tenant, [UUID(far), UUID(near)]) == linked
