"""Every act of the console, tried as every role: what a key's scopes do not allow is refused, and has no button."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx2
import pytest
from fastapi.routing import APIRoute

from leasehold.api.app import make_app
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.settings import Settings
from leasehold.transitions import queues
from tests.api.conftest import Running
from tests.api.media_api import problem
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker
from tests.jobs.test_job_logs import emit
from tests.security.test_public_endpoints import flat
from tests.support.routes import methods_of

#: By path: the scopes any one of which allows the act. Written by hand, and compared with what the routes declare.
ACTS: dict[str, set[str]] = {
    "/jobs/act": {"jobs:operate"},
    "/jobs/views/save": {"jobs:operate"},
    "/jobs/views/{view_id}/delete": {"jobs:operate"},
    "/jobs/{job_id}/cancel": {"jobs:operate"},
    "/jobs/{job_id}/retry": {"jobs:operate"},
    "/jobs/{job_id}/delete": {"jobs:delete"},
    "/dead-letters/{fingerprint}/replay": {"jobs:operate", "runs:write"},
    "/dead-letters/letters/{task_id}/replay": {"jobs:operate", "runs:write"},
    "/operations/new": {"jobs:operate", "jobs:delete"},
    "/queues/{queue:path}/pause": {"fleet:operate"},
    "/queues/{queue:path}/resume": {"fleet:operate"},
    "/workers/{worker_id}/drain": {"fleet:operate"},
    "/limits/set": {"fleet:operate"},
    "/limits/lift": {"fleet:operate"},
    "/schedules/{schedule_id}/run-now": {"runs:write"},
    "/schedules/{schedule_id}/change": {"runs:write"},
    "/schedules/{schedule_id}/backfill": {"runs:write"},
    "/templates/{kind}/{version}/enable": {"templates:write"},
    "/templates/{kind}/{version}/delete": {"templates:write"},
    "/webhooks/{webhook_id}/test": {"webhooks:write"},
    "/webhooks/{webhook_id}/enable": {"webhooks:write"},
    "/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver": {"webhooks:write"},
    "/jobs/{job_id}/signals/{name}": {"runs:write"},
    "/to-settle/settle": {"jobs:operate"},
    "/keys/new": {"keys:write"},
    "/keys/{prefix}/rotate": {"keys:write"},
    "/keys/{prefix}/expire": {"keys:write"},
    "/keys/{prefix}/revoke": {"keys:write"},
    "/people/{person_id}/role": {"people:write"},
    "/people/{person_id}/disable": {"people:write"},
    "/people/{person_id}/end-sessions": {"people:write"},
    "/tenants/go": set(),
    "/sign-out": set(),
}
#: For who signed in at the OpenID provider: a key has one tenant.
OF_PEOPLE = {"/tenants/go"}
NOBODY = "01a204b8-0000-7000-8000-000000000000"
ROUTES = [
    route
    for route in flat(make_app(Settings(_env_file=None)).routes)
    if isinstance(route, APIRoute) and route.path.startswith("/console")
]


def paths(method: str) -> set[str]:
    return {route.path.removeprefix("/console") for route in ROUTES if method in methods_of(route)}


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", NOBODY, path.replace("{version}", "1"))


def test_every_act_stands_in_the_table() -> None:
    assert paths("POST") == ACTS.keys() | {"/sign-in"}
    assert {method for route in ROUTES for method in methods_of(route)} == {"GET", "POST"}


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
async def test_an_act_needs_its_scope_whoever_tries(running: Running, person: MakePerson, role: str) -> None:
    scopes = ROLES.get(role, frozenset())
    somebody = await person(scopes)
    token = await somebody.token()
    for path, allowing in ACTS.items():
        answer = await somebody.http.post(f"/console{filled(path)}", data={"token": token}, headers={"Accept": "*/*"})
        if allowing and not allowing & scopes:
            problem(answer, 403, "insufficient_scope")
        else:
            assert answer.status_code not in (401, 403, 500), (path, answer.text)
        async with httpx2.AsyncClient(base_url=running.url, timeout=40) as stranger:
            problem(await stranger.post(f"/console{filled(path)}", data={"token": token}), 401, "missing_api_key")


def pattern_of(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{[^}]*\}", "[^/]+", path))


async def furnished(maker: Maker, rows: Connection) -> list[str]:
    """One of everything that can be acted on. Returns the pages that show them all, to who may see them."""
    failed, _waiting = await maker.make("run"), await maker.make("media")
    await maker.fail(failed)
    running = await maker.make("run", scope="user", scope_id="b")
    await maker.claim(running)
    retried = await maker.make("run", scope="user", scope_id="c")
    await maker.fail(retried)
    assert (await maker.client.post(f"/v1/jobs/{retried}/retry")).status_code == 202
    await emit(rows, await maker.claim(retried), 1, "Once upon a time", {"tokens": 4})
    letters = (await maker.client.get("/v1/dead-letters")).json()["dead_letters"]
    schedule = await maker.client.post("/v1/schedules", json={"template": "outside", "cron": "0 9 * * *"})
    assert schedule.status_code == 201, schedule.text
    scheduled = f"/schedules/{schedule.json()['id']}"
    delivery = await maker.make("webhook")
    await maker.fail(delivery)
    webhook = await rows.fetchval("SELECT params ->> 'webhook_id' FROM job WHERE id = $1", delivery)
    await queues.pause(rows, "conversion", "a test")
    await rows.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('*', 'queue:media', 5, true)")
    await rows.execute(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, value, epoch)"
        " VALUES ($1, '', 1, 'signal', 'approved', 'open', '{\"schema\": {\"type\": \"boolean\"}}', 1)",
        running,
    )
    await rows.execute(
        "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes)"
        " VALUES ($1, 'acme', 'https://id.example', 'x', 'anna@example.org', 'Anna', '{role:viewer}')",
        new_id(),
    )
    unknown = await maker.make("generation")
    await maker.lose_order(unknown)
    await rows.execute(
        "INSERT INTO worker (id, present, host, pid, version, queues) VALUES ($1, false, 'h', 1, '0', '{media}')",
        new_id(),
    )
    past = (datetime.now(UTC) - timedelta(days=3)).strftime("%Y-%m-%d")
    await rows.execute(
        "INSERT INTO saved_view (id, tenant_id, name, filter, saved_by) VALUES ($1, 'acme', 'v', 'kind:media', 'x')",
        new_id(),
    )
    return [
        "/jobs", "/jobs?q=kind:run", "/jobs?q=kind:media", "/operations",
        "/operations/new?action=retry&q=status:failed", f"/jobs/{failed}", f"/jobs/{running}",
        f"/jobs/{retried}",
        "/dead-letters", f"/dead-letters/{letters[0]['fingerprint']}", "/queues", "/workers", "/limits", "/keys",
        "/limits/jobs?tenant=*&key=queue:media",
        "/schedules", scheduled, f"{scheduled}/backfill?start={past}",
        "/templates", "/templates/outside/1", "/webhooks",
        f"/webhooks/{webhook}", "/to-settle", "/to-settle?what=external", "/to-settle?what=webhooks",
        "/to-settle?what=approvals", "/to-settle?what=schedules", "/people", "/audit",
    ]  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
async def test_a_page_has_no_button_that_would_be_refused(
    person: MakePerson, maker: Maker, rows: Connection, role: str
) -> None:
    """And none is missing: who may act finds the form. A page that is refused has no link in the navigation."""
    scopes = ROLES[role]
    somebody = await person(scopes)
    pages, acts, refused = await furnished(maker, rows), set(), set()
    for path in pages:
        answer = await somebody.http.get(f"/console{path}")
        assert answer.status_code in (200, 403), (path, answer.text)
        if answer.status_code == 403:
            refused.add(path)
        acts |= set(re.findall(r'method="post" action="/console([^"]*)"', answer.text))
    shown = {path for path in ACTS if any(pattern_of(path).fullmatch(act) for act in acts)}
    assert shown == {path for path, allowing in ACTS.items() if allowing & scopes or not allowing} - OF_PEOPLE
    assert all(any(pattern_of(path).fullmatch(act) for path in ACTS) for act in acts)
    overview = await somebody.see("/")
    assert [path for path in pages if f'<a href="/console{path}"' in overview and path in refused] == []


async def test_an_operation_on_kinds_that_a_key_may_not_write_has_no_button_to_retry_it(
    person: MakePerson, maker: Maker
) -> None:
    wish = {"action": "retry", "filter": "kind:run"}
    operation = (await maker.client.post("/v1/operations", json=wish)).json()["id"]
    await maker.fail(UUID(operation), "canary_failed")
    form = f'action="/console/jobs/{operation}/retry"'
    narrow, wide = frozenset({"jobs:read", "jobs:operate"}), frozenset({"jobs:read", "jobs:operate", "runs:write"})
    assert form not in await (await person(narrow)).see(f"/jobs/{operation}")
    assert form in await (await person(wide)).see(f"/jobs/{operation}")


async def test_a_tenant_sees_and_changes_nothing_of_another(person: MakePerson, maker: Maker, rows: Connection) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    stranger = await person(ROLES["operator"] | {"jobs:delete"}, tenant="other")
    text = await stranger.see(f"/jobs/{job_id}", 404)
    assert "There is no such job." in text
    assert str(job_id) not in await stranger.see("/jobs")
    assert "data-href" not in await stranger.see(f"/jobs/fresh?shown={job_id}")
    for act in ("retry", "delete", "cancel"):
        answer = await stranger.send(f"/jobs/{job_id}/{act}")
        assert answer.status_code == 404
    await stranger.send("/jobs/act", job=[str(job_id)], action="retry")
    assert await rows.fetchval("SELECT status FROM job WHERE id = $1", job_id) == "failed"
    assert "outside" not in await stranger.see("/dead-letters")


async def test_a_key_sees_the_kinds_that_its_scopes_name(person: MakePerson, maker: Maker) -> None:
    run, picture = await maker.make("run"), await maker.make("media")
    somebody = await person(frozenset({"jobs:read", "runs:read"}))
    page = await somebody.see("/jobs")
    assert (str(run) in page, str(picture) in page) == (True, False)
    fresh = await somebody.see(f"/jobs/fresh?shown={run},{picture}")
    assert f'id="job-{run}" data-href' in fresh
    assert f'id="job-{picture}" data-href' not in fresh
    await somebody.see(f"/jobs/{picture}", 404)
