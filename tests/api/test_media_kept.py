"""How long a picture is kept, and that its client may delete it."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.pipelines import SHIPPED
from leasehold.pipelines.media.housekeeping import forget_jobless_pictures, forget_with_jobs, jobless_pictures
from leasehold.settings import Settings
from leasehold.transitions import claims, sweeps
from leasehold.worker.maintenance.housekeeping import Housekeeping
from tests.api.conftest import MakeKey, Running, client_of, count, serving
from tests.api.driver import TERMS, finish_all
from tests.api.media_api import JPEG, PNG, MediaApi, problem, put
from tests.support.bucket import Bucket


async def keep_house(api: Running) -> None:
    services = api.services
    house = Housekeeping(services.settings, services.pool.acquire, services.store, SHIPPED)
    await house.uploads()
    await house.turns_of_kinds()["abandoned_uploads"]()
    await house.retention()


@pytest.mark.parametrize("state", ["INIT", "sent", "refused", "waiting", "running", "READY"])
async def test_a_deleted_picture_is_gone_with_all_that_was_made_of_it_in_any_state(
    media_api: MediaApi, api: Running, rows: Connection, s3: Bucket, state: str
) -> None:
    ticket = await media_api.ticket()
    if state != "INIT":
        await put(ticket.upload_url, PNG if state == "refused" else JPEG, "image/jpeg")
    if state in ("refused", "waiting", "running", "READY"):
        await media_api.complete(ticket)
    if state == "running":
        (task,) = await rows.fetch("SELECT id FROM task WHERE step = 'resize'")
        (claimed,) = await claims.claim(rows, TERMS, [task["id"]])
    if state == "READY":
        await finish_all(rows, ticket.media_id)
        await api.services.store.put(f"media/{ticket.media_id}/final.webp", b"x", content_type="a/b", metadata={})
    deleted = await media_api.client.delete(f"/media/{ticket.media_id}")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert await s3.keys() == []
    problem(await media_api.look(ticket), 404, "media_not_found")
    problem(await media_api.client.delete(f"/media/{ticket.media_id}"), 404, "media_not_found")
    problem(await media_api.complete(ticket), 404, "media_not_found")
    problem(await media_api.client.get(f"/media/{ticket.media_id}/events"), 404, "media_not_found")
    await put(ticket.upload_url, JPEG, "image/jpeg")  # the URL lives on for a while
    if state == "running":
        assert await rows.fetchval("SELECT status FROM job") == "cancel_requested"
        await rows.execute("UPDATE job SET cancel_by = clock_timestamp() - interval '1 s'")
        await sweeps.end_cancels(rows, [], 5)
        assert claimed.lease.epoch == 1
    await keep_house(api)
    assert await s3.keys() == []
    assert (await count(rows, "media"), await count(rows, "job")) == (0, 0)


async def test_an_upload_that_may_still_be_completed_keeps_its_object(
    media_api: MediaApi, api: Running, s3: Bucket
) -> None:
    ticket = await media_api.upload()
    await keep_house(api)
    assert await s3.keys() == [ticket.original_key]
    assert (await media_api.complete(ticket)).status_code == 202


async def test_a_picture_that_is_refused_while_its_time_runs_out_still_says_why(
    media_api: MediaApi, api: Running, rows: Connection
) -> None:
    """Housekeeping has found it, and deletes its object first: meanwhile the client's call refuses the object."""
    ticket = await media_api.upload(PNG)
    await rows.execute("UPDATE media SET expires_at = clock_timestamp()")
    ((media_id, _),) = await jobless_pictures(rows)
    problem(await media_api.complete(ticket), 422, "mislabelled")
    await forget_jobless_pictures(rows, [media_id])
    assert (await media_api.look(ticket)).json()["status"] == "FAILED"


@pytest.mark.parametrize("is_completed", [False, True])
async def test_a_deleted_picture_leaves_its_room_at_once_and_no_late_object(
    media_api: MediaApi, rows: Connection, *, is_completed: bool
) -> None:
    """Before housekeeping forgets the picture itself: until then its upload would count as an unfinished one."""
    ticket = await (media_api.upload() if is_completed else media_api.ticket())
    if is_completed:
        await media_api.complete(ticket)
    await media_api.client.delete(f"/media/{ticket.media_id}")
    upload = await rows.fetchrow("SELECT open, bytes, most, look_at <= clock_timestamp() AS is_due FROM upload")
    assert upload is not None
    assert tuple(upload) == (False, 0, -1, True)


async def test_a_picture_stays_while_its_job_has_not_expired(media_api: MediaApi, rows: Connection) -> None:
    """Whoever forgets jobs names them, and may have read them before."""
    ticket = await media_api.submitted()
    await finish_all(rows, ticket.media_id)
    job_id = await rows.fetchval("SELECT job_id FROM media")
    await sweeps.forget_jobs(rows, [job_id], [forget_with_jobs])
    assert (await media_api.look(ticket)).json()["status"] == "READY"


async def test_a_deleted_picture_makes_room_at_its_limit_for_the_next_one(
    media_api: MediaApi, api: Running, rows: Connection, make_key: MakeKey
) -> None:
    limit = {"tenant_id": "acme", "key": "tenant", "at_most": 1}
    async with client_of(api.url, (await make_key(scopes=("fleet:operate",))).text) as operator:
        assert (await operator.put("/v1/limits", json=limit)).status_code == 200
    first, second = await media_api.submitted(), await media_api.submitted()
    is_held = "SELECT j.held FROM job j JOIN media m ON m.job_id = j.id WHERE m.id = $1"
    assert await rows.fetchval(is_held, UUID(second.media_id))
    await media_api.client.delete(f"/media/{first.media_id}")
    assert not await rows.fetchval(is_held, UUID(second.media_id))


async def test_nobody_elses_picture_is_deleted_and_not_without_the_right(
    media_api: MediaApi, api: Running, rows: Connection, make_key: MakeKey
) -> None:
    ticket = await media_api.submitted()
    async with client_of(api.url, (await make_key("rival")).text) as rival:
        problem(await rival.delete(f"/media/{ticket.media_id}"), 404, "media_not_found")
    async with client_of(api.url, (await make_key(scopes=("media:read",))).text) as reader:
        problem(await reader.delete(f"/media/{ticket.media_id}"), 403, "insufficient_scope")
    assert (await media_api.look(ticket)).status_code == 200


async def test_a_picture_is_kept_for_good_or_for_as_many_days_as_the_setting_says(
    media_api: MediaApi, settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    kept = await media_api.submitted()
    async with (
        serving(settings.model_copy(update={"media_retention_days": 30})) as api,
        client_of(api.url, (await make_key()).text) as client,
    ):
        ending = await MediaApi(client).submitted()
    for ticket in (kept, ending):
        await finish_all(rows, ticket.media_id)
    left = {
        str(row["id"]): row["left"]
        for row in await rows.fetch(
            # PostgreSQL reads its clock for each column: they can differ by a microsecond.
            "SELECT m.id, make_interval(secs => round(extract(epoch FROM j.expires_at - j.finished_at))) AS left"
            " FROM media m JOIN job j ON j.id = job_id"
        )
    }
    assert left == {kept.media_id: None, ending.media_id: timedelta(days=30)}


async def test_a_step_may_have_another_priority_than_its_picture(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.upload()
    answer = await media_api.complete(ticket, priority="high", step_priority={"webp": "low", "compress": "normal"})
    assert answer.status_code == 202
    found = await rows.fetch("SELECT step, priority FROM task WHERE job_id = $1", UUID(answer.json()["job_id"]))
    assert {row["step"]: row["priority"] for row in found} == {"resize": 0, "compress": 1, "webp": 2}
    problem(await media_api.complete(await media_api.upload(), step_priority={"other": "low"}), 422, "invalid_request")


async def test_a_picture_whose_job_is_gone_is_gone_too_although_its_rows_still_wait(
    media_api: MediaApi, rows: Connection
) -> None:
    """Retention deletes the objects first. Whoever deletes the job by its id finds the picture no more, either."""
    ticket = await media_api.submitted()
    await finish_all(rows, ticket.media_id)
    await rows.execute("UPDATE job SET expires_at = clock_timestamp()")
    for answer in (
        await media_api.look(ticket),
        await media_api.complete(ticket),
        await media_api.client.get(f"/media/{ticket.media_id}/events"),
    ):
        problem(answer, 404, "media_not_found")
