"""Following a picture by server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx2
import pytest

from leasehold.api.http import streams
from leasehold.api.process.watch import JobWatch
from leasehold.db.database import Connection, connect
from leasehold.settings import Settings
from tests.api.conftest import Running, job_of
from tests.api.driver import claim_step, fail_step, finish_all
from tests.api.media_api import PNG, MediaApi, Ticket, problem
from tests.support.lock_waits import until_waiting


async def told(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, each with its `id`."""
    one: dict[str, Any] = {}
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if not line and one:
            yield one
            one = {}
        elif name == "data":
            one |= json.loads(value)
        elif name in {"id", "event"}:
            one[name] = value


def stream(media_api: MediaApi, ticket: Ticket, after: int | None = None) -> Any:
    headers = {"Last-Event-ID": str(after)} if after is not None else {}
    return media_api.client.stream("GET", f"/media/{ticket.media_id}/events", headers=headers)


async def test_a_stream_tells_every_event_and_ends_after_the_last(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    async with stream(media_api, ticket) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = told(answer)
        first = await anext(events)
        assert (first["kind"], first["event"], first["id"], first["status"]) == (
            "submitted",
            "submitted",
            "1",
            "PROCESSING",
        )
        await finish_all(rows, ticket.media_id)
        rest = [one async for one in events]
    everything = [first, *rest]
    assert [one["seq"] for one in everything] == list(range(1, len(everything) + 1))
    assert [int(one["id"]) for one in everything] == [one["seq"] for one in everything]
    assert everything[-1]["status"] == "READY"
    assert {one["status"] for one in everything[:-1]} == {"PROCESSING"}
    steps = [(one["step"], one["step_status"]) for one in everything if "step" in one]
    assert steps == [(step, word) for step in ("resize", "compress", "webp") for word in ("RUNNING", "SUCCEEDED")]


async def test_a_stream_goes_on_after_as_many_events_at_once_as_it_reads_at_once(
    media_api: MediaApi, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next read finds none: it ended the stream, as if the job were deleted."""
    monkeypatch.setattr(streams, "_BATCH", 1)
    ticket = await media_api.submitted()
    async with stream(media_api, ticket) as answer:
        events = told(answer)
        assert (await anext(events))["kind"] == "submitted"
        claimed = await claim_step(rows, ticket.media_id)
        assert (await anext(events))["kind"] == "claimed"
        await fail_step(rows, claimed, "broken", retryable=False)
        assert [one["status"] async for one in events][-1] == "FAILED"


async def test_a_client_that_comes_back_misses_nothing_and_sees_nothing_twice(
    media_api: MediaApi, rows: Connection
) -> None:
    ticket = await media_api.submitted()
    async with stream(media_api, ticket) as answer:
        seen = (await anext(told(answer)))["seq"]
    await finish_all(rows, ticket.media_id)
    async with stream(media_api, ticket, after=seen) as answer:
        numbers = [one["seq"] async for one in told(answer)]
    assert numbers == list(range(seen + 1, await rows.fetchval("SELECT event_seq FROM job") + 1))


async def test_a_client_that_knows_everything_is_told_to_stop(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    await finish_all(rows, ticket.media_id)
    last = await rows.fetchval("SELECT event_seq FROM job")
    answer = await media_api.client.get(f"/media/{ticket.media_id}/events", headers={"Last-Event-ID": str(last)})
    assert (answer.status_code, answer.content) == (204, b"")


async def test_a_client_that_knows_everything_so_far_hears_of_the_rest(media_api: MediaApi, rows: Connection) -> None:
    """A browser never connects again after a 204."""
    ticket = await media_api.submitted()
    known = await rows.fetchval("SELECT event_seq FROM job")
    async with stream(media_api, ticket, after=known) as answer:
        assert answer.status_code == 200
        await finish_all(rows, ticket.media_id)
        events = [one async for one in told(answer)]
    assert [one["seq"] for one in events] == list(range(known + 1, events[-1]["seq"] + 1))
    assert events[-1]["status"] == "READY"


async def test_a_failure_is_told_with_its_code_and_without_our_insides(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    await fail_step(rows, await claim_step(rows, ticket.media_id), "corrupt_image", retryable=False)
    async with stream(media_api, ticket) as answer:
        events = [one async for one in told(answer)]
    failed = [one for one in events if one["kind"] == "failed"]
    assert [(one["code"], one["step"]) for one in failed] == [("corrupt_image", "resize")]
    assert events[-1]["status"] == "FAILED"
    assert not any("worker" in one for one in events)


async def test_an_idle_stream_is_kept_alive_by_comments(
    media_api: MediaApi, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE", 0.01)
    ticket = await media_api.submitted()
    async with stream(media_api, ticket) as answer:
        lines = answer.aiter_lines()
        while not (await anext(lines)).startswith(":"):
            pass
        await finish_all(rows, ticket.media_id)
        assert '"status":"READY"' in "".join([line async for line in lines])


async def test_a_stream_of_many_events_is_complete(
    media_api: MediaApi, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last event ends a batch."""
    ticket = await media_api.submitted()
    await finish_all(rows, ticket.media_id)
    total = await rows.fetchval("SELECT event_seq FROM job")
    for batch in (1, total, total - 1):
        monkeypatch.setattr(streams, "_BATCH", batch)
        async with stream(media_api, ticket) as answer:
            assert [one["seq"] async for one in told(answer)] == list(range(1, total + 1))


async def test_a_media_without_a_job_has_no_stream(media_api: MediaApi) -> None:
    waiting, refused = await media_api.ticket(), await media_api.upload(PNG)
    problem(await media_api.complete(refused), 422, "mislabelled")
    for ticket in (waiting, refused):
        problem(await media_api.client.get(f"/media/{ticket.media_id}/events"), 409, "not_submitted")


@pytest.mark.parametrize("wrong", ["first", "-1", "99999999999"])
async def test_a_last_event_id_that_is_no_number_is_refused(media_api: MediaApi, wrong: str) -> None:
    ticket = await media_api.submitted()
    answer = await media_api.client.get(f"/media/{ticket.media_id}/events", headers={"Last-Event-ID": wrong})
    problem(answer, 422, "invalid_event_id")


@pytest.mark.parametrize("name", ["watch", "log_watch", "stream_watch"])
async def test_a_wait_that_begins_during_the_query_of_another_does_not_end_with_it(
    api: Running, media_api: MediaApi, rows: Connection, settings: Settings, name: str
) -> None:
    """The job of the later wait lives and is unchanged. It must not be taken for a deleted one."""
    first, later = [await job_of(rows, (await media_api.submitted()).media_id) for _ in range(2)]
    watch: JobWatch = getattr(api.services, name)

    def wait(job_id: UUID, after: int) -> asyncio.Task[bool]:
        return asyncio.create_task(watch.changed(job_id, after, 600))

    holder = await connect(settings, "test")
    async with holder.transaction():
        await holder.execute("LOCK TABLE job")
        changed = wait(first, -1)
        await until_waiting(rows)
        unchanged = wait(later, 2**40)
        while watch.waiting < 2:
            await asyncio.sleep(0)
    await holder.close()
    assert await changed
    watch.release_all()  # a wait that goes on is answered False
    assert not await unchanged
