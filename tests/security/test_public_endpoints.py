"""What answers without a key: a short list, each of them on purpose."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

import httpx2
import pytest
from cryptography.fernet import Fernet
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import SecretStr
from starlette.routing import BaseRoute

from leasehold.api.app import PUBLIC, make_app
from leasehold.api.auth.security import OPERATE
from leasehold.api.console.router import public_paths_of
from leasehold.api.generation.callbacks import ROUTE
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.pipelines import SHIPPED
from leasehold.pipelines.generation.callbacks import callback_url, is_genuine
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.media_api import problem
from tests.support.routes import methods_of


def flat(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Those of included routers, too."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from flat(included.routes)


#: What needs no key: of the platform, and of the kinds of work that ship with it.
CONSOLE = "/console"
KNOWN = PUBLIC.union(*(kind.public for kind in SHIPPED), public_paths_of(CONSOLE))
#: Of each operation that needs a key: its path with something in the place of every parameter.
GUARDED = sorted(
    (method, re.sub(r"\{[^}]*\}", "x", route.path))
    for route in flat(make_app(Settings(_env_file=None)).routes)
    if isinstance(route, APIRoute) and route.path not in KNOWN
    for method in methods_of(route)
)


def sealed(settings: Settings) -> Settings:
    key = SecretStr(Fernet.generate_key().decode())
    return settings.model_copy(update={"sealing_keys": key, "public_url": "https://leasehold.example"})


def test_nothing_is_served_but_declared_routes() -> None:
    """What FastAPI or a library mounts by itself (pages of documentation, files) names no scope, so it is not there."""
    for settings in (Settings(_env_file=None), Settings(_env_file=None, metrics_public=True)):
        assert all(isinstance(route, APIRoute) for route in flat(make_app(settings).routes))


def test_the_public_routes_are_these() -> None:
    pages = {"/console/sign-in", "/console/enter", "/console/assets/{hashed}/{name}"}
    pages |= {"/console/oidc", "/console/oidc/callback"}  # on the way to the OpenID provider, and back
    assert {"/livez", "/readyz", "/metrics", "/openapi.json", ROUTE} | pages == KNOWN


async def test_no_other_operation_tells_anything_without_a_key(api: Running) -> None:
    """Neither 404 nor 422: who has no key learns not even whether its request was well-formed."""
    assert len(GUARDED) > 40
    async with client_of(api.url) as client:
        for method, path in GUARDED:
            answer = await client.request(method, path)
            assert answer.status_code == 401, (method, path, answer.text)
            problem(answer, 401, "missing_api_key")


async def test_no_other_operation_tells_anything_to_a_key_without_scopes(api: Running, make_key: MakeKey) -> None:
    async with client_of(api.url, (await make_key(scopes=())).text) as client:
        for method, path in GUARDED:
            if path.startswith(CONSOLE):  # pages know sessions, not keys: tests/console/test_roles.py
                continue
            answer = await client.request(method, path)
            assert answer.status_code == 403, (method, path, answer.text)


@pytest.mark.parametrize("query", ["verbose", "verbose=", "verbose=0", "x=1&verbose=1"])
async def test_what_the_servers_are_is_told_to_operators_alone(api: Running, make_key: MakeKey, query: str) -> None:
    async with client_of(api.url) as anybody:
        problem(await anybody.get(f"/readyz?{query}"), 401, "missing_api_key")
    async with client_of(api.url, (await make_key()).text) as tenant:
        problem(await tenant.get(f"/readyz?{query}"), 403, "insufficient_scope")
    async with client_of(api.url, (await make_key(scopes=(OPERATE,))).text) as operator:
        assert (await operator.get(f"/readyz?{query}")).json()["findings"]


@pytest.mark.usefixtures("patient_readiness")
async def test_without_a_key_readiness_says_nothing_of_the_servers(api: Running, rows: Connection) -> None:
    version = str(await rows.fetchval("SELECT current_setting('server_version')"))
    async with client_of(api.url) as anybody:
        assert (await anybody.get("/readyz")).json() == {"status": "ok"}
        await rows.execute("DELETE FROM alembic_version")
        api.services.drain()
        answer = await anybody.get("/readyz")
    assert answer.status_code == 503
    assert version not in answer.text
    assert "findings" not in answer.json()


async def test_the_document_is_made_once_and_never_in_the_event_loop(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making it takes a second of processor time, and anybody may ask for it."""
    made_in = []

    def make(**described: Any) -> dict[str, Any]:
        made_in.append(threading.current_thread())
        return get_openapi(**described)

    monkeypatch.setattr("leasehold.api.http.openapi.get_openapi", make)
    async with serving(settings) as api, client_of(api.url) as anybody:
        answers = await asyncio.gather(*(anybody.get("/openapi.json") for _ in range(5)))
        answers.append(await anybody.get("/openapi.json"))
    assert len({answer.content for answer in answers}) == 1
    assert len(made_in) == 1
    assert made_in[0] is not threading.current_thread()


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/metrics", "/debug", "/.env", "/v1/generations/callbacks"])
async def test_there_is_no_page_beside_the_contract(api: Running, path: str) -> None:
    async with client_of(api.url) as anybody:
        problem(await anybody.get(path), 404, "not_found")


# --- callbacks of providers: the address is the secret


def path_of(settings: Settings, job_id: UUID) -> str:
    url = callback_url(settings, Sealing(settings), job_id)
    assert url is not None
    return httpx2.URL(url).path


async def test_only_the_address_that_the_provider_was_given_is_answered(settings: Settings) -> None:
    settings, job_id, other = sealed(settings), new_id(), new_id()
    genuine = path_of(settings, job_id)
    signature = genuine.rpartition("/")[2]
    assert len(signature) == 43  # of 256 bits
    forged = [
        path_of(settings, other).replace(str(other), str(job_id)),
        path_of(sealed(settings), job_id),  # another installation's
        genuine[:-1],
        genuine + "=",
        genuine.replace(signature, "%00"),
        genuine.replace(signature, "é" * 10),
        genuine.replace(signature, Sealing(settings).sign("another purpose", job_id.bytes)),
    ]
    async with serving(settings) as api, client_of(api.url) as anybody:
        for path in forged:
            problem(await anybody.post(path), 404, "task_not_found")
        assert (await anybody.post(genuine)).status_code == 204  # no such job: and nothing happens


async def test_an_installation_without_keys_believes_no_callback(api: Running) -> None:
    async with client_of(api.url) as anybody:
        problem(await anybody.post(ROUTE.format(job_id=new_id(), signature="x" * 43)), 404, "task_not_found")


def test_a_signature_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """By `hmac.compare_digest`, with every key of the installation."""
    asked: list[bytes] = []

    def compare(own: bytes, said: bytes) -> bool:
        asked.append(said)
        return own == said

    settings, job_id = sealed(settings), new_id()
    monkeypatch.setattr("leasehold.security.sealing.hmac.compare_digest", compare)
    assert not is_genuine(Sealing(settings), job_id, "guess")
    assert asked == [b"guess"]


async def test_what_a_callback_says_is_not_read(settings: Settings, rows: Connection) -> None:
    settings, job_id = sealed(settings), new_id()
    async with serving(settings) as api, client_of(api.url) as anybody:
        answer = await anybody.post(path_of(settings, job_id), content=b"{" * 10_000)
        assert (answer.status_code, answer.content) == (204, b"")
    assert await rows.fetchval("SELECT count(*) FROM job") == 0
