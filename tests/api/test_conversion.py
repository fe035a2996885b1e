"""The conversion door: what a client that sends a model is answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx2
import pytest

from api.conversion_view import disposition
from api.security import CONVERSION_READ, CONVERSION_WRITE
from leasehold.database import Connection
from leasehold.ids import new_id
from tests.api.conftest import MakeKey, Running, client_of, count

FORM = {"user_id": "u1", "model_id": "40000", "version": "0001", "platform": "720"}
SCOPES = (CONVERSION_WRITE, CONVERSION_READ)


@pytest.fixture
async def client(api: Running, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    key = await make_key(scopes=SCOPES)
    async with client_of(api.url, key.text) as opened:
        yield opened


async def send(client: httpx2.AsyncClient, *, name: str = "model.onnx", images: int = 0, **fields: str) -> Any:
    files = [("model", (name, b"model bytes", "application/octet-stream"))]
    files += [("ref_images[]", (f"{number}.png", b"picture", "image/png")) for number in range(images)]
    return await client.post("/api/v1/jobs", data=FORM | fields, files=files)


async def objects(api: Running) -> list[str]:
    return [found.key async for found in api.services.store.list("jobs/")]


async def test_a_model_that_is_sent_becomes_a_job_with_its_bytes_in_the_store(
    api: Running, client: httpx2.AsyncClient
) -> None:
    answer = await send(client, images=2, enable_evaluate="true")
    assert answer.status_code == 201
    job = answer.json()
    assert (job["status"], job["stage_status"], job["user_id"]) == ("created", "ONNX", "u1")
    assert job["parameters"]["enable_evaluate"] is True
    assert (job["input"]["size_bytes"], job["input"]["ref_images_count"]) == (11, 2)
    assert await api.services.store.fetch_bytes(job["input"]["object_key"], max_bytes=100) == b"model bytes"
    assert (await client.get(answer.headers["Location"])).json() == job


async def test_a_second_job_of_a_user_is_told_of_the_first_and_leaves_nothing_behind(
    api: Running, client: httpx2.AsyncClient, rows: Connection
) -> None:
    first = (await send(client)).json()
    before = await objects(api)
    second = await send(client)
    assert (second.status_code, second.json()["code"]) == (409, "job_in_progress")
    assert second.headers["Location"].endswith(first["job_id"])
    assert first["job_id"] in second.json()["detail"]
    assert await objects(api) == before
    assert await count(rows, "conversion") == 1
    assert (await send(client, user_id="u2")).status_code == 201


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"name": "model.tflite"}, 415, "tflite_unsupported"),
        ({"name": "model.exe"}, 422, "unsupported_format"),
        ({"model_id": "0"}, 422, "invalid_request"),
        ({"platform": "999"}, 422, "invalid_request"),
        ({"user_id": ""}, 422, "invalid_request"),
        ({"user_id": "a\nb"}, 422, "invalid_request"),
        ({"enable_sim_hw": "true"}, 422, "hardware_simulation_unavailable"),
        ({"images": 102}, 400, "bad_request"),
        ({"images": 101}, 422, "bad_reference_images"),
    ],
)
async def test_a_form_that_is_not_acceptable_leaves_nothing_behind(
    api: Running, client: httpx2.AsyncClient, rows: Connection, change: dict[str, Any], status: int, code: str
) -> None:
    answer = await send(client, **change)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert await objects(api) == []
    assert await count(rows, "job") == 0


async def test_lists_are_newest_first_by_user_and_by_state(client: httpx2.AsyncClient) -> None:
    made = [(await send(client, user_id=f"u{number}")).json()["job_id"] for number in range(3)]
    page = (await client.get("/api/v1/jobs", params={"limit": 2})).json()
    assert ([job["job_id"] for job in page["jobs"]], page["total"]) == ([made[2], made[1]], 3)
    rest = (await client.get("/api/v1/jobs", params={"cursor": page["next_cursor"]})).json()
    assert ([job["job_id"] for job in rest["jobs"]], rest["next_cursor"]) == ([made[0]], None)
    of_user = (await client.get("/api/v1/jobs", params={"user_id": "u1", "status": "created"})).json()
    assert [job["job_id"] for job in of_user["jobs"]] == [made[1]]
    assert (await client.get("/api/v1/jobs", params={"status": "completed"})).json()["jobs"] == []


async def test_another_tenants_job_is_not_there(api: Running, client: httpx2.AsyncClient, make_key: MakeKey) -> None:
    path = (await send(client)).headers["Location"]
    stranger = await make_key("other", scopes=SCOPES)
    async with client_of(api.url, stranger.text) as other:
        assert (await other.get(path)).status_code == 404
        assert (await other.get(f"{path}/result")).status_code == 404
        assert (await other.get("/api/v1/jobs")).json()["total"] == 0


async def test_a_result_that_is_not_there_yet_is_a_conflict_and_an_expired_one_is_gone(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    answer = await send(client)
    path = answer.headers["Location"]
    early = await client.get(f"{path}/result")
    assert (early.status_code, early.json()["code"]) == (409, "not_ready")
    await rows.execute(
        "UPDATE job SET expires_at = clock_timestamp() - interval '1 s' WHERE id = $1", UUID(answer.json()["job_id"])
    )
    late = await client.get(f"{path}/result")
    assert (late.status_code, late.json()["code"]) == (410, "expired")
    assert (await client.get(f"/api/v1/jobs/{new_id()}/result")).status_code == 404


async def test_downloads_are_limited_by_key(client: httpx2.AsyncClient) -> None:
    path = (await send(client)).headers["Location"]
    codes = [(await client.get(f"{path}/result")).status_code for _ in range(25)]
    assert codes[:20] == [409] * 20
    limited = await client.get(f"{path}/result")
    assert limited.status_code == 429
    assert int(limited.headers["Retry-After"]) >= 1


def test_a_file_name_cannot_break_out_of_its_header() -> None:
    said = disposition('a"b\r\nc模型.onnx', "nef")
    assert said == "attachment; filename=\"a_b__c__.nef\"; filename*=UTF-8''a%22b%0D%0Ac%E6%A8%A1%E5%9E%8B.nef"
