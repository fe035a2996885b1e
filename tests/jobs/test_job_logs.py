"""The log of a job over HTTP: a page at a time, or as it is written; of its own tenant only."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

import httpx2
import orjson
import pytest

from leasehold.api.http import streams
from leasehold.api.jobs import logs as job_logs
from leasehold.api.jobs.schemas import LogPage, StreamPage
from leasehold.db import log_reads
from leasehold.db.database import Connection
from leasehold.transitions import logs, settlements
from leasehold.transitions import streams as streaming
from leasehold.transitions.claims import Claimed
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.streams import StreamChunk
from tests.api.media_api import problem
from tests.api.test_events import told
from tests.jobs.conftest import MakeClient, Maker


def line(message: str, **more: Any) -> bytes:
    head = {"at": "2026-11-22T12:00:00+00:00", "level": "info", "logger": "shop", "message": message}
    return orjson.dumps(head | more)


async def write(rows: Connection, claimed: Claimed, first: int, *messages: str) -> None:
    lease = claimed.lease
    chunk = LogChunk(lease.task_id, lease.epoch, lease.attempt, first, [line(message) for message in messages])
    await logs.append(rows, [chunk])


async def read(client: httpx2.AsyncClient, path: str, **params: Any) -> dict[str, Any]:
    answer = await client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    LogPage.model_validate(body)
    return body


@pytest.mark.parametrize("kind", ["run", "media"])
async def test_the_log_is_read_by_pages_steps_and_attempts(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, kind: str
) -> None:
    job_id = await maker.make(kind)
    path = f"/v1/jobs/{job_id}/logs"
    assert await read(client, path) == {"lines": [], "next_after": None}
    claimed = await maker.claim(job_id)
    await write(rows, claimed, 1, "one", "two")
    await write(rows, claimed, 3, "three")
    body = await read(client, path)
    assert [(entry["n"], entry["message"]) for entry in body["lines"]] == [(1, "one"), (2, "two"), (3, "three")]
    assert {(entry["step"], entry["attempt"]) for entry in body["lines"]} == {(claimed.step, 1)}
    first = await read(client, path, limit=2)
    assert [entry["message"] for entry in first["lines"]] == ["one", "two"]
    rest = await read(client, path, limit=2, after=first["next_after"])
    assert ([entry["message"] for entry in rest["lines"]], rest["next_after"]) == (["three"], None)
    assert len((await read(client, path, step=claimed.step, attempt=1))["lines"]) == 3
    assert (await read(client, path, attempt=2))["lines"] == []
    assert (await read(client, path, step="other"))["lines"] == []
    run = await client.get(f"/v1/runs/{job_id}/logs")
    if kind == "run":
        assert run.json() == body
    else:
        problem(run, 404, "run_not_found")


async def test_another_tenant_reads_nothing(maker: Maker, client_with: MakeClient) -> None:
    job_id = await maker.make("run")
    other = await client_with("jobs:read", "runs:read", tenant="other")
    for path, code in ((f"/v1/jobs/{job_id}/logs", "job_not_found"), (f"/v1/runs/{job_id}/logs", "run_not_found")):
        problem(await other.get(path), 404, code)
        problem(await other.get(path, headers={"Accept": "text/event-stream"}), 404, code)


def follow(client: httpx2.AsyncClient, job_id: UUID, last: int | None = None, **params: Any) -> Any:
    headers = {"Accept": "text/event-stream"} | ({} if last is None else {"Last-Event-ID": str(last)})
    return client.stream("GET", f"/v1/jobs/{job_id}/logs", params=params, headers=headers)


async def test_a_follower_has_each_line_as_it_is_written_and_its_stream_ends_with_the_job(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("run")
    claimed = await maker.claim(job_id)
    await write(rows, claimed, 1, "one")
    async with asyncio.timeout(60), follow(client, job_id) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = told(answer)
        first = await anext(lines)
        assert (first["event"], first["id"], first["message"]) == ("line", "1", "one")
        await write(rows, claimed, 2, "two", "three")
        assert [(await anext(lines))["message"] for _ in range(2)] == ["two", "three"]
        await client.post(f"/v1/jobs/{job_id}/cancel", json={})
        await rows.execute(
            "UPDATE task SET status = 'cancelled', lease_owner = NULL, lease_until = NULL, finished_at = now()"
            " WHERE job_id = $1",
            job_id,
        )
        await rows.execute("UPDATE job SET status = 'cancelled', finished_at = now() WHERE id = $1", job_id)
        assert [entry async for entry in lines] == []
    async with asyncio.timeout(60), follow(client, job_id, 2) as answer:
        assert [entry["message"] async for entry in told(answer)] == ["three"]


async def test_a_follower_of_one_attempt_waits_through_the_lines_of_others(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream stays quiet, and open: no busy loop over lines that it does not want."""
    reads: list[int] = []

    async def counted(*args: Any) -> Any:
        reads.append(1)
        return await log_reads.log_page(*args)

    monkeypatch.setattr(job_logs, "LOG", replace(job_logs.LOG, read_page=counted))
    job_id = await maker.make("run")
    claimed = await maker.claim(job_id)
    await write(rows, claimed, 1, "one")
    async with asyncio.timeout(60), follow(client, job_id, attempt=7) as answer:
        lines = told(answer)
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0.6)
        assert not waiting.done()
        assert len(reads) <= 2
        waiting.cancel()


async def test_an_idle_stream_is_kept_alive(
    maker: Maker, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.api.jobs.following.KEEP_ALIVE", 0.05)
    assert streams.KEEP_ALIVE > 1
    job_id = await maker.make("run")
    async with asyncio.timeout(60), follow(client, job_id) as answer:
        assert await anext(answer.aiter_lines()) == ": ping"


async def test_a_wrong_event_id_is_refused(maker: Maker, client: httpx2.AsyncClient) -> None:
    job_id = await maker.make("run")
    answer = await client.get(f"/v1/jobs/{job_id}/logs", headers={"Last-Event-ID": "x"})
    problem(answer, 422, "invalid_event_id")


# --- streams


async def emit(rows: Connection, claimed: Claimed, first: int, *chunks: Any, restarts: bool = False) -> None:
    encoded = [orjson.dumps({"chunk": chunk} if chunk != "CUT" else {"cut": True}) for chunk in chunks]
    await streaming.append(rows, [StreamChunk(claimed.lease, first, encoded, restarts)])


async def test_a_stream_is_followed_through_a_restart_and_resumed(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("run")
    claimed = await maker.claim(job_id)
    await emit(rows, claimed, 1, "a")
    headers = {"Accept": "text/event-stream"}
    async with asyncio.timeout(60), client.stream("GET", f"/v1/runs/{job_id}/stream", headers=headers) as answer:
        events = told(answer)
        first = await anext(events)
        assert (first["event"], first["id"], first["chunk"], first["attempt"]) == ("chunk", "1", "a", 1)
        await settlements.release(rows, [claimed.lease])
        claimed = await maker.claim(job_id)
        await emit(rows, claimed, 1, "b", {"c": 1}, "CUT", restarts=True)
        seen = [await anext(events) for _ in range(4)]
        assert [(event["event"], event.get("chunk")) for event in seen] == [
            ("restart", None),
            ("chunk", "b"),
            ("chunk", {"c": 1}),
            ("cut", None),
        ]
        assert (seen[0]["epoch"], "id" in seen[0]) == (2, False)
        await maker.succeed_from(claimed)
        assert [event async for event in events] == []
    resumed = {"Accept": "text/event-stream", "Last-Event-ID": "2"}
    async with asyncio.timeout(60), client.stream("GET", f"/v1/jobs/{job_id}/stream", headers=resumed) as answer:
        assert [event["event"] async for event in told(answer)] == ["chunk", "cut"]
    page = (await client.get(f"/v1/jobs/{job_id}/stream", params={"limit": 3})).json()
    StreamPage.model_validate(page)
    assert [(item["n"], item["superseded"], item["restarts"]) for item in page["chunks"]] == [
        (1, True, False),
        (2, False, True),
        (3, False, False),
    ]
    assert page["next_after"] == 3
    rest = (await client.get(f"/v1/jobs/{job_id}/stream", params={"after": 3})).json()
    assert [item["cut"] for item in rest["chunks"]] == [True]


async def test_another_tenant_follows_nothing(maker: Maker, client_with: MakeClient) -> None:
    job_id = await maker.make("run")
    other = await client_with("jobs:read", "runs:read", tenant="other")
    problem(await other.get(f"/v1/jobs/{job_id}/stream"), 404, "job_not_found")
    problem(await other.get(f"/v1/runs/{job_id}/stream"), 404, "run_not_found")
