"""The failpoints after an API's commits: every commit has one, and a request that dies there is repeated by its key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from leasehold.db.database import Connection
from leasehold.runtime import failpoints
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import client_of, count, serving
from tests.runs.conftest import SCOPES, SECONDS, Client

#: Writes down each transaction that a process named `leasehold api...` wrote in.
_WITNESS = """
CREATE TABLE witness (xact text);
CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') LIKE 'leasehold api%' THEN
        INSERT INTO witness VALUES (pg_current_xact_id()::text);
    END IF;
    RETURN NULL;
END $$;
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
            AND NOT relispartition AND relname <> 'witness' LOOP
        EXECUTE format('CREATE TRIGGER witness AFTER INSERT OR UPDATE OR DELETE ON %I FOR EACH STATEMENT'
                       ' EXECUTE FUNCTION witness()', name);
    END LOOP;
END $$;
"""
KEY = {"Idempotency-Key": "8e03978e-40d5-43dd-bc93-6894a57f9324"}
RUN = {"template": "scripted"}
SCHEDULE = {"template": "scripted", "cron": "0 0 1 1 *"}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


@asynccontextmanager
async def armed(settings: Settings, rows: Connection, spec: str) -> AsyncIterator[Client]:
    failpoints.arm(spec)
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with serving(settings) as running, client_of(running.url, key.text) as http:
        yield Client(http)
        await running.services.announcer.until_idle()  # the rows are gone a moment before its commit has returned


@pytest.mark.parametrize(
    ("operation", "path", "body", "table", "status"),
    [
        ("createRun", "/v1/runs", RUN, "job", 202),
        ("createRuns", "/v1/runs/batch", {"template": "scripted", "runs": [{}, {}]}, "job", 202),
        ("createSchedule", "/v1/schedules", SCHEDULE, "schedule", 201),
        ("createUploadUrl", "/upload-url", {"content_type": "image/jpeg", "file_name": "a.jpg"}, "media", 201),
    ],
)
async def test_a_request_that_dies_after_its_commit_is_answered_when_it_is_repeated_with_its_key(
    runs_settings: Settings, rows: Connection, operation: str, path: str, body: dict[str, Any], table: str, status: int
) -> None:
    async with armed(runs_settings, rows, f"commit.{operation}:raise:2") as client:  # the first reserves the key
        _done(await client.http.get("/v1/runs"))  # notes that the API key is used
        assert (await client.http.post(path, json=body, headers=KEY)).status_code == 500
        written = await count(rows, table)
        assert written > 0
        again = await client.http.post(path, json=body, headers=KEY)
        assert again.status_code == status
        assert await count(rows, table) == written


async def test_a_run_without_a_key_has_the_point_of_the_connection_that_writes_it(
    runs_settings: Settings, rows: Connection
) -> None:
    async with armed(runs_settings, rows, "commit.api_submissions:raise") as client:
        assert (await client.submit()).status_code == 500
        assert await count(rows, "job") == 1


async def test_every_transaction_that_the_api_writes_in_reaches_a_point(
    runs_settings: Settings, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    monkeypatch.setattr(failpoints, "_reach", reached.append)
    await rows.execute(_WITNESS)
    async with armed(runs_settings, rows, "commit.nothing:kill") as client:
        await _use_much(client)
        async with asyncio.timeout(SECONDS):
            # the API still writes that it announced the hints
            while await count(rows, "outbox") or await count(rows, "outbox_batch"):
                await asyncio.sleep(0.02)
    written = await rows.fetchval("SELECT count(DISTINCT xact) FROM witness")
    reached = [name for name in reached if name.startswith(failpoints.COMMIT)]
    assert len(reached) == written, sorted(reached)
    assert {"commit.createRun", "commit.cancelRun", "commit.createSchedule", "commit.claimExternal"} <= {*reached}


async def _use_much(client: Client) -> None:
    run = await client.start()
    await client.http.post("/v1/runs", json=RUN, headers=KEY)
    await client.post("/v1/runs/batch", template="scripted", runs=[{}, {}])
    _done(await client.post(f"/v1/runs/{run}/cancel"))
    schedule = _done(await client.post("/v1/schedules", **SCHEDULE)).json()["id"]
    _done(await client.post(f"/v1/schedules/{schedule}/run-now"))
    _done(await client.http.delete(f"/v1/schedules/{schedule}"))
    _done(await client.post("/v1/external/claim", worker_id="one", queues=["reports"]))
    _done(await client.post("/upload-url", content_type="image/jpeg", file_name="a.jpg"))


def _done(answer: httpx2.Response) -> httpx2.Response:
    assert answer.is_success, answer.text
    return answer
