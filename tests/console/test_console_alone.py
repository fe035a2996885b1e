"""`leasehold console`: people reach the console, and clients reach nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from pydantic import SecretStr, ValidationError

from leasehold.api.app import make_app
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of, serving
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import TENANT_SCOPES, Maker

KEY = "c2VhbGluZ19rZXlzX2FyZV8zMl9ieXRlc19sb25nISE="


@pytest.fixture
async def running(settings: Settings) -> AsyncIterator[Running]:
    alone = settings.model_copy(update={"sealing_keys": SecretStr(KEY), "console_only": True})
    async with serving(alone) as running:
        yield running


@pytest.fixture
async def client(settings: Settings, rows: Connection) -> AsyncIterator[httpx2.AsyncClient]:
    """Of an API that serves clients."""
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=sorted(TENANT_SCOPES))
    async with serving(settings) as api, client_of(api.url, key.text) as client:
        yield client


async def test_people_see_and_act(person: MakePerson, maker: Maker) -> None:
    operator = await person(ROLES["operator"])
    job_id = await maker.make("run")
    assert str(job_id) in await operator.see("/jobs")
    await operator.do(f"/jobs/{job_id}/cancel")
    assert "cancel" in await operator.see(f"/jobs/{job_id}")


@pytest.mark.usefixtures("patient_readiness")
async def test_monitoring_is_answered_and_no_client_is(running: Running, person: MakePerson) -> None:
    key = (await person(ROLES["admin"])).key.text
    async with client_of(running.url, key) as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        for method, path in (
            ("GET", "/v1/jobs"), ("POST", "/v1/runs"), ("POST", "/upload-url"), ("GET", "/openapi.json"),
            ("GET", "/v1/keys"),
        ):  # fmt: skip
            assert (await client.request(method, path)).status_code == 404, path


def test_its_routes_are_those_of_the_console_and_of_monitoring() -> None:
    app = make_app(Settings(_env_file=None, console_only=True))  # metrics: on a port of their own
    outside = {route.path for route in app.routes if not route.path.startswith("/console")}  # type: ignore[attr-defined]  # all are routes with a path
    assert outside == {"/livez", "/readyz"}


def test_a_console_that_would_serve_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing would be served"):
        Settings(_env_file=None, console_only=True, console="off")
