"""One trace a job, from the HTTP request to the last step; and nothing at all unless it is switched on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests import pictures
from tests.scenarios.fleet import Fleet
from tests.telemetry.page import scrape

PICTURE = pictures.encoded(pictures.corners(), "JPEG")


@dataclass(frozen=True)
class Received:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, str]


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP as a collector does, and keeps the spans."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taker)
        self.spans: list[Received] = []

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]


class _Taker(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    told = {item.key: item.value.string_value for item in span.attributes}
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    self.server.spans.append(Received(about["service.name"], span.name, *ids, told))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_words: object) -> None:
        """Nothing: the test looks at the spans."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = Collector()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


#: The worker's relay publishes a hint that the API has not published for a second.
_RELAYS_LATER = """
CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.relay_at := NEW.relay_at + interval '1 minute';
    RETURN NEW;
END $$;
CREATE TRIGGER later BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION later();
"""


async def test_one_trace_leads_from_the_request_over_the_broker_to_every_step(
    fleet: Fleet, collector: Collector
) -> None:
    await fleet.rows.connection.execute(_RELAYS_LATER)
    room: dict[str, Any] = {"amqp_silence_seconds": 30, "amqp_publish_timeout": 30}
    await fleet.worker(traces="true", poll_seconds=30, **room)  # so that only the broker leads to the first step
    api = await fleet.api(traces="true", metrics_port=0, **room)

    async def has_broker() -> bool:  # without it the API leaves its hint to the worker
        return (await scrape(api.metrics_port))["leasehold_broker_up"] == 1

    await fleet.until(has_broker, api)
    sent = await fleet.send(PICTURE)
    await fleet.finished(sent["media_id"])
    steps = [f"media {name}" for name in ("resize", "compress", "webp")]

    async def all_told() -> bool:
        by_api = any(span.service == "leasehold-api" for span in collector.named("hint publish"))
        return by_api and all(collector.named(name) for name in (*steps, "POST /complete-upload"))

    await fleet.until(all_told)
    (request,) = collector.named("POST /complete-upload")
    mine = {span.id: span for span in collector.spans if span.trace == request.trace}
    assert request.service == "leasehold-api"
    for name in steps:
        (step,) = collector.named(name)
        assert step.service == "leasehold-worker"
        assert step.attributes["leasehold.job_id"] == sent["job_id"]
        assert request.id in ancestors(step, mine), name
    (first,) = collector.named(steps[0])
    publishing = mine[first.parent]
    assert (publishing.name, publishing.service) == ("hint publish", "leasehold-api")
    inside = {span.name for span in mine.values() if span.parent == first.id}
    assert inside >= {"fetch", "run", "store", "settle"}


def ancestors(span: Received, known: dict[str, Received]) -> set[str]:
    found: set[str] = set()
    while span.parent in known:
        span = known[span.parent]
        found.add(span.id)
    return found


async def test_a_caller_who_traces_finds_our_spans_in_its_own_trace(fleet: Fleet, collector: Collector) -> None:
    await fleet.api(traces="true")
    theirs = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with httpx2.AsyncClient(base_url=fleet.api_url, timeout=40) as client:
        headers = {"Authorization": f"Bearer {fleet.key}", "traceparent": theirs}
        await client.get("/media/00000000-0000-7000-8000-000000000000", headers=headers)

    async def told() -> bool:
        return bool(collector.named("GET /media/{media_id}"))

    await fleet.until(told)
    (span,) = collector.named("GET /media/{media_id}")
    assert (span.trace, span.parent) == ("ab" * 16, "cd" * 8)


@pytest.mark.parametrize("module", ["leasehold.api.main", "leasehold.worker.main"])
async def test_off_neither_sdk_nor_exporter_is_even_imported(module: str) -> None:
    program = (
        f"import {module}, sys;"
        "ours = ('opentelemetry.sdk', 'opentelemetry.exporter');"  # FastAPI imports the bare API by itself
        "found = [name for name in sys.modules if name.startswith(ours)];"
        "assert not found, found"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0
