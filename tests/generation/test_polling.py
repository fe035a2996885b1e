"""What the endpoints have in common: asking again is cheap, and events stream with resume."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import httpx2
import orjson
import pytest

from leasehold.api.generation.events import _status_fields
from leasehold.api.process.metrics import CONNECTIONS, IN_FLIGHT
from leasehold.db.database import Connection
from leasehold.db.event_reads import EventView
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving, value_of
from tests.api.media_api import problem
from tests.generation.conftest import SCOPES, SECONDS, Client


async def ask(client: Client, task: str, etag: str | None = None, **params: Any) -> httpx2.Response:
    headers = {} if etag is None else {"If-None-Match": etag}
    return await client.http.get("/v1/images/query", params={"task_id": task} | params, headers=headers)


async def test_what_did_not_change_is_not_told_again(client: Client) -> None:
    task = await client.ordered("a cat")
    first = await ask(client, task)
    assert first.headers["retry-after"] == "1"
    again = await ask(client, task, first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["retry-after"] == "1"
    assert (await ask(client, task, '"another"')).status_code == 200


async def test_who_waits_is_told_of_the_next_change(client: Client, connection: Connection, worker: Worker) -> None:
    task = await client.ordered("a cat")
    etag, answer = None, await ask(client, task)
    while answer.json()["data"]["status"] == 0:
        etag = answer.headers["etag"]
        answer = await ask(client, task, etag, wait=30)
        assert answer.status_code == 200, "waited, and nothing changed"
    assert "retry-after" not in answer.headers
    assert answer.headers["etag"] != etag
    assert (await ask(client, task, answer.headers["etag"])).status_code == 304


async def test_a_body_may_ask_to_wait_too(client: Client, worker: Worker) -> None:
    task = await client.ordered("a cat")
    for _ in range(20):
        answer = await client.http.post("/v1/images/query", json={"task_id": task, "wait": 30})
        if answer.json()["data"]["status"]:
            return
    raise AssertionError("it never ended")


async def test_consuming_takes_the_result_though_it_is_known(client: Client, worker: Worker) -> None:
    task = await client.ordered("a cat")
    await client.ended(task)
    etag = (await ask(client, task)).headers["etag"]
    assert (await ask(client, task, etag, consume=True)).json()["data"]["status_text"] == "completed"
    assert (await ask(client, task, etag)).json()["data"]["status_text"] == "unknown"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_result_is_not_consumed_for_a_client_that_has_gone_while_it_waited(
    generation_settings: Settings, connection: Connection, method: str
) -> None:
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(generation_settings) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        task = await client.ordered("a cat")
        host, port = running.url.removeprefix("http://").split(":")
        body = orjson.dumps({"task_id": task, "wait": 30, "consume": True}) if method == "POST" else b""
        query = "" if body else f"?task_id={task}&wait=30&consume=true"
        head = f"{method} /v1/images/query{query} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key.text}\r\n"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(SECONDS):
            while not running.services.watch.waiting:
                await asyncio.sleep(0.01)
            opened = value_of(CONNECTIONS)
            writer.transport.abort()
            while value_of(CONNECTIONS) == opened:
                await asyncio.sleep(0.01)
            await connection.execute(
                "UPDATE job SET status = 'cancelled', finished_at = clock_timestamp(), event_seq = event_seq + 1,"
                " expires_at = clock_timestamp() + interval '1 day'"
            )
            while running.services.watch.waiting or value_of(IN_FLIGHT):
                await asyncio.sleep(0.01)
        assert (await client.look(task, consume=True))["status_text"] == "failed"
        assert (await client.look(task))["status_text"] == "unknown"


@pytest.mark.parametrize(
    ("sql", "retryable"),
    [
        ('status = \'failed\', error = \'{"code": "refused", "message": "", "retryable": false}\'', False),
        ('status = \'failed\', error = \'{"code": "away", "message": "", "retryable": true}\'', True),
        ("status = 'expired'", True),
        ("status = 'cancelled'", True),
    ],
)
async def test_a_failure_says_whether_trying_again_can_help(
    client: Client, connection: Connection, sql: str, *, retryable: bool
) -> None:
    task = await client.ordered("a cat")
    await connection.execute(
        f"UPDATE job SET {sql}, finished_at = clock_timestamp(), expires_at = clock_timestamp() + interval '1 hour'"
    )
    assert (await client.look(task))["error"]["retryable"] is retryable


def told(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


async def test_events_stream_to_the_end_in_the_endpoint_s_words_and_resume(client: Client, worker: Worker) -> None:
    task = await client.ordered("a cat")
    follow = "/v1/images/events"
    whole = told((await client.http.get(follow, params={"task_id": task})).text)
    assert [one["seq"] for one in whole] == list(range(1, len(whole) + 1))
    words = [one["status_text"] for one in whole if "status_text" in one]
    assert [word for word, before in zip(words, [None, *words], strict=False) if word != before] == [
        "pending", "processing", "polling", "completed"
    ]  # fmt: skip
    assert (whole[0]["status"], whole[-1]["status"]) == (0, -1)
    resume = {"Last-Event-ID": "3"}
    assert told((await client.http.get(follow, params={"task_id": task}, headers=resume)).text) == whole[3:]
    done = {"Last-Event-ID": str(len(whole))}
    assert (await client.http.get(follow, params={"task_id": task}, headers=done)).status_code == 204
    problem(await client.http.get("/v1/video/events", params={"task_id": task}), 404, "task_not_found")
    problem(
        await client.http.get(follow, params={"task_id": task}, headers={"Last-Event-ID": "x"}), 422, "invalid_event_id"
    )


@pytest.mark.parametrize(
    ("step", "task_status", "status_text"),
    [("submit", "pending", "pending"), ("submit", "running", "processing"), ("submit", "succeeded", "polling"),
     ("poll", "blocked", None), ("store", "blocked", None), ("poll", "waiting", "polling")],
)  # fmt: skip
def test_an_event_of_a_step_that_cannot_begin_yet_is_no_progress(
    step: str, task_status: str, status_text: str | None
) -> None:
    """A replay has an event for each step that it revives, in order: the last ones are blocked."""
    event = EventView(1, datetime.now(UTC), "replayed", "running", step, task_status, None)
    assert _status_fields(event).get("status_text") == status_text
