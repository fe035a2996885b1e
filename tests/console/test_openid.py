"""People sign in at a real OpenID provider: what its groups give, what ends a session, what answers are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import httpx2
import pytest
from cryptography.fernet import Fernet
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from pydantic import SecretStr, ValidationError

from leasehold.api.console import openid, session
from leasehold.db.database import Connection, connect
from leasehold.domain.errors import BadGateway, Conflict, Unauthenticated
from leasehold.limits import people
from leasehold.security.egress import Answer
from leasehold.security.openid import Flow, Identity, OpenId
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of, make_key, serving
from tests.api.media_api import problem
from tests.console.conftest import HTML
from tests.support.lock_waits import until_waiting
from tests.support.openid_provider import CLIENT_ID, CLIENT_SECRET, Provider, providing, query_of, sign_in_at

__all__ = ["make_key"]

GROUPS: dict[str, Any] = {
    "watchers": {"tenant": "acme", "role": "viewer"},
    "admins": {"tenant": "acme", "role": "admin"},
    "sre": {"tenant": "ops", "role": "operator", "scopes": ["fleet:operate"]},
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is about a provider that is slow."""
    monkeypatch.setattr("leasehold.security.egress._CONNECT_SECONDS", 60.0)
    monkeypatch.setattr("leasehold.security.openid._TIMEOUT_SECONDS", 60.0)


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with providing() as provider:
        yield provider


def configured(settings: Settings, issuer: str) -> Settings:
    return Settings(
        _env_file=None,
        **settings.model_dump()
        | {
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "console_oidc_issuer": issuer,
            "console_oidc_client_id": CLIENT_ID,
            "console_oidc_client_secret": SecretStr(CLIENT_SECRET),
            "console_oidc_roles": GROUPS,
            "console_oidc_networks": "127.0.0.0/8",
            "console_oidc_name": "Canaille",
        },
    )


@pytest.fixture
async def running(settings: Settings, provider: Provider) -> AsyncIterator[Running]:
    async with serving(configured(settings, provider.issuer)) as running:
        provider.client(f"{running.url}/console/oidc/callback")
        yield running


def browser_of(running: Running) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=30)


@pytest.fixture
async def browser(running: Running) -> AsyncIterator[httpx2.AsyncClient]:
    async with browser_of(running) as browser:
        yield browser


async def back(provider: Provider, browser: httpx2.AsyncClient, name: str, following: str = "/") -> str:
    """Begin, and sign in at the provider: the address that it sends the browser back to."""
    answer = await browser.get("/console/oidc", params={"following": following})
    assert answer.status_code == 303, answer.text
    return await sign_in_at(provider, answer.headers["location"], name)


async def sign_in(provider: Provider, browser: httpx2.AsyncClient, name: str, following: str = "/") -> httpx2.Response:
    return await browser.get(await back(provider, browser, name, following))


def session_of(running: Running, browser: httpx2.AsyncClient) -> session.Session:
    read = session.read(running.services.settings, browser.cookies[session.COOKIE])
    assert read is not None
    return read


def age(running: Running, browser: httpx2.AsyncClient, seconds: int) -> None:
    """Let the browser's session have begun this much earlier."""
    now = session_of(running, browser)
    earlier = replace(now, began=now.began - seconds)
    signature = Sealing(running.services.settings).sign("console session", earlier.text.encode())
    browser.cookies.delete(session.COOKIE)
    browser.cookies.set(session.COOKIE, f"{earlier.text}.{signature}", domain="127.0.0.1", path="/console")


async def go_to_tenant(browser: httpx2.AsyncClient, tenant: str) -> int:
    token = (await browser.get("/console/tenants")).text.partition('name="token" value="')[2].partition('"')[0]
    return (await browser.post("/console/tenants/go", data={"token": token, "tenant": tenant})).status_code


async def person_of(rows: Connection, login: str, tenant: str = "acme") -> Any:
    return await rows.fetchrow("SELECT * FROM person WHERE login = $1 AND tenant_id = $2", login, tenant)


async def test_somebody_signs_in_at_the_provider_and_has_the_role_of_their_group(
    provider: Provider, browser: httpx2.AsyncClient, rows: Connection
) -> None:
    provider.person("vera", "watchers", "gardeners")
    page = await browser.get("/console/jobs?q=kind:media")
    assert 'href="/console/oidc?following=%2Fjobs%3Fq%3Dkind%3Amedia">Sign in with Canaille' in page.text
    answer = await sign_in(provider, browser, "vera", "/jobs?q=kind:media")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs?q=kind:media")
    given = [line.lower() for line in answer.headers.get_list("set-cookie")]
    cookie = next(line for line in given if line.startswith(session.COOKIE))
    assert {"httponly", "samesite=strict", "path=/console"} <= {part.strip() for part in cookie.split(";")}
    page = await browser.get("/console/jobs")
    assert (page.status_code, "vera@example.org" in page.text) == (200, True)
    assert (await browser.get("/console/webhooks")).status_code == 403
    row = await person_of(rows, "vera@example.org")
    assert (row["subject"], row["name"], row["scopes"]) == ("vera", "vera Example", ["role:viewer"])
    act = await rows.fetchrow("SELECT * FROM audit WHERE action = 'session.began'")
    assert act is not None
    assert (act["actor_kind"], act["actor"], act["key_prefix"]) == ("person", "vera@example.org", None)
    assert (act["tenant_id"], act["target"]) == ("acme", str(row["id"]))


async def test_the_provider_is_asked_for_the_scopes_that_the_installation_says(
    settings: Settings, provider: Provider
) -> None:
    changed = configured(settings, provider.issuer).model_copy(update={"console_oidc_scopes": "openid teams"})
    async with serving(changed) as running, browser_of(running) as browser:
        answer = await browser.get("/console/oidc", params={"following": "/"})
    assert query_of(answer.headers["location"])["scope"] == "openid teams"


async def test_what_a_person_does_is_audited_as_theirs_and_needs_their_roles_scopes(
    provider: Provider, browser: httpx2.AsyncClient, rows: Connection
) -> None:
    provider.person("otto", "sre")
    await sign_in(provider, browser, "otto")
    token = (await browser.get("/console/queues")).text.partition('name="token" value="')[2].partition('"')[0]
    answer = await browser.post("/console/queues/media/pause", data={"token": token, "reason": "a test"})
    assert answer.status_code == 303, answer.text
    act = await rows.fetchrow("SELECT * FROM audit WHERE action = 'queue.paused'")
    assert act is not None
    assert (act["actor_kind"], act["actor"], act["actor_tenant"]) == ("person", "otto@example.org", "ops")
    answer = await browser.post("/console/templates/x/1/enable", data={"token": token}, headers={"Accept": "*/*"})
    problem(answer, 403, "insufficient_scope")
    assert "Your role lacks the scope templates:write." in answer.text


async def test_who_is_in_two_tenants_goes_over_and_stays_apart(
    provider: Provider, browser: httpx2.AsyncClient, rows: Connection
) -> None:
    provider.person("tina", "watchers", "sre")
    await sign_in(provider, browser, "tina")
    page = (await browser.get("/console/tenants")).text
    assert 'value="ops"' in page
    assert (await browser.get("/console/queues")).status_code == 403
    token = page.partition('name="token" value="')[2].partition('"')[0]
    assert (await browser.post("/console/tenants/go", data={"token": token, "tenant": "ops"})).status_code == 303
    assert (await browser.get("/console/queues")).status_code == 200
    token = (await browser.get("/console/tenants")).text.partition('name="token" value="')[2].partition('"')[0]
    answer = await browser.post("/console/tenants/go", data={"token": token, "tenant": "else"})
    assert answer.status_code == 404
    await rows.execute("UPDATE person SET disabled_at = now() WHERE tenant_id = 'ops'")
    assert (await browser.get("/console/queues")).status_code == 401
    assert (await sign_in(provider, browser, "tina")).status_code == 303
    assert (await browser.get("/console/tenants")).text.count('value="ops"') == 0


async def test_who_goes_over_stays_no_longer_than_the_sign_in_lets_them(
    provider: Provider, running: Running, browser: httpx2.AsyncClient
) -> None:
    """Whoever went over, also to the tenant where they were, began a session of twelve hours without the provider."""
    provider.person("timo", "watchers", "sre")
    await sign_in(provider, browser, "timo")
    age(running, browser, 3600)
    first = session_of(running, browser)
    for tenant in ("acme", "ops"):
        assert await go_to_tenant(browser, tenant) == 303
        now = session_of(running, browser)
        assert (now.began, now.nonce == first.nonce) == (first.began, False)
    age(running, browser, session.MAX_HOURS * 3600)
    assert (await browser.get("/console/tenants")).status_code == 401


@pytest.mark.parametrize("how", ["sessions ended", "disabled and enabled", "left and joined"])
async def test_nobody_goes_over_to_a_tenant_where_their_sessions_have_ended_since_the_sign_in(
    provider: Provider, running: Running, browser: httpx2.AsyncClient, rows: Connection, make_key: MakeKey, how: str
) -> None:
    """The session in the other tenant goes on: only the provider opens one in this tenant again."""
    provider.person("theo", "watchers", "sre")
    await sign_in(provider, browser, "theo")
    assert await go_to_tenant(browser, "ops") == 303
    age(running, browser, 60)
    if how == "left and joined":
        async with browser_of(running) as elsewhere:
            for groups in (["sre"], ["watchers", "sre"]):
                provider.person("theo", *groups)
                await sign_in(provider, elsewhere, "theo")
    else:
        path = f"/v1/people/{(await person_of(rows, 'theo@example.org'))['id']}"
        admin = await make_key(scopes=("role:admin",))
        async with client_of(running.url, admin.text) as anna:
            if how == "sessions ended":
                assert (await anna.post(f"{path}/end-sessions")).status_code == 204
            else:
                for disabled in (True, False):
                    assert (await anna.patch(path, json={"disabled": disabled})).status_code == 200
    assert 'value="acme"' not in (await browser.get("/console/tenants")).text
    assert await go_to_tenant(browser, "acme") == 404
    # The sessions of a second are told apart by nothing: let the end be half a minute ago.
    await rows.execute("UPDATE person SET sessions_ended_at = sessions_ended_at - interval '30 s'")
    async with browser_of(running) as later:
        await sign_in(provider, later, "theo")
        assert [await go_to_tenant(later, tenant) for tenant in ("ops", "acme")] == [303, 303]
    assert await go_to_tenant(browser, "acme") == 404
    assert (await browser.get("/console/queues")).status_code == 200


async def test_without_a_group_that_gives_a_role_nobody_comes_in(
    provider: Provider, running: Running, browser: httpx2.AsyncClient, rows: Connection
) -> None:
    provider.person("gina", "gardeners")
    answer = await sign_in(provider, browser, "gina")
    assert (answer.status_code, session.COOKIE in browser.cookies) == (403, False)
    assert await rows.fetchval("SELECT count(*) FROM person") == 0
    await running.services.refusals.flush()
    refused = await rows.fetchrow("SELECT * FROM audit WHERE action = 'sign_in.refused'")
    assert refused is not None
    assert (refused["actor_kind"], refused["actor"], refused["target"]) == ("person", "gina@example.org", "no_role")


async def test_whom_a_full_tenant_refuses_is_in_the_audit_and_whom_an_outage_sends_away_is_not(
    provider: Provider, settings: Settings, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = configured(settings, provider.issuer).model_copy(update={"people_per_tenant": 1})
    await people.record_sign_in(rows, Identity("https://i", "1", "a", "A", frozenset()), {"acme": ["role:viewer"]}, 1)
    async with serving(full) as running, browser_of(running) as browser:
        provider.client(f"{running.url}/console/oidc/callback")
        provider.person("vera", "watchers")
        assert (await sign_in(provider, browser, "vera")).status_code == 409
        address = await back(provider, browser, "vera")

        async def away(*_: Any) -> Identity:
            raise BadGateway("openid_unavailable", "The provider does not answer.")

        monkeypatch.setattr(OpenId, "identify", away)
        assert (await browser.get(address)).status_code == 502
        await running.services.refusals.flush()
    refused = await rows.fetch("SELECT actor, target FROM audit WHERE action = 'sign_in.refused'")
    assert [tuple(row) for row in refused] == [("vera@example.org", "too_many_people")]


async def test_who_has_left_the_group_loses_role_and_sessions_at_the_next_sign_in(
    provider: Provider, running: Running, browser: httpx2.AsyncClient, rows: Connection
) -> None:
    provider.person("lena", "admins")
    await sign_in(provider, browser, "lena")
    assert (await browser.get("/console/")).status_code == 200
    provider.person("lena", "gardeners")
    async with browser_of(running) as elsewhere:
        assert (await sign_in(provider, elsewhere, "lena")).status_code == 403
    assert (await browser.get("/console/")).status_code == 401
    assert (await person_of(rows, "lena@example.org"))["scopes"] == []


async def test_a_person_who_is_disabled_loses_the_session_at_once_and_does_not_get_it_back(
    provider: Provider, running: Running, browser: httpx2.AsyncClient, rows: Connection, make_key: MakeKey
) -> None:
    provider.person("dora", "admins")
    await sign_in(provider, browser, "dora")
    assert (await browser.get("/console/")).status_code == 200
    row = await person_of(rows, "dora@example.org")
    admin = await make_key(scopes=("role:admin",))
    async with client_of(running.url, admin.text) as anna:
        changed = await anna.patch(f"/v1/people/{row['id']}", json={"disabled": True})
        assert changed.json()["disabled_at"] is not None
        page = await browser.get("/console/")
        assert (page.status_code, "Your session has ended" in page.text) == (401, True)
        assert (await sign_in(provider, browser, "dora")).status_code == 403
        assert (await anna.patch(f"/v1/people/{row['id']}", json={"disabled": False})).status_code == 200
        assert (await browser.get("/console/")).status_code == 401
        assert (await sign_in(provider, browser, "dora")).status_code == 303
        assert (await browser.get("/console/")).status_code == 200
        assert (await anna.post(f"/v1/people/{row['id']}/end-sessions")).status_code == 204
        assert (await browser.get("/console/")).status_code == 401
    acts = await rows.fetch("SELECT action, actor FROM audit WHERE target_kind = 'person' ORDER BY seq")
    assert [act["action"] for act in acts] == ["person.disabled", "person.enabled", "person.sessions_ended"]


async def test_a_role_that_an_admin_sets_counts_at_once_and_stays(
    provider: Provider, running: Running, browser: httpx2.AsyncClient, rows: Connection, make_key: MakeKey
) -> None:
    provider.person("rosa", "watchers")
    await sign_in(provider, browser, "rosa")
    path = f"/v1/people/{(await person_of(rows, 'rosa@example.org'))['id']}"
    admin = await make_key(scopes=("role:admin",))
    async with client_of(running.url, admin.text) as anna:
        assert (await anna.patch(path, json={"role": "operator"})).json()["role"] == "operator"
        assert (await browser.get("/console/webhooks")).status_code == 200
        await sign_in(provider, browser, "rosa")
        assert (await browser.get("/console/webhooks")).status_code == 200
        listed = (await anna.get("/v1/people", params={"text": "ROSA"})).json()["people"]
        assert [(one["role"], one["set_role"]) for one in listed] == [("operator", "operator")]
        assert (await anna.patch(path, json={"role": "provider"})).json()["role"] == "viewer"
        assert (await browser.get("/console/webhooks")).status_code == 403
        assert (await anna.get("/v1/people", params={"text": "nobody"})).json()["people"] == []


async def test_nobody_gives_what_they_do_not_have_or_reaches_another_tenant(
    provider: Provider, running: Running, browser: httpx2.AsyncClient, rows: Connection, make_key: MakeKey
) -> None:
    provider.person("olga", "sre")
    await sign_in(provider, browser, "olga")
    path = f"/v1/people/{(await person_of(rows, 'olga@example.org', 'ops'))['id']}"
    weak = await make_key("ops", scopes=("role:viewer", "people:write"))
    stranger = await make_key("acme", scopes=("role:admin",))
    chief = await make_key("acme", scopes=("role:admin", "fleet:operate"))
    async with client_of(running.url, weak.text) as admin:
        problem(await admin.patch(path, json={"role": "admin"}), 403, "scope_not_held")
        assert (await admin.patch(path, json={"role": "viewer"})).json()["scopes"] == []
        problem(await admin.patch(path, json={"role": "provider"}), 403, "scope_not_held")
        assert (await admin.patch(path, json={"disabled": True})).status_code == 200
    async with client_of(running.url, stranger.text) as admin:
        problem(await admin.patch(path, json={"role": "viewer"}), 404, "person_not_found")
        problem(await admin.post(f"{path}/end-sessions"), 404, "person_not_found")
        assert (await admin.get("/v1/people", params={"tenant": "ops"})).json()["people"] == []
    async with client_of(running.url, chief.text) as admin:
        assert (await admin.patch(path, json={"role": "provider"})).json()["scopes"] == ["fleet:operate"]
        assert len((await admin.get("/v1/people", params={"tenant": "ops"})).json()["people"]) == 1


@pytest.mark.parametrize("name", ["state", "cookie", "iss", "code"])
async def test_a_callback_that_is_not_this_browsers_own_is_refused(
    provider: Provider, running: Running, browser: httpx2.AsyncClient, name: str
) -> None:
    provider.person("vera", "watchers")
    address = await back(provider, browser, "vera")
    path, query = address.partition("?")[0], query_of(address)
    query |= {"state": {"state": "x"}, "iss": {"iss": "https://evil.example"}, "code": {"code": "x"}}.get(name, {})
    if name == "cookie":
        browser.cookies.clear()
    answer = await browser.get(f"{path}?{urlencode(query)}")
    assert (answer.status_code, session.COOKIE in browser.cookies) == (401, False)
    async with browser_of(running) as thief:  # who has somebody else's address, and a sign-in of their own
        await back(provider, thief, "vera")
        assert (await thief.get(address)).status_code == 401
        assert session.COOKIE not in thief.cookies


async def test_a_code_works_once(provider: Provider, browser: httpx2.AsyncClient) -> None:
    provider.person("vera", "watchers")
    answer = await browser.get("/console/oidc")
    kept = browser.cookies[openid.COOKIE]
    address = await sign_in_at(provider, answer.headers["location"], "vera")
    assert (await browser.get(address)).status_code == 303
    assert openid.COOKIE not in browser.cookies
    headers = HTML | {"Cookie": f"{openid.COOKIE}={kept}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as again:
        assert (await again.get(address)).status_code == 401


async def test_the_provider_may_change_its_key(
    provider: Provider, running: Running, browser: httpx2.AsyncClient
) -> None:
    provider.person("vera", "watchers")
    assert (await sign_in(provider, browser, "vera")).status_code == 303
    provider.new_key()
    async with browser_of(running) as another:
        assert (await sign_in(provider, another, "vera")).status_code == 303


async def test_somebody_else_with_the_same_address_is_told_apart(rows: Connection) -> None:
    given = {"acme": ["role:viewer"]}
    first = Identity("https://i.example", "1", "a@example.org", "A", frozenset())
    (one,) = await people.record_sign_in(rows, first, given, 10)
    (other,) = await people.record_sign_in(
        rows, Identity("https://i.example", "2", "a@example.org", "B", frozenset()), given, 10
    )
    assert one["login"] == "a@example.org"
    assert other["login"] == f"a@example.org#{str(other['id'])[-8:]}"
    (again,) = await people.record_sign_in(rows, first, given, 10)
    assert (again["id"], again["login"]) == (one["id"], "a@example.org")


async def test_people_of_a_tenant_are_bounded_and_those_who_stay_away_are_forgotten(rows: Connection) -> None:
    """Whoever is disabled or has a role of an admin stays: forgotten, they would come again with the groups' role."""
    given = {"acme": ["role:viewer"]}
    for number in range(4):
        await people.record_sign_in(rows, Identity("https://i", str(number), f"p{number}", "P", frozenset()), given, 4)
    more = Identity("https://i", "4", "p4", "P", frozenset())
    with pytest.raises(Conflict, match="at most 4 people"):
        await people.record_sign_in(rows, more, given, 4)
    assert len(await people.record_sign_in(rows, Identity("https://i", "0", "p0", "P", frozenset()), given, 4)) == 1
    await rows.execute("UPDATE person SET seen_at = now() - interval '31 days' WHERE subject <> '0'")
    await rows.execute("UPDATE person SET disabled_at = now() WHERE subject = '1'")
    await rows.execute("UPDATE person SET set_role = 'viewer' WHERE subject = '2'")
    await people.forget(rows, 30)
    left = await rows.fetch("SELECT subject FROM person ORDER BY subject")
    assert [row["subject"] for row in left] == ["0", "1", "2"]


async def test_a_full_tenant_does_not_keep_a_person_out_of_the_others(rows: Connection) -> None:
    """And what the groups no longer give is taken away, whether or not any tenant has room."""
    await people.record_sign_in(rows, Identity("https://i", "0", "p0", "P", frozenset()), {"full": ["role:viewer"]}, 1)
    new = Identity("https://i", "1", "p1", "P", frozenset())
    await people.record_sign_in(rows, new, {"old": ["role:admin"]}, 1)
    entered = await people.record_sign_in(rows, new, {"acme": ["role:viewer"], "full": ["role:viewer"]}, 1)
    assert [row["tenant_id"] for row in entered] == ["acme"]
    with pytest.raises(Conflict, match="at most 1 people"):
        await people.record_sign_in(rows, new, {"full": ["role:viewer"]}, 1)
    left = await rows.fetch("SELECT tenant_id, scopes, generation FROM person WHERE subject = '1' ORDER BY tenant_id")
    assert [tuple(row) for row in left] == [("acme", [], 1), ("old", [], 1)]


async def test_two_sign_ins_of_a_person_at_once_whose_groups_change_meanwhile_both_succeed(
    settings: Settings, rows: Connection
) -> None:
    """Each gives a row that the other takes away: in another order each would wait for the other's row."""
    ann = Identity("https://i", "1", "ann", "A", frozenset())
    await people.record_sign_in(rows, ann, {"a": ["role:viewer"], "b": ["role:viewer"]}, 9)
    opened = [await connect(settings, "test") for _ in range(2)]

    signing: list[asyncio.Task[Any]] = []
    try:
        async with rows.transaction():
            await rows.execute("SELECT FROM person WHERE tenant_id = 'b' FOR UPDATE")
            for number, (connection, tenant) in enumerate(zip(opened, "ba", strict=True), 1):
                given = {tenant: ["role:viewer"]}
                signing.append(asyncio.create_task(people.record_sign_in(connection, ann, given, 9)))
                await until_waiting(rows, number)
        await asyncio.gather(*signing)
    finally:
        for connection in opened:
            await connection.close()
    left = await rows.fetch("SELECT tenant_id FROM person WHERE scopes <> '{}'")
    assert [row["tenant_id"] for row in left] == ["a"]


async def test_a_flood_of_sign_ins_waits_and_is_refused_then(
    settings: Settings, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request to the provider at once: a second one waits, and no longer than its patience."""
    monkeypatch.setattr("leasehold.api.console.state._PATIENCE_SECONDS", 0.05)
    narrow = configured(settings, provider.issuer).model_copy(update={"console_oidc_at_once": 1})
    held, free = asyncio.Event(), asyncio.Event()

    async def hold(*_: Any) -> str:
        held.set()
        await free.wait()
        return provider.issuer

    monkeypatch.setattr(OpenId, "sign_in_url", hold)
    async with serving(narrow) as running, browser_of(running) as browser:
        first = asyncio.create_task(browser.get("/console/oidc"))
        await held.wait()
        problem(await browser.get("/console/oidc", headers={"Accept": "*/*"}), 503, "sign_ins_waiting")
        free.set()
        assert (await first).status_code == 303


@pytest.mark.parametrize(
    "issuer", ["http://id.example", "ftp://id.example", "https://", "https://id.example/?a=b", "id.example"]
)
def test_an_issuer_is_an_https_url(issuer: str) -> None:
    with pytest.raises(ValidationError):
        Settings(_env_file=None, console_oidc_issuer=issuer)


async def test_a_private_provider_is_reached_only_where_its_network_is_named(
    settings: Settings, provider: Provider
) -> None:
    closed = configured(settings, provider.issuer).model_copy(update={"console_oidc_networks": ""})
    async with serving(closed) as running, browser_of(running) as browser:
        before = provider.requests
        problem(await browser.get("/console/oidc", headers={"Accept": "*/*"}), 502, "openid_unavailable")
        assert provider.requests == before
    without = settings.model_copy(update={"console_oidc_issuer": None})
    async with serving(without) as running, browser_of(running) as browser:
        assert (await browser.get("/console/oidc")).status_code == 404


# --- answers that no honest provider gives: the provider's own token, changed or signed anew


KEY = RSAKey.generate_key(2048, {"kid": "known"})
ISSUER = "https://id.example"
FLOW = Flow("state", "nonce", "verifier")


class Answering:
    """In the place of egress: answers as a provider whose ID token is `token`."""

    def __init__(self, token: str, jwks: dict[str, Any] | None = None, **configuration: Any) -> None:
        self._jwks = jwks or {"keys": [KEY.as_dict(private=False)]}
        self._token, self._configuration = token, configuration

    async def request(self, _method: str, url: str, **_more: Any) -> Answer:
        answers: dict[str, Any] = {
            "/.well-known/openid-configuration": {
                "issuer": ISSUER, "token_endpoint": f"{ISSUER}/token", "jwks_uri": f"{ISSUER}/jwks",
            } | self._configuration,
            "/token": {"id_token": self._token, "access_token": "a"},
            "/jwks": self._jwks,
            "/userinfo": {"sub": "somebody else", "groups": ["admins"]},
        }  # fmt: skip
        return Answer(200, {}, httpx2.Response(200, json=answers[url.removeprefix(ISSUER)]).content)


def token(key: Any = KEY, header: dict[str, str] | None = None, **claims: Any) -> str:
    now = 4_000_000_000  # of `clock`
    whole = {
        "iss": ISSUER, "aud": CLIENT_ID, "sub": "vera", "nonce": "nonce", "iat": now, "exp": now + 60,
        "groups": ["watchers"],
    } | claims  # fmt: skip
    present = {name: value for name, value in whole.items() if value is not None}
    signed = {"alg": "RS256", "kid": "known"} | (header or {})
    return jwt.encode(signed, present, key, algorithms=[signed["alg"]])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joserfc.jwt._generate_now", lambda: 4_000_000_000, raising=False)
    monkeypatch.setattr("joserfc._rfc7519.claims._generate_now", lambda: 4_000_000_000, raising=False)


async def identified(settings: Settings, token: str, **more: Any) -> Identity:
    client: Any = Answering(token, **more)
    wanted = settings.model_copy(update={"console_oidc_issuer": ISSUER, "console_oidc_client_id": CLIENT_ID})
    return await OpenId(wanted, ISSUER, client).identify(FLOW, "https://us.example/cb", {"state": "state", "code": "c"})


Wrong = Callable[[], str]
OTHER = RSAKey.generate_key(2048, {"kid": "known"})
WRONG: dict[str, Wrong] = {
    "another issuer": lambda: token(iss="https://evil.example"),
    "no issuer": lambda: token(iss=None),
    "another audience": lambda: token(aud="somebody"),
    "no audience": lambda: token(aud=None),
    "expired": lambda: token(exp=4_000_000_000 - 61),
    "no end": lambda: token(exp=None),
    "of the future": lambda: token(iat=4_000_000_000 + 120),
    "another nonce": lambda: token(nonce="other"),
    "no nonce": lambda: token(nonce=None),
    "nobody": lambda: token(sub=None),
    "an empty subject": lambda: token(sub=""),
    "for two, by another": lambda: token(aud=[CLIENT_ID, "other"], azp="other"),
    "for two, by nobody": lambda: token(aud=[CLIENT_ID, "other"]),
    "by another, for one": lambda: token(azp="other"),
    "signed with another key": lambda: token(OTHER),
    "signed with the client's secret": lambda: token(OctKey.import_key(CLIENT_SECRET), {"alg": "HS256"}),
    "an unknown key": lambda: token(header={"kid": "unknown"}),
    "not signed": lambda: token().rpartition(".")[0] + ".",
    "none": lambda: "",
}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("name", WRONG)
async def test_an_id_token_that_is_wrong_in_one_thing_is_refused(settings: Settings, name: str) -> None:
    assert (await identified(settings, token())).subject == "vera"
    with pytest.raises(Unauthenticated):
        await identified(settings, WRONG[name]())


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("subject", ["\u202e", "v" * 256], ids=["not printable", "too long"])
async def test_an_id_token_whose_subject_cannot_be_used_is_refused(settings: Settings, subject: str) -> None:
    with pytest.raises(Unauthenticated, match="the ID token has no usable subject"):
        await identified(settings, token(sub=subject))


@pytest.mark.usefixtures("clock")
async def test_groups_of_somebody_elses_userinfo_are_refused(settings: Settings) -> None:
    more = {"userinfo_endpoint": f"{ISSUER}/userinfo"}
    assert (await identified(settings, token(), **more)).groups == {"watchers"}
    with pytest.raises(Unauthenticated):
        await identified(settings, token(groups=None), **more)


@pytest.mark.usefixtures("clock")
async def test_an_address_that_is_not_verified_names_nobody(settings: Settings) -> None:
    claims: dict[str, Any] = {"email": "boss@example.org", "preferred_username": "vera\u202e\n"}
    assert (await identified(settings, token(**claims))).login == "boss@example.org"
    assert (await identified(settings, token(**claims, email_verified=False))).login == "vera"


def test_a_person_is_named_in_the_cookie_by_an_id() -> None:
    person_id = UUID(int=7)
    assert session.read(Settings(_env_file=None), session.owner_of(person_id, 3)) is None
