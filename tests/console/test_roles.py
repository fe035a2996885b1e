"""Every act of the console, tried as every role: what a key's scopes do not allow is refused, and has no button."""

from __future__ import annotations

import re

import httpx2
import pytest
from fastapi.routing import APIRoute

from leasehold.api.app import make_app
from leasehold.db.database import Connection
from leasehold.settings import Settings
from tests.api.conftest import Running
from tests.api.media_api import problem
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker
from tests.security.test_public_endpoints import flat

#: By path: the scopes any one of which allows the act. Written by hand, and compared with what the routes declare.
ACTS: dict[str, set[str]] = {
    "/jobs/act": {"jobs:operate"},
    "/jobs/{job_id}/cancel": {"jobs:operate"},
    "/jobs/{job_id}/retry": {"jobs:operate"},
    "/jobs/{job_id}/delete": {"jobs:delete"},
    "/dead-letters/{fingerprint}/replay": {"jobs:operate", "runs:write"},
    "/dead-letters/letters/{task_id}/replay": {"jobs:operate", "runs:write"},
    "/sign-out": set(),
}
NOBODY = "01a204b8-0000-7000-8000-000000000000"
ROUTES = [
    route
    for route in flat(make_app(Settings(_env_file=None)).routes)
    if isinstance(route, APIRoute) and route.path.startswith("/console")
]


def paths(method: str) -> set[str]:
    return {route.path.removeprefix("/console") for route in ROUTES if method in route.methods}


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", NOBODY, path)


def test_every_act_stands_in_the_table() -> None:
    assert paths("POST") == ACTS.keys() | {"/sign-in"}
    assert {method for route in ROUTES for method in route.methods} == {"GET", "POST"}


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
        async with httpx2.AsyncClient(base_url=running.url) as stranger:
            problem(await stranger.post(f"/console{filled(path)}", data={"token": token}), 401, "missing_api_key")


@pytest.mark.parametrize("role", ROLES)
async def test_a_page_has_no_button_that_would_be_refused(person: MakePerson, maker: Maker, role: str) -> None:
    """And none is missing: who may act finds the form."""
    scopes = ROLES[role]
    somebody = await person(scopes)
    failed, waiting = await maker.make("run"), await maker.make("run", scope="user", scope_id="b")
    await maker.fail(failed)
    group = re.search(r'/console(/dead-letters/[0-9a-f]{16})"', await somebody.see("/dead-letters"))
    assert group is not None
    seen = ["/", "/jobs", f"/jobs/{failed}", f"/jobs/{waiting}", "/dead-letters", group[1]]
    shown = {act for path in seen for act in re.findall(r'action="/console([^"]*)"', await somebody.see(path))}
    acts = {act for act in shown if act not in ("/jobs", "/sign-out")}
    patterns = {re.compile(re.sub(r"\{[^}]*\}", "[0-9a-f-]+", path)): allowing for path, allowing in ACTS.items()}
    for act in acts:
        (allowing,) = [allowing for pattern, allowing in patterns.items() if pattern.fullmatch(act)]
        assert allowing & scopes, (role, act)
    allowed = {path for path, allowing in ACTS.items() if allowing & scopes}
    assert {
        path for path in allowed if any(re.fullmatch(re.sub(r"\{[^}]*\}", "[0-9a-f-]+", path), act) for act in acts)
    } == allowed


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
    assert f'data-href="/console/jobs/{run}"' in fresh
    assert f'data-href="/console/jobs/{picture}"' not in fresh
    await somebody.see(f"/jobs/{picture}", 404)
