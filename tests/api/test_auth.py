"""Keys: who may come in, how far, and how it ends."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from leasehold import Kind
from leasehold.api.app import _routers, make_app
from leasehold.api.auth.security import MEDIA_READ, MEDIA_WRITE, refuse_open_routes
from leasehold.db.database import Connection
from leasehold.domain.errors import DeclarationError, Invalid, NotFound
from leasehold.pipelines import SHIPPED
from leasehold.security.credentials import create_key, find_key, matches, parse_key, revoke_key, rotate_key
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.media_api import MediaApi, problem

UNKNOWN = f"lh_{'a' * 12}_{'A' * 43}"
BODY = {"content_type": "image/jpeg", "file_name": "a.jpg"}


async def test_without_a_key_nothing_is_told_but_how_to_send_one(api: Running) -> None:
    async with client_of(api.url) as client:
        answer = await client.post("/upload-url", json=BODY)
    problem(answer, 401, "missing_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["Basic dXNlcjpwYXNz", "Bearer", UNKNOWN])
async def test_another_scheme_is_no_key(api: Running, value: str) -> None:
    async with client_of(api.url) as client:
        problem(await client.post("/upload-url", json=BODY, headers={"Authorization": value}), 401, "missing_api_key")


@pytest.mark.parametrize("key", [UNKNOWN, "lh_short_x", "x" * 5000, "lh__", f"{UNKNOWN}A"])
async def test_a_malformed_or_unknown_key_is_refused(api: Running, key: str) -> None:
    async with client_of(api.url, key) as client:
        problem(await client.post("/upload-url", json=BODY), 401, "invalid_api_key")


async def test_two_keys_at_once_are_no_key(api: Running, make_key: MakeKey) -> None:
    one, other = await make_key(), await make_key("rival")
    async with client_of(api.url) as client:
        headers = [("Authorization", f"Bearer {one.text}"), ("Authorization", f"Bearer {other.text}")]
        problem(await client.post("/upload-url", json=BODY, headers=headers), 401, "missing_api_key")


async def test_the_right_prefix_with_another_secret_is_refused(api: Running, make_key: MakeKey) -> None:
    key = await make_key()
    async with client_of(api.url, key.text) as client:
        assert (await client.post("/upload-url", json=BODY)).status_code == 201
    async with client_of(api.url, f"lh_{key.prefix}_{'A' * 43}") as client:
        problem(await client.post("/upload-url", json=BODY), 401, "invalid_api_key")


async def test_a_key_is_asked_for_before_the_body_is_judged(api: Running) -> None:
    async with client_of(api.url) as client:
        problem(await client.post("/upload-url", json={"nonsense": True}), 401, "missing_api_key")


async def test_an_expired_key_is_refused(api: Running, make_key: MakeKey) -> None:
    key = await make_key(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    async with client_of(api.url, key.text) as client:
        problem(await client.post("/upload-url", json=BODY), 401, "invalid_api_key")


async def test_a_revoked_key_stops_within_the_cache_time(
    settings: Settings, make_key: MakeKey, rows: Connection
) -> None:
    key = await make_key()
    uncached = settings.model_copy(update={"api_key_cache_seconds": 0.0})
    cached = settings.model_copy(update={"api_key_cache_seconds": 30.0})
    async with (
        serving(uncached) as strict,
        serving(cached) as lenient,
        client_of(strict.url, key.text) as one,
        client_of(lenient.url, key.text) as other,
    ):
        for client in (one, other):
            assert (await client.post("/upload-url", json=BODY)).status_code == 201
        await revoke_key(rows, key.prefix)
        problem(await one.post("/upload-url", json=BODY), 401, "invalid_api_key")
        assert (await other.post("/upload-url", json=BODY)).status_code == 201


@pytest.mark.parametrize(
    ("scope", "method", "path"),
    [
        (MEDIA_READ, "POST", "/upload-url"),
        (MEDIA_READ, "POST", "/complete-upload"),
        (MEDIA_WRITE, "GET", "/media/01975c1e-7d3a-7c55-9a3e-1f7f6f2f9b10"),
        (MEDIA_WRITE, "GET", "/media/01975c1e-7d3a-7c55-9a3e-1f7f6f2f9b10/events"),
    ],
)
async def test_a_key_without_the_scope_is_forbidden(
    api: Running, make_key: MakeKey, scope: str, method: str, path: str
) -> None:
    key = await make_key(scopes=(scope, "other:write"))
    async with client_of(api.url, key.text) as client:
        answer = await client.request(method, path, json=BODY if method == "POST" else None)
    problem(answer, 403, "insufficient_scope")


async def test_a_key_without_scopes_may_do_nothing(api: Running, make_key: MakeKey) -> None:
    key = await make_key(scopes=())
    async with client_of(api.url, key.text) as client:
        problem(await client.post("/upload-url", json=BODY), 403, "insufficient_scope")


async def test_another_tenants_media_is_not_there(api: Running, media_api: MediaApi, make_key: MakeKey) -> None:
    ticket = await media_api.submitted()
    async with client_of(api.url, (await make_key("rival")).text) as rival:
        problem(await rival.get(f"/media/{ticket.media_id}"), 404, "media_not_found")
        problem(await rival.get(f"/media/{ticket.media_id}/events"), 404, "media_not_found")


async def test_the_use_of_a_key_is_written_once_a_minute(
    settings: Settings, make_key: MakeKey, rows: Connection
) -> None:
    key = await make_key()
    uncached = settings.model_copy(update={"api_key_cache_seconds": 0.0})
    used = []
    async with serving(uncached) as api, client_of(api.url, key.text) as client:
        for _ in range(3):
            assert (await client.post("/upload-url", json=BODY)).status_code == 201
            used.append(await rows.fetchval("SELECT last_used_at FROM api_key"))
    assert used[0] is not None
    assert len(set(used)) == 1


async def test_only_a_hash_of_the_secret_is_stored(rows: Connection, make_key: MakeKey) -> None:
    key = await make_key()
    row: Any = await rows.fetchrow("SELECT * FROM api_key")
    secret = key.text.removeprefix(f"lh_{key.prefix}_")
    assert len(row["secret_hash"]) == 32
    assert secret not in str(dict(row))
    assert secret not in repr(key)
    presented = parse_key(key.text)
    assert presented is not None
    assert secret not in repr(presented)
    assert matches(presented, await find_key(rows, key.prefix))
    assert not matches(presented, None)


async def test_keys_differ_in_both_parts(rows: Connection, make_key: MakeKey) -> None:
    keys = [await make_key() for _ in range(5)]
    assert len({key.prefix for key in keys}) == 5
    assert len({key.text[-43:] for key in keys}) == 5


async def test_a_rotated_key_overlaps_with_its_successor(
    settings: Settings, make_key: MakeKey, rows: Connection
) -> None:
    old = await make_key(scopes=(MEDIA_WRITE,))
    new = await rotate_key(rows, old.prefix, overlap=timedelta(hours=1))
    uncached = settings.model_copy(update={"api_key_cache_seconds": 0.0})
    async with serving(uncached) as api:
        for key in (old, new):
            async with client_of(api.url, key.text) as client:
                assert (await client.post("/upload-url", json=BODY)).status_code == 201
        await rotate_key(rows, new.prefix, overlap=timedelta(0))
        async with client_of(api.url, new.text) as client:
            problem(await client.post("/upload-url", json=BODY), 401, "invalid_api_key")
        async with client_of(api.url, old.text) as client:
            assert (await client.post("/upload-url", json=BODY)).status_code == 201


async def test_rotation_never_lengthens_a_keys_life(rows: Connection, make_key: MakeKey) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=1)
    old = await make_key(expires_at=soon)
    await rotate_key(rows, old.prefix, overlap=timedelta(days=1))
    assert await rows.fetchval("SELECT expires_at FROM api_key WHERE prefix = $1", old.prefix) == soon


async def test_a_revoked_key_cannot_be_rotated_and_revoking_can_be_repeated(
    rows: Connection, make_key: MakeKey
) -> None:
    key = await make_key()
    await revoke_key(rows, key.prefix)
    first = await rows.fetchval("SELECT revoked_at FROM api_key")
    await revoke_key(rows, key.prefix)
    assert await rows.fetchval("SELECT revoked_at FROM api_key") == first
    with pytest.raises(NotFound):
        await rotate_key(rows, key.prefix, overlap=timedelta(hours=1))
    with pytest.raises(NotFound):
        await revoke_key(rows, "nobodyskey00")


@pytest.mark.parametrize("scope", ["media", "*", "media:", "Media:read", "media:read write"])
async def test_a_scope_that_no_route_could_name_is_refused(rows: Connection, scope: str) -> None:
    with pytest.raises(Invalid):
        await create_key(rows, tenant_id="acme", client_id="c", scopes=[scope])


async def test_many_callers_at_once_are_told_apart(api: Running, make_key: MakeKey) -> None:
    keys = [await make_key(f"tenant-{n}") for n in range(8)]
    callers = await asyncio.gather(*(api.services.keyring.identify(key.text) for key in keys for _ in range(5)))
    assert [caller.tenant_id for caller in callers] == [f"tenant-{n}" for n in range(8) for _ in range(5)]


async def test_a_route_that_names_no_scope_does_not_start(settings: Settings) -> None:
    router = APIRouter()

    @router.get("/open")
    async def forgotten() -> None: ...

    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    with pytest.raises(DeclarationError, match="/open"):
        refuse_open_routes(FastAPI(), routes, frozenset())
    make_app(settings)


async def hide() -> None: ...


shadow = APIRouter()


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("/v1/runs", "/v1/runs"),
        ("/console/sign-in", "/console/sign-in"),
        ("/console/{page}", "/console/sign-in"),
        ("/{anything:path}", "/console/"),
    ],
)
def test_a_kind_from_outside_hides_no_path_of_the_platform_and_none_of_the_console(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, path: str, hidden: str
) -> None:
    monkeypatch.setattr(shadow, "routes", [])
    shadow.add_api_route(path, hide)
    kinds = [*SHIPPED, Kind("shadow", routers=(f"{__name__}:shadow",))]
    with pytest.raises(DeclarationError, match=f"shadow uses paths that are already used.*{hidden}"):
        _routers(settings.model_copy(update={"console_path": "/console"}), kinds)


def test_a_kind_from_outside_may_use_other_paths_beside_the_console(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "routes", [])
    shadow.add_api_route("/consoles/{name}", hide)
    kinds = [*SHIPPED, Kind("shadow", routers=(f"{__name__}:shadow",))]
    assert shadow in _routers(settings.model_copy(update={"console_path": "/console"}), kinds)
