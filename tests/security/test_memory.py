"""Who has no key costs the API no memory to speak of, and takes nobody's place."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from prometheus_client import REGISTRY

from leasehold.api.auth.security import EXTERNAL_WORK
from leasehold.api.process import tenant_requests
from leasehold.api.process.bodies import Bodies
from leasehold.api.process.tenant_requests import TenantRequests
from leasehold.domain.errors import Unavailable
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.media_api import MediaApi
from tests.api.test_process import Process, running

STRANGERS = 300
#: What a connection may cost before its caller is known: the head, and what the socket brought with it.
A_STRANGER = 160 * 1024
BODY = b"x" * 500 * 1024
DOORS = ("/v1/runs", "/v1/templates", "/upload-url", "/api/v1/jobs", "/v1/upload/images", "/v1/images/generations")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: x", *lines, "", "")).encode()


async def status(reader: asyncio.StreamReader) -> int:
    """Of the next answer, whose body is read, too; 0 when the connection ended."""
    try:
        line = await reader.readline()
        length = 0
        while (name := await reader.readline()).strip():
            if name.lower().startswith(b"content-length:"):
                length = int(name.partition(b":")[2])
        await reader.readexactly(length)
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0
    return int(line.split()[1]) if line else 0


def resident(process: Process) -> int:
    """Bytes, now."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
async def process(settings: Settings) -> AsyncIterator[Process]:
    async with running(settings, "json", LEASEHOLD_API_CONNECTIONS="400", LEASEHOLD_API_HEADER_SECONDS="30") as started:
        async with client_of(started.url) as client:
            for _ in range(20):
                await client.post("/v1/runs", content=BODY)
        yield started


async def test_three_hundred_strangers_with_bodies_cost_no_more_than_the_documented_sum(
    process: Process, settings: Settings
) -> None:
    before = resident(process)
    async with AsyncExitStack() as stack:
        for n in range(STRANGERS):
            _, writer = await stack.enter_async_context(connected(process.url))
            said = "Transfer-Encoding: chunked" if n % 2 else f"Content-Length: {2 * len(BODY)}"
            writer.write(head(DOORS[n % len(DOORS)], said, "Content-Type: application/json"))
            writer.write((b"%x\r\n" % (2 * len(BODY)) if n % 2 else b"") + BODY)
        await asyncio.sleep(2)
        assert process.resident - before < STRANGERS * A_STRANGER
        async with client_of(process.url) as client:
            assert (await client.get("/livez")).status_code == 200


async def test_three_hundred_endless_heads_cost_no_more_than_the_documented_sum(process: Process) -> None:
    before = resident(process)
    async with AsyncExitStack() as stack:
        for n in range(STRANGERS):
            _, writer = await stack.enter_async_context(connected(process.url))
            writer.write(head("/v1/runs")[:-2] + (b"X: " + b"y" * 50_000 if n % 2 else b"A: b\r\n" * 9_000))
        await asyncio.sleep(1)
        assert process.resident - before < STRANGERS * A_STRANGER


async def test_a_head_that_is_too_large_is_refused_and_counted(api: Running) -> None:
    def counted() -> float:
        return REGISTRY.get_sample_value("leasehold_http_problems_total", {"code": "head_too_large"}) or 0

    before = counted()
    for more in (b"X: " + b"y" * 100_000, b"A: b\r\n" * 20_000 + b"\r\n"):
        async with connected(api.url) as (reader, writer):
            writer.write(head("/v1/runs")[:-2] + more)
            assert await status(reader) == 431
    assert counted() == before + 2


@pytest.mark.parametrize("door_path", DOORS)
async def test_a_stranger_is_refused_before_its_body_is_read(api: Running, door_path: str) -> None:
    async with connected(api.url) as (reader, writer):
        writer.write(head(door_path, "Content-Length: 1000", "Content-Type: application/json"))
        assert await status(reader) == 401


async def test_every_route_that_has_a_body_knows_its_caller_first(api: Running, media_api: MediaApi) -> None:
    document = (await media_api.client.get("/openapi.json")).json()
    paths = [
        (method.upper(), re.sub(r"{\w+}", "01a20291-911b-76e1-9fcc-53ab67667957", path))
        for path, methods in document["paths"].items()
        for method in methods
        if method in ("post", "put", "patch", "delete")
    ]
    assert len(paths) > 20
    for method, path in paths:
        async with connected(api.url) as (reader, writer):
            writer.write(head(path, "Content-Length: 1000").replace(b"POST", method.encode(), 1))
            async with asyncio.timeout(60):
                assert await status(reader) == 401, (method, path)


async def test_a_sender_that_never_ends_its_body_is_closed_after_its_answer(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.api.http.connections.LINGER_SECONDS", 0.2)
    async with connected(api.url) as (reader, writer), asyncio.timeout(60):
        writer.write(head("/v1/runs", "Content-Length: 1000000"))
        assert await status(reader) == 401
        writer.write(b"x")
        assert await reader.read() == b""


async def test_a_head_that_drips_is_closed(settings: Settings) -> None:
    async def answers(seconds: float) -> list[object]:
        found: list[object] = []
        quick = settings.model_copy(update={"api_header_seconds": seconds})
        async with serving(quick) as api:
            async with connected(api.url) as (reader, writer), asyncio.timeout(60):
                for byte in b"POST /v1/runs":
                    writer.write(bytes([byte]))
                    await asyncio.sleep(seconds / 15)
                found.append(await status(reader))
            async with connected(api.url) as (reader, _), asyncio.timeout(60):
                found.append(await reader.read())
            async with connected(api.url) as (reader, writer), asyncio.timeout(60):
                writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
                found.append(await status(reader))
                writer.write(b"GET /liv")  # the head of a second request drips, too
                found.append(await status(reader))
        return found

    for seconds in (0.3, 2.0, 10.0):  # where this process stands still for so long, also an honest head is late
        found = await answers(seconds)
        if found == [408, b"", 200, 408]:
            break
    assert found == [408, b"", 200, 408]


async def test_a_newcomer_takes_the_place_of_a_connection_that_asks_nothing(settings: Settings) -> None:
    async with serving(settings.model_copy(update={"api_connections": 10})) as api, AsyncExitStack() as stack:
        for _ in range(30):
            await stack.enter_async_context(connected(api.url))
        async with client_of(api.url) as client:
            assert (await client.get("/livez")).status_code == 200


async def test_where_all_connections_are_busy_a_newcomer_is_told_so(settings: Settings, make_key: MakeKey) -> None:
    few = settings.model_copy(update={"api_connections": 10})
    keys = [await make_key(tenant) for tenant in ("acme", "other")]
    async with serving(few) as api, AsyncExitStack() as stack:
        for key in keys * 5:
            _, writer = await stack.enter_async_context(connected(api.url))
            writer.write(head("/upload-url", f"Authorization: Bearer {key.text}", "Content-Length: 100"))
        async with asyncio.timeout(60):
            while not api.services.bodies._used_bytes_by_tenant.total() or api.services.bodies._used_bytes < 1000:
                await asyncio.sleep(0.01)
        async with connected(api.url) as (reader, writer):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await status(reader) == 503


async def test_a_tenant_whose_requests_all_wait_leaves_connections_to_others(
    settings: Settings, make_key: MakeKey
) -> None:
    """Its further requests are refused, and hold no connection, also if their bodies never come."""
    few = settings.model_copy(update={"api_connections": 10})
    waiting, others = await make_key(scopes=(EXTERNAL_WORK,)), await make_key("other")
    body = b'{"worker_id": "w", "queues": ["q"], "wait": 30}'
    claim = head(
        "/v1/external/claim", f"Authorization: Bearer {waiting.text}", "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )  # fmt: skip
    async with serving(few) as api, AsyncExitStack() as stack, asyncio.timeout(60):
        async with AsyncExitStack() as polls:
            for _ in range(9):
                _, writer = await polls.enter_async_context(connected(api.url))
                writer.write(claim + body)
            while api.services.queues.waiting < 9:
                await asyncio.sleep(0.01)
            for _ in range(20):
                reader, writer = await stack.enter_async_context(connected(api.url))
                writer.write(claim)
                assert await status(reader) == 503
                assert await reader.read() == b""
            async with client_of(api.url, others.text) as client:
                assert (await client.get("/media/no-id")).status_code == 404
        while api.services.queues.waiting:
            await asyncio.sleep(0.01)
        async with client_of(api.url, waiting.text) as client:
            for _ in range(20):  # also a tenant that has asked more often than it has connections
                answer = await client.post("/v1/external/claim", json={"worker_id": "w", "queues": ["q"]})
                assert answer.status_code == 200


async def test_a_long_poll_whose_body_has_come_keeps_only_the_memory_of_its_body(
    settings: Settings, make_key: MakeKey
) -> None:
    """Also where the client did not say how long its body would be."""
    key = await make_key(scopes=(EXTERNAL_WORK,))
    body = b'{"worker_id": "w", "queues": ["q"], "wait": 30}'
    claim = head(
        "/v1/external/claim", f"Authorization: Bearer {key.text}", "Content-Type: application/json",
        "Transfer-Encoding: chunked",
    )  # fmt: skip
    little = settings.model_copy(update={"api_body_bytes": 2 * 1024 * 1024})
    async with serving(little) as api, AsyncExitStack() as stack, asyncio.timeout(60):
        for number in range(1, 6):  # five bodies of unknown length have more than the tenant's share together
            _, writer = await stack.enter_async_context(connected(api.url))
            writer.write(claim + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
            while api.services.queues.waiting < number:
                await asyncio.sleep(0.01)
            assert api.services.bodies._used_bytes == number * len(body)
        await stack.aclose()
        while api.services.bodies._used_bytes:
            await asyncio.sleep(0.01)
        assert not api.services.bodies._used_bytes_by_tenant


def test_a_request_counts_once_for_its_tenant_however_often_its_key_is_checked() -> None:
    requests, one, another = TenantRequests(2), dict[str, Any](), dict[str, Any]()
    requests.begin(one, "acme")
    requests.begin(one, "acme")
    requests.begin({}, "other")
    with pytest.raises(Unavailable):
        requests.begin(another, "acme")
    tenant_requests.end(another)
    with pytest.raises(Unavailable):
        requests.begin(another, "acme")
    tenant_requests.end(one)
    requests.begin(another, "acme")


async def test_requests_sent_far_ahead_on_one_connection_are_refused(api: Running) -> None:
    async with connected(api.url) as (reader, writer), asyncio.timeout(60):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        answered = 0
        while await status(reader):
            answered += 1
        assert answered < 20


LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
NO_URL = b"GET http://[/ HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (LIVE + b"NONSENSE\r\n\r\n", [200, 400]),
        (LIVE + head("/v1/runs")[:-2] + b"A: b\r\n" * 20_000, [200, 431]),
        (LIVE * 9, [200, 200, 200, 200, 200, 503]),
        (head("/v1/runs", "Transfer-Encoding: chunked") + b"no length\r\n", [400]),
        (LIVE + head("/v1/runs", "Transfer-Encoding: chunked") + b"no length\r\n", [200, 400]),
        (b"NONSENSE\r\n\r\n", [400]),
        (NO_URL, [400]),
        (LIVE + NO_URL, [200, 400]),
        (b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n", [400]),  # without a path
    ],
    ids=[
        "not HTTP",
        "head too large",
        "too far ahead",
        "a body that is not HTTP",
        "a later body",
        "alone",
        "no URL",
        "a later request without a URL",
        "no path",
    ],
)
async def test_a_refusal_comes_after_the_answers_to_the_requests_before(
    api: Running, sent: bytes, answers: list[int]
) -> None:
    async with connected(api.url) as (reader, writer), asyncio.timeout(60):
        writer.write(sent)
        assert [await status(reader) for _ in answers] == answers
        assert await reader.read() == b""


async def test_a_url_that_is_none_is_refused_on_a_connection_that_has_served_before(api: Running) -> None:
    async with connected(api.url) as (reader, writer), asyncio.timeout(60):
        writer.write(LIVE)
        assert await status(reader) == 200
        writer.write(NO_URL)
        assert await status(reader) == 400
        assert await reader.read() == b""


async def test_what_follows_a_body_is_no_header(api: Running, make_key: MakeKey) -> None:
    """A proxy removes headers that a client must not send, and may pass trailers (RFC 9110, 6.5.1)."""
    key = await make_key()
    sent = head("/upload-url", "Transfer-Encoding: chunked", "Content-Type: application/json", "X-Request-Id: mine")
    trailer = f"Authorization: Bearer {key.text}\r\nX-Request-Id: of-the-trailer\r\n\r\n"
    async with connected(api.url) as (reader, writer), asyncio.timeout(60):
        writer.write(sent + b"2\r\n{}\r\n0\r\n" + trailer.encode() + LIVE)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"x-request-id: mine" in answer
        await reader.readuntil(b"}")
        assert await status(reader) == 200, "the next request is read as before"


async def test_a_refusal_is_never_written_into_an_answer_under_way(api: Running, media_api: MediaApi) -> None:
    whole = (await media_api.client.get("/openapi.json")).content
    async with connected(api.url) as (reader, writer), asyncio.timeout(60):
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.2)
        writer.write(b"NONSENSE\r\n\r\n")
        await asyncio.sleep(0.2)
        writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(whole)) == whole
        assert await status(reader) == 400


async def test_who_takes_nothing_of_an_answer_is_closed(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.api.http.connections.UNREAD_SECONDS", 0.2)
    async with connected(api.url) as (reader, writer), asyncio.timeout(120):
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        for _ in range(60):
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.02)
        began = monotonic()
        while not writer.transport.is_closing() and monotonic() - began < 60:
            await asyncio.sleep(0.05)
            writer.write(b"\r\n")
        assert writer.transport.is_closing()
        del reader


# --- the budget of bodies


async def test_bodies_under_way_share_a_budget_of_which_a_tenant_has_half() -> None:
    bodies = Bodies(1000)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bodies.room("acme", 300))
        await stack.enter_async_context(bodies.room("acme", 200))
        waiting = asyncio.create_task(stack.enter_async_context(bodies.room("acme", 1)))
        await asyncio.sleep(0)
        await stack.enter_async_context(bodies.room("rival", 5000))  # as many as a tenant may have
        assert not waiting.done()
        full = asyncio.create_task(stack.enter_async_context(bodies.room("third", 1)))
        await asyncio.sleep(0)
        assert not full.done()
        full.cancel()
        waiting.cancel()
    async with bodies.room("acme", 500), bodies.room("rival", 500):
        pass


async def test_a_request_without_room_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.api.process.bodies._PATIENCE_SECONDS", 0.05)
    bodies = Bodies(100)
    async with bodies.room("acme", 50):
        with pytest.raises(Unavailable, match="request bodies") as refused:
            async with bodies.room("acme", 1):
                pass
        assert refused.value.retry_after
    async with bodies.room("acme", 50):
        pass


async def test_who_waits_for_room_gets_it_in_turn() -> None:
    bodies, order = Bodies(100), []

    async def use(name: int) -> None:
        async with bodies.room(f"tenant {name}", 50):
            order.append(name)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(use(n) for n in range(10)))
    assert order == list(range(10))
