"""What holds for every request: names, headers, limits, and errors as problems."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from uuid import UUID

import pytest
from prometheus_client import generate_latest

from leasehold.db.database import Connection
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of, serving
from tests.api.media_api import MediaApi, problem

BODY = {"content_type": "image/jpeg", "file_name": "a.jpg"}


async def test_a_request_id_is_echoed(media_api: MediaApi) -> None:
    answer = await media_api.client.get("/media/no-id", headers={"X-Request-Id": "abc-123"})
    assert answer.headers["x-request-id"] == "abc-123"
    assert answer.json()["request_id"] == "abc-123"


@pytest.mark.parametrize("wrong", ["", "x" * 129, "two words", "tab\there", "caf\xe9"])
async def test_a_request_id_that_could_forge_a_log_line_is_replaced(media_api: MediaApi, wrong: str) -> None:
    answer = await media_api.client.get("/livez", headers={b"X-Request-Id": wrong.encode("latin-1")})
    assert UUID(answer.headers["x-request-id"]).version == 7


async def test_a_job_gets_a_trace_even_when_the_caller_sent_none(media_api: MediaApi, rows: Connection) -> None:
    await media_api.submitted()
    trace: dict[str, str] = await rows.fetchval("SELECT trace FROM job")
    assert UUID(trace["request_id"]).version == 7
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace["traceparent"])


@pytest.mark.parametrize("wrong", ["garbage", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'A' * 32}-{'b' * 16}-01"])
async def test_a_malformed_traceparent_is_replaced(media_api: MediaApi, rows: Connection, wrong: str) -> None:
    ticket = await media_api.upload()
    await media_api.client.post("/complete-upload", json=ticket.completion, headers={"traceparent": wrong})
    assert (await rows.fetchval("SELECT trace FROM job"))["traceparent"] != wrong


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/media/no-id", "/nothing", "/openapi.json"])
async def test_every_answer_carries_the_security_headers(media_api: MediaApi, path: str) -> None:
    answer = await media_api.client.get(path)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "server" not in answer.headers or "uvicorn" in answer.headers["server"]
    assert "access-control-allow-origin" not in answer.headers


async def test_an_unknown_address_is_a_problem(media_api: MediaApi) -> None:
    problem(await media_api.client.get("/nothing/here"), 404, "not_found")


async def test_a_wrong_method_is_a_problem_that_names_the_right_one(media_api: MediaApi) -> None:
    answer = await media_api.client.get("/upload-url")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_a_body_that_is_no_json_is_a_problem(media_api: MediaApi) -> None:
    headers = {"Content-Type": "application/json"}
    problem(await media_api.client.post("/upload-url", content=b'{"a":', headers=headers), 400, "malformed_json")


@pytest.mark.parametrize(
    ("body", "pointers"),
    [
        ({}, ["#/content_type", "#/file_name"]),
        ([], ["#"]),
        (BODY | {"content_length": "many"}, ["#/content_length"]),
        (BODY | {"content_length": -1}, ["#/content_length"]),
        (BODY | {"file_name": "x" * 1025}, ["#/file_name"]),
        (BODY | {"a/b~c": 1}, ["#/a~1b~0c"]),
    ],
)
async def test_every_wrong_field_is_pointed_at(media_api: MediaApi, body: Any, pointers: list[str]) -> None:
    said = problem(await media_api.client.post("/upload-url", json=body), 422, "invalid_request")
    assert [error["pointer"] for error in said["errors"]] == pointers


async def test_a_wrong_value_is_not_repeated_to_the_caller(media_api: MediaApi) -> None:
    answer = await media_api.client.post("/upload-url", json=BODY | {"content_length": "canary-value"})
    assert "canary-value" not in answer.text


async def test_a_body_that_is_announced_too_large_is_refused(media_api: MediaApi) -> None:
    problem(await media_api.client.post("/upload-url", content=b"x" * 65537), 413, "body_too_large")


async def test_a_body_that_grows_too_large_is_refused_by_the_bytes_that_came(media_api: MediaApi) -> None:
    async def endless() -> Any:
        for _ in range(20):
            yield b"x" * 8192

    problem(await media_api.client.post("/upload-url", content=endless()), 413, "body_too_large")


async def test_a_body_of_the_greatest_size_is_read(media_api: MediaApi) -> None:
    body = b'{"x":"' + b"y" * (65536 - 8) + b'"}'
    answer = await media_api.client.post("/upload-url", content=body, headers={"Content-Type": "application/json"})
    problem(answer, 422, "invalid_request")


async def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(api: Running, media_api: MediaApi) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /upload-url HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await media_api.client.get("/livez")).status_code == 200


async def test_what_nobody_foresaw_is_a_500_without_details(media_api: MediaApi, rows: Connection) -> None:
    await rows.execute("DROP TABLE idempotency")
    answer = await media_api.client.post("/upload-url", json=BODY, headers={"Idempotency-Key": "k"})
    problem(answer, 500, "internal_error")
    assert "idempotency" not in answer.text


async def test_requests_are_counted_by_bounded_labels(media_api: MediaApi) -> None:
    ticket = await media_api.submitted()
    await media_api.look(ticket)
    await media_api.client.get("/no/such/address/zzyzx")
    await media_api.client.request("PROPFIND", "/media/zzyzx")
    text = generate_latest().decode()
    counted = 'leasehold_http_request_duration_seconds_count{code="200",method="GET",route="/media/{media_id}"'
    assert counted + ',waited="no"}' in text
    assert 'code="202",method="POST",route="/complete-upload"' in text
    assert 'leasehold_http_problems_total{code="not_found"}' in text
    assert 'route="unmatched"' in text
    assert 'method="OTHER"' in text
    assert "zzyzx" not in text
    assert ticket.media_id not in text


async def test_metrics_are_not_on_the_public_port_unless_somebody_says_so(
    settings: Settings, media_api: MediaApi
) -> None:
    problem(await media_api.client.get("/metrics"), 404, "not_found")
    async with (
        serving(settings.model_copy(update={"metrics_public": True})) as running,
        client_of(running.url) as anybody,
    ):
        assert "leasehold_http_requests_in_flight" in (await anybody.get("/metrics")).text
    off = settings.model_copy(update={"metrics_public": True, "metrics": False})
    async with serving(off) as running, client_of(running.url) as anybody:
        problem(await anybody.get("/metrics"), 404, "not_found")
