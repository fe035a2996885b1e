"""What clients send to the store is bounded, whatever they declare, and goes when it is refused or left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, tzinfo
from typing import Self
from uuid import UUID

import httpx2
import pytest

from leasehold.db.database import Connection, lock_name
from leasehold.limits import upload_room, uploads
from leasehold.pipelines import SHIPPED
from leasehold.pipelines.media.housekeeping import forget_jobless_pictures, jobless_pictures
from leasehold.pipelines.media.transitions import extend_upload
from leasehold.settings import Settings
from leasehold.storage import store
from leasehold.worker.maintenance.housekeeping import Housekeeping
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.media_api import JPEG, PNG, MediaApi, problem, put
from tests.api.test_conversion import FORM
from tests.support.bucket import Bucket
from tests.support.inspections import inspect_during

MIB = 1024 * 1024
LARGE = JPEG + bytes(3 * MIB)
SCOPES = ("media:write", "media:read", "conversion:write", "generation:write")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"picture_max_bytes": 2 * MIB, "upload_unfinished_bytes": 6 * MIB})


@pytest.fixture
async def client(api: Running, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(api.url, (await make_key(scopes=SCOPES)).text) as opened:
        yield opened


async def keep_house(api: Running) -> None:
    services = api.services
    house = Housekeeping(services.settings, services.pool.acquire, services.store, SHIPPED)
    while await house.uploads():
        pass
    async with services.pool.acquire() as connection:
        jobless = await jobless_pictures(connection)
        await forget_jobless_pictures(connection, [media_id for media_id, _ in jobless])


async def forget_expired_jobs(api: Running) -> None:
    services = api.services
    await Housekeeping(services.settings, services.pool.acquire, services.store, SHIPPED).retention()


async def later(rows: Connection, seconds: float) -> None:
    """As if so many seconds had passed."""
    gone = timedelta(seconds=seconds)
    await rows.execute(
        "UPDATE upload SET writable_until = writable_until - $1::interval, look_at = look_at - $1::interval,"
        " forget_at = forget_at - $1::interval",
        gone,
    )
    await rows.execute("UPDATE media SET expires_at = expires_at - $1::interval", gone)


# --- pictures


@pytest.mark.parametrize("data", [LARGE, PNG, b"", b"no picture"])
async def test_a_refused_object_is_deleted_by_the_call_that_refuses_it(
    media_api: MediaApi, s3: Bucket, data: bytes
) -> None:
    ticket = await media_api.upload(data)
    assert (await media_api.complete(ticket)).status_code == 422
    assert await s3.keys() == []


async def test_what_is_sent_to_a_refused_key_afterwards_goes_too(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection
) -> None:
    ticket = await media_api.upload(PNG)
    await media_api.complete(ticket)
    await put(ticket.upload_url, JPEG, "image/jpeg")
    await keep_house(api)
    assert await s3.keys() == []
    await put(ticket.upload_url, JPEG, "image/jpeg")
    await later(rows, 24 * 3600 + 301)
    await keep_house(api)
    assert await s3.keys() == []
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


async def test_an_object_that_is_too_large_goes_before_anybody_completes_it(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection
) -> None:
    ticket = await media_api.upload(LARGE)
    await later(rows, 61)
    await keep_house(api)
    assert await s3.keys() == []
    seen = (await media_api.look(ticket)).json()
    assert (seen["status"], seen["error"]["code"]) == ("FAILED", "too_large")
    problem(await media_api.complete(ticket), 422, "too_large")


async def test_an_upload_whose_client_gets_a_new_url_during_its_inspection_is_inspected_again_soon(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection
) -> None:
    """Else it would count nothing, and might be too large, for a day."""
    ticket = await media_api.ticket()
    await later(rows, 400)

    async def new_url() -> None:
        assert await extend_upload(rows, "acme", ticket.original_key, 300)

    await inspect_during(api.services, new_url)
    await put(ticket.upload_url, LARGE, "image/jpeg")
    await later(rows, 61)
    await keep_house(api)
    assert await s3.keys() == []
    assert (await media_api.look(ticket)).json()["error"]["code"] == "too_large"


async def test_an_object_that_is_refused_during_its_inspection_goes_soon(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection
) -> None:
    ticket = await media_api.upload()
    await later(rows, 400)

    async def refuse() -> None:
        await uploads.close(rows, "acme", ticket.original_key, keep=None)

    await inspect_during(api.services, refuse)
    await keep_house(api)
    assert await s3.keys() == []


async def test_a_picture_that_replaces_one_too_large_during_its_inspection_stays_once_it_is_completed(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection
) -> None:
    """Else the job that the client was answered would fail with `input_missing`."""
    ticket = await media_api.upload(LARGE)
    await later(rows, 61)

    async def replace_and_complete() -> None:
        await put(ticket.upload_url, JPEG, "image/jpeg")
        assert (await media_api.complete(ticket)).status_code == 202

    await inspect_during(api.services, replace_and_complete)
    for seconds in (61, 400, 24 * 3600):
        await later(rows, seconds)
        await keep_house(api)
    assert await s3.keys() == [ticket.original_key]


@pytest.mark.parametrize("more", [1, 2 * MIB - len(JPEG), 3 * MIB])
@pytest.mark.parametrize("seconds", [400, 24 * 3600 + 301])
async def test_an_original_that_is_overwritten_by_a_larger_one_after_its_completion_goes(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection, more: int, seconds: float
) -> None:
    """The tenant's stored bytes count the picture that was completed. `seconds`: a slow transfer may take a day."""
    ticket = await media_api.submitted()
    await put(ticket.upload_url, JPEG + bytes(more), "image/jpeg")
    await later(rows, seconds)
    await keep_house(api)
    assert await s3.keys() == []


@pytest.mark.parametrize("replacement", [JPEG, JPEG[:-1]], ids=["as large", "smaller"])
async def test_an_original_that_is_overwritten_by_one_that_is_not_larger_stays(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection, replacement: bytes
) -> None:
    """A client may have repeated its PUT because the store's answer was lost."""
    ticket = await media_api.submitted()
    await put(ticket.upload_url, replacement, "image/jpeg")
    for seconds in (400, 24 * 3600):
        await later(rows, seconds)
        await keep_house(api)
    assert await s3.keys() == [ticket.original_key]
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


async def test_an_original_that_was_completed_stays(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection
) -> None:
    tickets = [await media_api.submitted(), await media_api.upload(content_length=len(JPEG))]
    await media_api.complete(tickets[1])
    for seconds in (61, 400, 24 * 3600):
        await later(rows, seconds)
        await keep_house(api)
    assert sorted(await s3.keys()) == sorted(ticket.original_key for ticket in tickets)
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


@pytest.mark.parametrize("content_length", [None, len(JPEG)])
@pytest.mark.parametrize("deletes", ["the picture", "its job"])
async def test_what_is_sent_to_a_deleted_picture_afterwards_goes_too(
    api: Running, s3: Bucket, rows: Connection, make_key: MakeKey, deletes: str, content_length: int | None
) -> None:
    key = await make_key(scopes=("media:write", "media:read", "jobs:delete"))
    async with client_of(api.url, key.text) as client:
        ticket = await MediaApi(client).upload(content_length=content_length)
        job_id = (await MediaApi(client).complete(ticket)).json()["job_id"]
        path = f"/media/{ticket.media_id}" if deletes == "the picture" else f"/v1/jobs/{job_id}"
        assert (await client.delete(path)).status_code == 204
    await forget_expired_jobs(api)
    assert await rows.fetchval("SELECT count(*) FROM media") == 0
    assert (await put(ticket.upload_url, JPEG, "image/jpeg")).status_code == 200  # the URL lives on for a while
    await later(rows, 48 * 3600)
    await keep_house(api)
    assert await s3.keys() == []
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


async def test_a_picture_that_is_deleted_when_its_url_is_long_dead_leaves_no_key_to_look_at(
    media_api: MediaApi, api: Running, rows: Connection
) -> None:
    ticket = await media_api.upload(content_length=len(JPEG))
    await media_api.complete(ticket)
    await rows.execute("UPDATE media SET created_at = created_at - interval '49 hours'")
    await media_api.client.delete(f"/media/{ticket.media_id}")
    await forget_expired_jobs(api)
    assert await rows.fetchval("SELECT count(*) FROM media") == 0
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


async def test_an_upload_that_nobody_completes_is_gone_within_the_hour_and_what_arrives_later_too(
    media_api: MediaApi, api: Running, s3: Bucket, rows: Connection
) -> None:
    ticket = await media_api.upload()
    left = await rows.fetchval("SELECT expires_at - clock_timestamp() FROM media")
    assert left < timedelta(hours=1)
    await later(rows, 3600)
    jobless = await jobless_pictures(rows)
    await api.services.store.delete(*(key for _, key in jobless))
    await keep_house(api)
    assert await s3.keys() == []
    await put(ticket.upload_url, JPEG, "image/jpeg")  # as one that began in time, and was slow
    await later(rows, 24 * 3600)
    await keep_house(api)
    assert await s3.keys() == []


async def test_a_repeated_request_gets_no_new_url_for_a_media_that_is_forgotten(
    media_api: MediaApi, api: Running, rows: Connection
) -> None:
    body, headers = {"content_type": "image/jpeg", "file_name": "a.jpg"}, {"Idempotency-Key": "k"}
    first = await media_api.client.post("/upload-url", json=body, headers=headers)
    await rows.execute("UPDATE idempotency SET expires_at = expires_at - interval '301 seconds'")
    await later(rows, 301)
    await media_api.client.post("/upload-url", json=body, headers=headers)
    assert await rows.fetchval("SELECT writable_until > clock_timestamp() + interval '200 s' FROM upload")
    await later(rows, 3600)
    await keep_house(api)
    third = await media_api.client.post("/upload-url", json=body, headers=headers)
    assert third.json() == first.json()


# --- how much a tenant may have unfinished


async def test_a_tenants_unfinished_bytes_are_bounded_as_declared_or_at_the_most_they_may_be(
    media_api: MediaApi, api: Running, rows: Connection, make_key: MakeKey
) -> None:
    for _ in range(2):
        await media_api.ticket()
    await media_api.ticket(content_length=100)  # counts a megabyte
    refused = await media_api.ask()
    problem(refused, 429, "upload_quota_exceeded")
    assert refused.headers["Retry-After"] == "60"
    small = await media_api.upload(content_length=len(JPEG))
    problem(await media_api.ask(content_length=100), 429, "upload_quota_exceeded")
    assert (await media_api.complete(small)).status_code == 202
    await media_api.ticket(content_length=100)
    async with client_of(api.url, (await make_key("rival")).text) as rival:
        await MediaApi(rival).ticket()


async def test_what_nobody_sent_counts_no_longer_when_its_url_is_dead(
    media_api: MediaApi, api: Running, rows: Connection
) -> None:
    tickets = [await media_api.ticket() for _ in range(3)]
    await put(tickets[0].upload_url, JPEG + bytes(2 * MIB - len(JPEG)), "image/jpeg")
    problem(await media_api.ask(), 429, "upload_quota_exceeded")
    await later(rows, 400)
    await keep_house(api)
    await media_api.ticket()
    problem(await media_api.ask(), 429, "upload_quota_exceeded")


async def test_what_gets_a_new_url_counts_again_and_gets_none_beside_the_bound(
    media_api: MediaApi, api: Running, rows: Connection
) -> None:
    body = {"content_type": "image/jpeg", "file_name": "a.jpg"}

    async def ask(key: str) -> httpx2.Response:
        return await media_api.client.post("/upload-url", json=body, headers={"Idempotency-Key": key})

    first = {key: (await ask(key)).json() for key in "abc"}
    await rows.execute("UPDATE idempotency SET expires_at = expires_at - interval '301 seconds'")
    await later(rows, 400)
    await keep_house(api)  # nobody has sent anything: each counts a megabyte
    await media_api.ticket(content_length=100)
    for key in "ab":
        assert (await ask(key)).json()["media_id"] == first[key]["media_id"]
    problem(await ask("c"), 429, "upload_quota_exceeded")
    sizes = await rows.fetch("SELECT bytes FROM upload WHERE writable_until > clock_timestamp() ORDER BY bytes")
    assert [row["bytes"] for row in sizes] == [100, 2 * MIB, 2 * MIB]
    problem(await media_api.ask(content_length=100), 429, "upload_quota_exceeded")


async def test_requests_at_once_do_not_exceed_the_bound(media_api: MediaApi) -> None:
    answers = await asyncio.gather(*(media_api.ask() for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 5


async def test_far_from_its_bound_a_tenant_s_uploads_do_not_wait_for_one_another(
    settings: Settings, make_key: MakeKey, rows: Connection
) -> None:
    roomy = settings.model_copy(update={"upload_unfinished_bytes": 160 * MIB})
    async with serving(roomy) as running, client_of(running.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        async with rows.transaction():
            await lock_name(rows, "uploads:acme")
            for _ in range(20):
                await media_api.ticket(content_length=2 * MIB)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await media_api.ticket(content_length=2 * MIB)


async def test_what_another_process_has_let_in_is_known_a_second_later(
    settings: Settings, make_key: MakeKey, rows: Connection
) -> None:
    small = settings.model_copy(update={"upload_unfinished_bytes": 40 * MIB})
    key = (await make_key()).text
    async with (
        serving(small) as first,
        serving(small) as second,
        client_of(first.url, key) as one,
        client_of(second.url, key) as other,
    ):
        await MediaApi(one).ticket(content_length=2 * MIB)
        for _ in range(18):
            await MediaApi(other).ticket(content_length=2 * MIB)
        await asyncio.sleep(upload_room.FRESH_SECONDS)
        await MediaApi(one).ticket(content_length=2 * MIB)
        problem(await MediaApi(one).ask(content_length=2 * MIB), 429, "upload_quota_exceeded")


async def test_what_a_process_has_counted_exactly_stays_counted(
    settings: Settings, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large upload is counted exactly. The small ones after it, which are not, do not exceed the bound with it."""
    monkeypatch.setattr(upload_room, "FRESH_SECONDS", 3600.0)
    large = settings.model_copy(update={"picture_max_bytes": 36 * MIB, "upload_unfinished_bytes": 40 * MIB})
    async with serving(large) as running, client_of(running.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        await media_api.ticket(content_length=2 * MIB)
        await media_api.ticket(content_length=32 * MIB)
        for _ in range(3):
            await media_api.ticket(content_length=2 * MIB)
        problem(await media_api.ask(content_length=2 * MIB), 429, "upload_quota_exceeded")


async def test_an_installation_may_want_every_length_declared(settings: Settings, make_key: MakeKey) -> None:
    strict = settings.model_copy(update={"upload_require_length": True})
    async with serving(strict) as running, client_of(running.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        problem(await media_api.ask(), 422, "content_length_required")
        ticket = await media_api.upload(content_length=len(JPEG))
        assert (await put(ticket.upload_url, LARGE, "image/jpeg")).status_code == 403


# --- forms


async def test_a_form_of_a_conversion_is_in_the_room_that_the_process_remembers(
    client: httpx2.AsyncClient, api: Running, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_room, "FRESH_SECONDS", 3600.0)
    room = api.services.admission.upload_room
    assert await room.reserve(rows, "acme", 0)
    for _ in range(2):  # each counts a MiB, and a quarter of 6 MiB needs no exact count
        await client.post("/api/v1/jobs", data=FORM, files={"model": ("m.onnx", b"x")})
    assert not await room.reserve(rows, "acme", 0)


async def test_a_conversion_whose_api_died_while_it_received_leaves_nothing(
    client: httpx2.AsyncClient, api: Running, s3: Bucket, rows: Connection
) -> None:
    job_id = UUID(int=1)
    async with api.services.pool.acquire() as connection, connection.transaction():
        await uploads.open_upload(
            connection,
            api.services.settings,
            "acme",
            f"jobs/{job_id}/input/",
            counted_bytes=MIB,
            at_most=MIB,
            seconds=3000,
            room=api.services.admission.upload_room,
        )
    await api.services.store.put(f"jobs/{job_id}/input/model", b"x", content_type="a/b", metadata={})
    async with s3.client() as raw:
        made = await raw.create_multipart_upload(Bucket=s3.bucket, Key=f"jobs/{job_id}/input/references.tar")
        part = {"Bucket": s3.bucket, "Key": made["Key"], "UploadId": made["UploadId"]}
        await raw.upload_part(**part, PartNumber=1, Body=bytes(5 * MIB))  # type: ignore[arg-type]  # as made above
        await later(rows, 3600)
        await keep_house(api)
        assert await s3.keys() == []
        with pytest.raises(raw.exceptions.ClientError):
            await raw.list_parts(**part)  # type: ignore[arg-type]  # as made above


@pytest.mark.parametrize(
    ("form", "files", "status"),
    [
        (FORM, {"model": ("a.onnx", bytes(MIB))}, 201),
        (FORM | {"model_id": "0"}, {"model": ("a.onnx", bytes(MIB))}, 422),
        (FORM, {"model": ("a.txt", bytes(MIB))}, 422),
        (FORM, {"model": ("a.onnx", bytes(7 * MIB))}, 429),
    ],
)
async def test_a_conversions_form_counts_while_it_comes_and_not_after(
    client: httpx2.AsyncClient,
    s3: Bucket,
    rows: Connection,
    form: dict[str, str],
    files: dict[str, object],
    status: int,
) -> None:
    answer = await client.post("/api/v1/jobs", data=form | {"user_id": "u"}, files=files)  # type: ignore[arg-type]  # as httpx2 takes them
    assert answer.status_code == status
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0
    assert len(await s3.keys()) == (2 if status == 201 else 0)


async def test_multipart_uploads_of_dead_writers_are_given_up(api: Running, s3: Bucket) -> None:
    async with s3.client() as raw:
        made = await raw.create_multipart_upload(Bucket=s3.bucket, Key="jobs/a/output/big")
        part = {"Bucket": s3.bucket, "Key": made["Key"], "UploadId": made["UploadId"]}
        assert await api.services.store.abort_uploads("jobs/", older_than=timedelta(hours=1)) == 0
        await raw.list_parts(**part)  # type: ignore[arg-type]  # as made above
        assert await api.services.store.abort_uploads("media/") == 0
        assert await api.services.store.abort_uploads("jobs/") == 1
        with pytest.raises(raw.exceptions.ClientError):
            await raw.list_parts(**part)  # type: ignore[arg-type]  # as made above


@pytest.mark.parametrize(("hours", "left"), [(3, 1), (44, 1), (72, 0)])
async def test_a_large_output_may_take_as_long_as_a_slow_network_needs(
    api: Running, s3: Bucket, monkeypatch: pytest.MonkeyPatch, hours: int, left: int
) -> None:
    """8 GiB take more than two hours at one MiB a second. Housekeeping ended each upload that began an hour before."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(hours=hours)

    monkeypatch.setattr(store, "datetime", Later)
    async with s3.client() as raw:
        await raw.create_multipart_upload(Bucket=s3.bucket, Key="jobs/a/output/big")
        await uploads.abort_dead_uploads(api.services.store)
        answer = await raw.list_multipart_uploads(Bucket=s3.bucket)
    assert len(answer.get("Uploads", [])) == left


async def test_a_form_of_source_images_that_is_refused_keeps_none_of_them(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    kept = await client.post("/v1/upload/images", files=[("image", ("a.jpg", JPEG))])
    assert kept.status_code == 200
    refused = await client.post(
        "/v1/upload/images", files=[("image", ("a.jpg", JPEG)), ("image", ("b.png", PNG)), ("image", ("c.txt", b"no"))]
    )
    assert refused.status_code == 422
    due = await rows.fetch("SELECT key, expires_at < clock_timestamp() AS over FROM source_image")
    assert sorted((row["key"].rpartition(".")[2], row["over"]) for row in due) == [("jpg", False), ("png", True)]


async def test_only_unfinished_uploads_of_the_tenant_take_its_room_and_each_takes_the_least_at_least(
    rows: Connection,
) -> None:
    large = 5 * upload_room.LEAST_COUNTED
    for key, tenant, is_open, size in (("a", "t", True, 1), ("b", "t", True, large), ("c", "t", False, large),
                                       ("d", "u", True, large)):  # fmt: skip
        await rows.execute(
            "INSERT INTO upload (key, tenant_id, open, exact, bytes, most, writable_until, look_at, forget_at)"
            " VALUES ($1, $2, $3, true, $4, $4, now(), now(), now())",
            key, tenant, is_open, size,
        )  # fmt: skip
    assert await upload_room.count(rows, "t") == upload_room.LEAST_COUNTED + large
