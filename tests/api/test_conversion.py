"""The conversion endpoints: what they answer to a client that sends a model."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import Context
from typing import Any
from uuid import UUID

import httpx2
import orjson
import pytest

from leasehold.api.auth.security import CONVERSION_READ, CONVERSION_WRITE
from leasehold.api.conversion import upload
from leasehold.api.conversion.view import disposition
from leasehold.db.database import Connection
from leasehold.domain.errors import StoreUnavailable
from leasehold.limits import uploads
from leasehold.limits.uploads import Due
from leasehold.pipelines.conversion import rows as rows_of_conversions
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.settlements import Completion, Output
from tests.api.conftest import MakeKey, Running, client_of, count, serving
from tests.api.driver import TERMS
from tests.api.media_api import problem

PICTURE = b"\x89PNG\r\n\x1a\n and so on"
FORM = {"user_id": "u1", "model_id": "40000", "version": "0001", "platform": "720"}
SCOPES = (CONVERSION_WRITE, CONVERSION_READ)


@pytest.fixture
async def client(api: Running, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    key = await make_key(scopes=SCOPES)
    async with client_of(api.url, key.text) as opened:
        yield opened


async def send(
    client: httpx2.AsyncClient, *, name: str = "model.onnx", images: int = 0, key: str | None = None, **fields: str
) -> Any:
    files = [("model", (name, b"model bytes", "application/octet-stream"))]
    files += [("ref_images[]", (f"{number}.png", PICTURE, "image/png")) for number in range(images)]
    headers = {} if key is None else {"Idempotency-Key": key}
    return await client.post("/api/v1/jobs", data=FORM | fields, files=files, headers=headers)


async def objects(api: Running) -> list[str]:
    return [found.key async for found in api.services.store.list("jobs/")]


async def test_a_model_that_is_sent_becomes_a_job_with_its_bytes_in_the_store(
    api: Running, client: httpx2.AsyncClient
) -> None:
    answer = await send(client, images=2, enable_evaluate="true", accuracy_guard="true")
    assert answer.status_code == 201
    job = answer.json()
    assert (job["status"], job["stage_status"], job["user_id"]) == ("created", "ONNX", "u1")
    assert job["parameters"]["enable_evaluate"] is job["parameters"]["accuracy_guard"] is True
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
    assert second.json()["job_id"] == first["job_id"]
    assert await objects(api) == before
    assert await count(rows, "conversion") == 1
    assert (await send(client, user_id="u2")).status_code == 201


async def test_a_second_job_of_a_user_whose_first_has_just_ended_is_told_to_send_again(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the refusal by the unique index and the look for the other job, the other job ended."""

    async def refuse(*_arguments: object) -> None:
        raise rows_of_conversions.Busy(None)

    monkeypatch.setattr(rows_of_conversions, "create", refuse)
    answer = await send(client)
    said = problem(answer, 409, "job_in_progress")
    assert said["detail"] == "The user's other conversion has just ended: send the request again."
    assert said["job_id"] is None
    assert "Location" not in answer.headers


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
        ({"preprocessing": "{"}, 422, "invalid_request"),
        ({"preprocessing": '{"mean": [0]}'}, 422, "invalid_request"),
        ({"preprocessing": '{"mean": [0, 0, 1.1]}'}, 422, "invalid_request"),
        ({"preprocessing": '{"scale": [1, 0, 1]}'}, 422, "invalid_request"),
        ({"preprocessing": '{"scale": [1e-320, 1, 1]}'}, 422, "invalid_request"),
        ({"version": "x" * 5000}, 422, "invalid_request"),
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


async def test_a_form_of_a_browser_may_leave_out_the_reference_images(client: httpx2.AsyncClient) -> None:
    """The browser then sends a file without a name and without a byte."""

    async def send(name: str, content: str) -> httpx2.Response:
        parts = [f'name="{field}"\r\n\r\n{value}' for field, value in FORM.items()]
        parts += [f'name="{field}"; filename="{file}"\r\n\r\n{body}' for field, file, body in (
            ("model", "model.onnx", "model bytes"), ("ref_images[]", name, content),
        )]  # fmt: skip
        form = "".join(f"--x\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--x--\r\n"
        headers = {"content-type": "multipart/form-data; boundary=x"}
        return await client.post("/api/v1/jobs", content=form, headers=headers)

    answer = await send("", "")
    assert (answer.status_code, answer.json()["input"]["ref_images_count"]) == (201, 0)
    for name, content in (("a.png", ""), ("", "no picture")):
        problem(await send(name, content), 422, "bad_reference_images")


async def test_a_tflite_model_is_taken_where_workers_can_read_it(settings: Settings, make_key: MakeKey) -> None:
    key = await make_key(scopes=SCOPES)
    able = settings.model_copy(update={"conversion_tflite": True})
    async with serving(able) as running, client_of(running.url, key.text) as client:
        assert (await send(client, name="model.tflite")).status_code == 201


async def test_a_reference_image_that_is_none_is_refused_by_the_endpoint(
    client: httpx2.AsyncClient, api: Running
) -> None:
    files = [("model", ("a.onnx", b"model")), ("ref_images[]", ("a.png", b"MZ no picture"))]
    answer = await client.post("/api/v1/jobs", data=FORM, files=files)
    assert (answer.status_code, answer.json()["code"]) == (422, "bad_reference_images")
    assert await objects(api) == []


async def test_reference_images_are_stored_as_an_archive_in_their_order(
    api: Running, client: httpx2.AsyncClient
) -> None:
    job = (await send(client, images=3)).json()
    data = await api.services.store.fetch_bytes(f"jobs/{job['job_id']}/input/references.tar", max_bytes=100_000)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["000", "001", "002"]
        assert [archive.extractfile(name).read() for name in archive.getnames()] == [PICTURE] * 3  # type: ignore[union-attr]  # they are files


CUT = b'--b\r\nContent-Disposition: form-data; name="model"; filename="a.onnx"\r\n\r\nhalf'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data; boundary=b", CUT),
        ("multipart/form-data; boundary=b", b"no boundary at all"),
        ("multipart/form-data", CUT),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n--b--\r\n"),
        ("multipart/form-data; boundary=" + "b" * 300, CUT),
    ],
    ids=["cut", "no parts", "no boundary named", "endless headers", "a long boundary"],
)
async def test_what_is_no_form_is_told_so_and_leaves_nothing_behind(
    api: Running, client: httpx2.AsyncClient, kind: str, body: bytes
) -> None:
    answer = await client.post("/api/v1/jobs", content=body, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert await objects(api) == []


@pytest.mark.parametrize("name", ["a\"b;'.onnx", "x\r\nSet-Cookie: y.onnx", "模型\u202e.onnx", "../../etc/passwd.onnx"])
async def test_a_strange_file_name_is_cleaned_and_no_part_of_a_key(client: httpx2.AsyncClient, name: str) -> None:
    answer = await send(client, name=name)
    assert answer.status_code == 201
    job = answer.json()
    assert job["source_filename"].isprintable()
    assert job["input"]["object_key"] == f"jobs/{job['job_id']}/input/model"


async def test_a_repeated_request_with_its_key_gets_the_first_answer_and_stores_nothing_twice(
    api: Running, client: httpx2.AsyncClient, rows: Connection
) -> None:
    first = await send(client, key="k1")
    before = await objects(api)
    again = await send(client, key="k1")
    assert (again.status_code, again.json()) == (201, first.json())
    assert await objects(api) == before
    other = await send(client, key="k1", user_id="u2")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert await objects(api) == before
    assert await count(rows, "conversion") == 1


async def test_polling_costs_a_304_until_something_changes(client: httpx2.AsyncClient, rows: Connection) -> None:
    path = (await send(client)).headers["Location"]
    first = await client.get(path)
    assert first.headers["Retry-After"] == "1"
    same = await client.get(path, headers={"If-None-Match": first.headers["ETag"]})
    assert (same.status_code, same.content) == (304, b"")
    job_id = UUID(first.json()["job_id"])
    hint = await rows.fetchval("SELECT id FROM task WHERE job_id = $1 AND status = 'pending'", job_id)
    await claims.claim(rows, TERMS, [hint])
    changed = await client.get(path, headers={"If-None-Match": first.headers["ETag"]})
    assert (changed.status_code, changed.json()["status"]) == (200, "running")


async def test_a_known_state_is_a_304_however_the_tag_is_written(client: httpx2.AsyncClient) -> None:
    path = (await send(client)).headers["Location"]
    tag = (await client.get(path)).headers["ETag"]
    for known in (f"W/{tag}", f'"another", {tag}', "*"):
        assert (await client.get(path, headers={"If-None-Match": known})).status_code == 304


async def test_events_stream_to_the_end_and_resume(
    client: httpx2.AsyncClient, rows: Connection, api: Running, make_key: MakeKey
) -> None:
    path = (await send(client)).headers["Location"]
    job_id = UUID(path.rpartition("/")[2])
    await jobs.request_cancel(rows, [job_id], "acme", reason="", by="test")
    text = (await client.get(f"{path}/events")).text
    told = [orjson.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [one["seq"] for one in told] == list(range(1, len(told) + 1))
    assert (told[0]["status"], told[-1]["status"]) == ("created", "failed")
    rest = (await client.get(f"{path}/events", headers={"Last-Event-ID": str(len(told) - 1)})).text
    assert rest.count("data: ") == 1
    assert (await client.get(f"{path}/events", headers={"Last-Event-ID": str(len(told))})).status_code == 204
    stranger = await make_key("other", scopes=SCOPES)
    async with client_of(api.url, stranger.text) as other:
        problem(await other.get(f"{path}/events"), 404, "job_not_found")


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


def test_a_file_name_cannot_break_out_of_its_header() -> None:
    said = disposition('a"b\r\nc模型.onnx', "nef")
    assert said == "attachment; filename=\"a_b__c__.nef\"; filename*=UTF-8''a%22b%0D%0Ac%E6%A8%A1%E5%9E%8B.nef"


async def test_a_form_that_takes_too_long_is_refused_and_leaves_nothing_behind(
    api: Running, client: httpx2.AsyncClient, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "MAX_SECONDS", 0.0)
    answer = await send(client)
    assert (answer.status_code, answer.json()["code"]) == (408, "body_too_slow")
    assert answer.headers["Connection"] == "close"  # the rest of the form is not read
    assert await objects(api) == []
    for table in ("job", "upload"):
        assert await count(rows, table) == 0, table


async def look_at_uploads(api: Running, rows: Connection, store: Any) -> list[Due]:
    """What housekeeping does an hour after an upload began. Returns the uploads that it has looked at."""

    async def too_large(*_arguments: object) -> None:
        raise AssertionError("a prefix has no object of its own")

    await rows.execute("UPDATE upload SET look_at = clock_timestamp() - interval '1 s'")
    due = await uploads.due(rows)
    for one in due:
        with suppress(StoreUnavailable):
            await uploads.inspect(api.services.pool.acquire, store, one, too_large)
    return due


class AwayStore:
    """A store that goes away before it deletes anything."""

    async def abort_uploads(self, prefix: str) -> int:
        raise StoreUnavailable(prefix)


@pytest.mark.parametrize("store", [None, AwayStore()], ids=["deleted", "being deleted"])
async def test_a_form_whose_files_housekeeping_takes_is_refused_and_no_job_lacks_its_files(
    api: Running, client: httpx2.AsyncClient, rows: Connection, monkeypatch: pytest.MonkeyPatch, store: Any
) -> None:
    """The database was away for so long that housekeeping takes the API process for dead."""
    create = rows_of_conversions.create

    async def create_late(*arguments: Any) -> Any:
        # In a context of its own: the request holds a connection, and housekeeping speaks to the store.
        housekeeping = look_at_uploads(api, rows, store or api.services.store)
        assert len(await asyncio.create_task(housekeeping, context=Context())) == 1
        return await create(*arguments)

    monkeypatch.setattr(rows_of_conversions, "create", create_late)
    problem(await send(client, images=2, key="order-1"), 408, "body_too_slow")
    for table in ("job", "upload"):
        assert await count(rows, table) == 0, table
    assert await objects(api) == []
    monkeypatch.undo()
    assert (await send(client, images=2, key="order-1")).status_code == 201


async def test_the_files_of_a_job_that_was_written_at_the_last_moment_stay(
    api: Running, client: httpx2.AsyncClient, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Housekeeping has read the row of the upload before the job was written."""
    create, due = rows_of_conversions.create, list[Due]()

    async def create_late(*arguments: Any) -> Any:
        await rows.execute("UPDATE upload SET look_at = clock_timestamp() - interval '1 s'")
        due.extend(await uploads.due(rows))
        return await create(*arguments)

    async def too_large(*_arguments: object) -> None:
        raise AssertionError("a prefix has no object of its own")

    monkeypatch.setattr(rows_of_conversions, "create", create_late)
    job = (await send(client, images=2)).json()
    (one,) = due
    await uploads.inspect(api.services.pool.acquire, api.services.store, one, too_large)
    assert await api.services.store.fetch_bytes(job["input"]["object_key"], max_bytes=100) == b"model bytes"


async def test_a_model_that_cannot_be_stored_leaves_the_database_clean(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    """The store comes first, so there is nothing to take back: its user may send again at once."""
    key = await make_key(scopes=SCOPES)
    without = settings.model_copy(update={"s3_endpoint": "http://127.0.0.1:1"})
    async with serving(without) as api, client_of(api.url, key.text) as client:
        answer = await send(client)
        assert (answer.status_code, answer.json()["code"]) == (502, "store_unavailable")
    for table in ("conversion", "job", "task", "outbox", "idempotency"):
        assert await count(rows, table) == 0, table
    async with serving(settings) as api, client_of(api.url, key.text) as client:
        assert (await send(client)).status_code == 201


async def test_with_the_vendors_toolchain_the_hardware_is_simulated_and_no_layer_can_stay_float(
    settings: Settings, make_key: MakeKey
) -> None:
    key = await make_key(scopes=SCOPES)
    vendors = settings.model_copy(update={"conversion_toolchain": "kneron"})
    async with serving(vendors) as api, client_of(api.url, key.text) as client:
        answer = await send(client, accuracy_guard="true")
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        assert "accuracy_guard" in answer.json()["detail"]
        answer = await send(client, enable_sim_hw="true")
        assert answer.status_code == 201
        assert answer.json()["parameters"]["toolchain"] == "kneron"
        assert answer.json()["parameters"]["accuracy_guard"] is False


async def test_the_record_has_every_field_of_the_requirement(client: httpx2.AsyncClient, rows: Connection) -> None:
    """Section 3 of the converter's text, while its second step runs."""
    sent = (await send(client, tenant_id="someone")).json()
    path = f"/api/v1/jobs/{sent['job_id']}"
    for step in ("onnx", "bie"):
        task = await rows.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = $2", UUID(sent["job_id"]), step)
        (claimed,) = await claims.claim(rows, TERMS, [task])
        if step == "onnx":
            key = f"jobs/{sent['job_id']}/output/out.onnx"
            made = Output("output/out.onnx", key, 1, "0" * 64, "application/octet-stream")
            await settlements.complete(rows, [Completion(claimed.lease, [made])])
    job = (await client.get(path)).json()
    assert job.keys() >= {
        "job_id", "created_at", "updated_at", "status", "stage", "progress", "parameters", "output",
        "result_object_keys", "error", "origin", "user_id", "tenant_id", "created_by_client_id", "source_filename",
        "input", "stage_timings", "stage_progress", "expires_at", "metadata", "promoted", "promoted_object_keys",
    }  # fmt: skip
    assert (job["status"], job["stage_status"], job["stage"], job["progress"]) == ("running", "BIE", "bie", 33)
    assert job["parameters"].keys() >= {
        "model_id", "version", "platform", "enable_evaluate", "enable_sim_fp", "enable_sim_fixed", "enable_sim_hw",
    }  # fmt: skip
    assert job["result_object_keys"] == {"onnx": key, "bie": None, "nef": None}
    assert job["output"] == {"onnx_path": key, "bie_path": None, "nef_path": None}
    assert (job["tenant_id"], job["source_filename"], job["promoted"]) == ("someone", "model.onnx", False)
    assert job["input"].keys() >= {"filename", "object_key", "size_bytes", "ref_images_count"}
    timings = job["stage_timings"]
    assert timings["onnx"]["started_at"] <= timings["onnx"]["completed_at"] <= timings["bie"]["started_at"]
    assert (timings["bie"]["completed_at"], timings["nef"]) == (None, None)
