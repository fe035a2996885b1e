"""Getting an upload URL, and completing the upload."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from pydantic import SecretStr

from leasehold.api.media import uploads
from leasehold.api.media.inspection import inspect_upload
from leasehold.db.database import Connection
from leasehold.pipelines.media import transitions
from leasehold.pipelines.media.pipeline import media
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob
from tests import heif
from tests.api.conftest import MakeKey, Running, client_of, count, serving
from tests.api.media_api import JPEG, PNG, MediaApi, Ticket, problem, put


async def test_an_upload_url_comes_with_all_that_is_needed_to_use_it(media_api: MediaApi, settings: Settings) -> None:
    answer = await media_api.ask()
    said = answer.json()
    assert answer.status_code == 201
    assert said["original_key"] == f"media/{said['media_id']}/original.jpg"
    assert said["expires_in"] == settings.upload_url_seconds
    assert UUID(said["media_id"]).version == 7
    assert answer.headers["location"] == f"/media/{said['media_id']}"
    assert (await put(said["upload_url"], JPEG, "image/jpeg")).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "extension"),
    [
        ("image/jpeg", "jpg"),
        ("image/png", "png"),
        ("image/webp", "webp"),
        ("image/gif", "gif"),
        ("image/avif", "avif"),
        ("image/tiff", "tif"),
        ("image/bmp", "bmp"),
    ],
)
async def test_each_accepted_kind_has_its_extension(media_api: MediaApi, content_type: str, extension: str) -> None:
    ticket = await media_api.ticket(content_type=content_type)
    assert ticket.original_key.endswith(f"/original.{extension}")


@pytest.mark.parametrize("content_type", ["image/heic-sequence", "image/svg+xml", "text/html", "IMAGE/JPEG", ""])
async def test_a_kind_that_is_not_accepted_gets_no_url(
    media_api: MediaApi, rows: Connection, content_type: str
) -> None:
    problem(await media_api.ask(content_type=content_type), 422, "unsupported_content_type")
    assert await count(rows, "media") == 0


@pytest.mark.parametrize("content_type", ["image/heic", "image/heif"])
async def test_heic_is_taken_where_workers_can_decode_it(
    settings: Settings, make_key: MakeKey, content_type: str
) -> None:
    key = await make_key()
    for able in (True, False):
        with_or_without = settings.model_copy(update={"picture_heic": able})
        async with serving(with_or_without) as api, client_of(api.url, key.text) as client:
            media_api = MediaApi(client)
            if able:
                ticket = await media_api.upload(heif.of(heif.CORNERS), content_type)
                assert ticket.original_key.endswith("/original.heic" if content_type == "image/heic" else ".heif")
                assert (await media_api.complete(ticket)).status_code == 202
            else:
                problem(await media_api.ask(content_type=content_type), 422, "unsupported_content_type")


async def test_a_picture_that_says_it_is_too_large_gets_no_url(media_api: MediaApi, settings: Settings) -> None:
    problem(await media_api.ask(content_length=settings.picture_max_bytes + 1), 422, "too_large")


async def test_the_url_refuses_another_content_type(media_api: MediaApi) -> None:
    ticket = await media_api.ticket()
    assert (await put(ticket.upload_url, PNG, "image/png")).status_code == 403


async def test_the_url_refuses_another_length_than_the_one_it_was_asked_for(media_api: MediaApi) -> None:
    ticket = await media_api.ticket(content_length=len(JPEG))
    assert (await put(ticket.upload_url, JPEG + b"more", "image/jpeg")).status_code == 403
    assert (await put(ticket.upload_url, JPEG, "image/jpeg")).status_code == 200


async def test_a_file_name_is_kept_for_people_and_cleaned(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.ticket(file_name="../\u202egpj.\x00exe\n" + "e\u0301" * 300)
    name: str = await rows.fetchval("SELECT file_name FROM media WHERE id = $1", UUID(ticket.media_id))
    assert name.startswith("../gpj.exeé")
    assert len(name.encode()) <= 255
    assert ticket.original_key == f"media/{ticket.media_id}/original.jpg"


async def test_a_completed_upload_becomes_a_job_with_its_limits_and_its_trace(
    media_api: MediaApi, rows: Connection, settings: Settings
) -> None:
    ticket = await media_api.upload()
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    answer = await media_api.client.post(
        "/complete-upload",
        json=ticket.completion | {"variants": ["avif", "thumb"], "priority": "high"},
        headers={"X-Request-Id": "my-request", "traceparent": trace},
    )
    assert answer.status_code == 202
    job = await rows.fetchrow("SELECT * FROM job")
    assert job is not None
    assert answer.json() == {"status": "PROCESSING", "media_id": ticket.media_id, "job_id": str(job["id"])}
    assert job["tenant_id"] == "acme"
    assert job["inputs"] == {"original": ticket.original_key}
    assert job["output_prefix"] == f"media/{ticket.media_id}"
    assert job["priority"] == 0
    assert job["trace"] == {
        "request_id": "my-request", "traceparent": trace, "media_id": ticket.media_id, "tenant": job["tenant_id"]
    }  # fmt: skip
    assert job["params"]["variants"] == ["thumb", "avif"]
    assert job["params"]["content_type"] == "image/jpeg"
    assert job["params"]["limits"]["max_pixels"] == settings.picture_max_pixels
    media = await rows.fetchrow("SELECT status, size, expires_at FROM media")
    assert media is not None
    assert tuple(media) == ("UPLOADED", len(JPEG), None)


async def test_completing_three_times_gives_the_same_answer_and_one_job(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.upload()
    answers = [await media_api.complete(ticket) for _ in range(3)]
    await assert_one_job(rows, answers)


async def test_completing_ten_times_at_once_gives_the_same_answer_and_one_job(
    media_api: MediaApi, rows: Connection
) -> None:
    ticket = await media_api.upload()
    answers = await asyncio.gather(*(media_api.complete(ticket) for _ in range(10)))
    await assert_one_job(rows, answers)


async def test_a_request_that_another_one_was_faster_than_is_not_charged(
    settings: Settings, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await make_key()
    limited = settings.model_copy(update={"submissions_per_tenant": 2})
    async with serving(limited) as api, client_of(api.url, key.text) as client:
        media_api = MediaApi(client)
        ticket, other_ticket = await media_api.upload(), await media_api.upload()

        async def inspect_after_another_request(*arguments: Any) -> object:
            monkeypatch.undo()
            assert (await media_api.complete(ticket)).status_code == 202
            return await inspect_upload(*arguments)

        monkeypatch.setattr(uploads, "inspect_upload", inspect_after_another_request)
        assert (await media_api.complete(ticket)).status_code == 202
        assert (await media_api.complete(other_ticket)).status_code == 202


async def test_of_a_completion_and_a_refusal_the_first_counts(media_api: MediaApi, rows: Connection) -> None:
    """Two requests may have inspected the object at once, and a client may have replaced it between them."""
    completed, refused = await media_api.submitted(), await media_api.ticket()
    error = {"code": "empty_file", "message": "The file is empty.", "retryable": False}

    async def refuse(ticket: Ticket) -> bool:
        return await transitions.refuse_upload(rows, UUID(ticket.media_id), "acme", error=error, keep=timedelta(days=1))

    assert not await refuse(completed)
    assert await refuse(refused)
    assert not await refuse(refused)
    job = NewJob(media, "acme", params={}, inputs={"original": refused.original_key}, output_prefix="media/x")
    assert await transitions.complete_upload(rows, UUID(refused.media_id), "acme", 1, job) is None
    found = await rows.fetch("SELECT id, status FROM media")
    assert {str(row["id"]): row["status"] for row in found} == {
        completed.media_id: "UPLOADED", refused.media_id: "FAILED"
    }  # fmt: skip


async def assert_one_job(rows: Connection, answers: list[httpx2.Response]) -> None:
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.text for answer in answers}) == 1
    assert await count(rows, "job") == 1
    steps = [row["step"] for row in await rows.fetch("SELECT step FROM task ORDER BY position")]
    assert steps == ["resize", "compress", "webp"]
    assert await rows.fetchval("SELECT count(*) FROM history WHERE kind = 'submitted'") == 1


async def test_completing_before_uploading_says_so_and_can_be_repeated_afterwards(media_api: MediaApi) -> None:
    ticket = await media_api.ticket()
    problem(await media_api.complete(ticket), 409, "upload_missing")
    await put(ticket.upload_url, JPEG, "image/jpeg")
    assert (await media_api.complete(ticket)).status_code == 202


async def test_another_key_than_the_one_given_out_is_refused(media_api: MediaApi, rows: Connection) -> None:
    mine, other = await media_api.upload(), await media_api.upload()
    problem(await media_api.complete(mine, original_key=other.original_key), 422, "wrong_key")
    assert await count(rows, "job") == 0
    assert (await media_api.complete(mine)).status_code == 202


async def test_an_unknown_media_cannot_be_completed(media_api: MediaApi) -> None:
    ticket = await media_api.ticket()
    problem(await media_api.complete(ticket, media_id=str(uuid4())), 404, "media_not_found")


async def test_another_tenants_media_cannot_be_completed(
    media_api: MediaApi, api: Running, make_key: MakeKey, rows: Connection
) -> None:
    ticket = await media_api.upload()
    async with client_of(api.url, (await make_key("rival")).text) as rival:
        problem(await MediaApi(rival).complete(ticket), 404, "media_not_found")
    assert await count(rows, "job") == 0


@pytest.mark.parametrize(
    ("data", "declared", "code"),
    [
        (b"", "image/jpeg", "empty_file"),
        (b"GIF and more" * 10, "image/jpeg", "unsupported_format"),
        (b"\xff\xd8", "image/jpeg", "unsupported_format"),
        (PNG, "image/jpeg", "mislabelled"),
    ],
)
async def test_a_bad_object_is_refused_and_the_media_says_why(
    media_api: MediaApi, rows: Connection, data: bytes, declared: str, code: str
) -> None:
    ticket = await media_api.upload(data, declared)
    said = problem(await media_api.complete(ticket), 422, code)
    seen = (await media_api.look(ticket)).json()
    assert seen["status"] == "FAILED"
    assert seen["error"] == {"code": code, "message": said["detail"], "retryable": False}
    assert await count(rows, "job") == 0


async def test_an_object_over_the_limit_is_refused_by_its_real_size(settings: Settings, make_key: MakeKey) -> None:
    small = settings.model_copy(update={"picture_max_bytes": len(JPEG) - 1})
    async with serving(small) as api, client_of(api.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        ticket = await media_api.upload()
        problem(await media_api.complete(ticket), 422, "too_large")
        assert (await media_api.look(ticket)).json()["error"]["code"] == "too_large"


async def test_a_refused_media_stays_refused_whatever_is_uploaded_afterwards(
    media_api: MediaApi, rows: Connection
) -> None:
    ticket = await media_api.upload(PNG)
    problem(await media_api.complete(ticket), 422, "mislabelled")
    await put(ticket.upload_url, JPEG, "image/jpeg")
    problem(await media_api.complete(ticket), 422, "mislabelled")
    assert await count(rows, "job") == 0


async def test_refusing_ten_times_at_once_gives_the_same_answer(media_api: MediaApi) -> None:
    ticket = await media_api.upload(PNG)

    async def complete() -> httpx2.Response:
        answer = await media_api.complete(ticket)
        if answer.status_code != 503:
            return answer
        problem(answer, 503, "store_unavailable")  # the tests' store cuts reads of an object that is deleted meanwhile
        return await media_api.complete(ticket)

    for answer in await asyncio.gather(*(complete() for _ in range(10))):
        problem(answer, 422, "mislabelled")


async def test_an_upload_that_was_forgotten_meanwhile_is_not_taken_in(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.upload()
    await rows.execute("UPDATE media SET expires_at = clock_timestamp() - interval '1 second'")
    problem(await media_api.complete(ticket), 409, "upload_expired")
    assert await count(rows, "job") == 0


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"variants": ["huge"]}, "#/variants/0"),
        ({"priority": "urgent"}, "#/priority"),
        ({"media_id": "no-id"}, "#/media_id"),
        ({"original_key": None}, "#/original_key"),
        ({"surprise": 1}, "#/surprise"),
    ],
)
async def test_a_wrong_field_is_pointed_at(media_api: MediaApi, change: dict[str, Any], pointer: str) -> None:
    ticket = await media_api.ticket()
    said = problem(await media_api.complete(ticket, **change), 422, "invalid_request")
    assert [error["pointer"] for error in said["errors"]] == [pointer]
    assert all(error["detail"] for error in said["errors"])


async def test_submissions_need_no_broker(settings: Settings, make_key: MakeKey, rows: Connection) -> None:
    nowhere = settings.model_copy(update={"amqp_url": SecretStr("amqp://guest:guest@127.0.0.1:1/")})
    async with serving(nowhere) as api, client_of(api.url, (await make_key()).text) as client:
        await MediaApi(client).submitted()
    # The hint waits in the outbox for a relay.
    assert await rows.fetchval("SELECT count(*) FROM outbox") == 1
    assert await rows.fetchval("SELECT status FROM job") == "queued"


async def test_the_hint_is_published_as_soon_as_the_job_is_written(
    media_api: MediaApi, api: Running, rows: Connection
) -> None:
    ticket = await media_api.submitted()
    while await count(rows, "outbox"):
        found = await media_api.look(ticket, params={"wait": 5})
        assert found.status_code == 200
    assert await count(rows, "outbox") == 0
