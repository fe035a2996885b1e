"""Seeing what became of a picture."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx2
import pytest
import time_machine

from leasehold.db.database import Connection
from leasehold.domain.states import JobState
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of, job_of, serving
from tests.api.driver import ORIGINAL, TERMS, claim_step, fail_step, finish_all, finish_step
from tests.api.media_api import JPEG, MediaApi, Ticket, problem


async def test_a_media_begins_as_init(media_api: MediaApi) -> None:
    ticket = await media_api.ticket()
    answer = await media_api.look(ticket)
    said = answer.json()
    assert answer.status_code == 200
    assert (said["media_id"], said["status"], said["steps"]) == (ticket.media_id, "INIT", [])
    assert "job_id" not in said
    assert answer.headers["retry-after"] == "1"


async def test_a_submitted_media_is_processing_and_shows_its_steps(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    said = (await media_api.look(ticket)).json()
    assert said["status"] == "PROCESSING"
    assert said["job_id"] == str(await job_of(rows, ticket.media_id))
    assert said["original"] == {"bytes": len(JPEG), "content_type": "image/jpeg"}
    assert [(step["name"], step["status"], step["attempt"]) for step in said["steps"]] == [
        ("resize", "PENDING", 0),
        ("compress", "PENDING", 0),
        ("webp", "PENDING", 0),
    ]
    assert "final_url" not in said
    assert "error" not in said


async def test_progress_is_seen_step_by_step(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    claimed = await claim_step(rows, ticket.media_id)
    running = (await media_api.look(ticket)).json()["steps"][0]
    assert (running["status"], running["attempt"]) == ("RUNNING", 1)
    assert "finished_at" not in running
    await finish_step(rows, claimed, "resize.jpg", value=ORIGINAL)
    said = (await media_api.look(ticket)).json()
    first = said["steps"][0]
    assert first["status"] == "SUCCEEDED"
    assert first["duration_ms"] >= 0
    assert first["finished_at"] >= first["started_at"]
    assert said["original"] == {"width": 640, "height": 480, "bytes": len(JPEG), "content_type": "image/jpeg"}


async def test_a_ready_media_has_a_signed_url_of_its_final_picture(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted(variants=["thumb"])
    await finish_all(rows, ticket.media_id, "variants/thumb.webp")
    answer = await media_api.look(ticket)
    said = answer.json()
    assert said["status"] == "READY"
    assert f"/media/{ticket.media_id}/final.webp?" in said["final_url"]
    assert "X-Amz-Signature=" in said["final_url"]
    assert set(said["variants"]) == {"thumb"}
    assert f"/media/{ticket.media_id}/variants/thumb.webp?" in said["variants"]["thumb"]["url"]
    assert "retry-after" not in answer.headers


async def test_with_a_cdn_the_final_url_is_the_cdns(settings: Settings, make_key: MakeKey, rows: Connection) -> None:
    cdn = settings.model_copy(update={"cdn_base_url": "https://cdn.example.com/"})
    async with serving(cdn) as api, client_of(api.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        ticket = await media_api.submitted()
        await finish_all(rows, ticket.media_id)
        said = (await media_api.look(ticket)).json()
    assert said["final_url"] == f"https://cdn.example.com/media/{ticket.media_id}/final.webp"


async def test_a_failed_media_says_why_and_whether_trying_again_helps(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    await fail_step(rows, await claim_step(rows, ticket.media_id), "corrupt_image", retryable=False)
    said = (await media_api.look(ticket)).json()
    error = {"code": "corrupt_image", "message": "It did not work.", "retryable": False}
    assert said["status"] == "FAILED"
    assert said["error"] == error
    assert [step["status"] for step in said["steps"]] == ["FAILED", "SKIPPED", "SKIPPED"]
    assert said["steps"][0]["error"] == error


async def test_a_step_between_two_attempts_shows_what_went_wrong(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    await fail_step(rows, await claim_step(rows, ticket.media_id), "store_away", retryable=True)
    step = (await media_api.look(ticket)).json()["steps"][0]
    assert (step["status"], step["error"]["code"]) == ("RETRY", "store_away")
    await fail_step(rows, await claim_step(rows, ticket.media_id), "disk_full", retryable=True)
    step = (await media_api.look(ticket)).json()["steps"][0]
    assert (step["status"], step["error"]["code"]) == ("RETRY", "disk_full"), "of the last attempt"
    await finish_step(rows, await claim_step(rows, ticket.media_id), "resize.jpg")
    step = (await media_api.look(ticket)).json()["steps"][0]
    assert (step["status"], step["attempt"]) == ("SUCCEEDED", 3)
    assert "error" not in step


WORDS = {
    JobState.SUCCEEDED: "READY",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "FAILED",
    JobState.EXPIRED: "FAILED",
}


@pytest.mark.parametrize("state", list(JobState))
async def test_each_job_state_has_its_word(media_api: MediaApi, rows: Connection, state: JobState) -> None:
    ticket = await media_api.submitted()
    await rows.execute(
        "UPDATE job SET status = $1, finished_at = CASE WHEN $2 THEN clock_timestamp() END",
        state.value,
        state in WORDS,
    )
    said = (await media_api.look(ticket)).json()
    assert said["status"] == WORDS.get(state, "PROCESSING")
    assert ("error" in said) == (said["status"] == "FAILED")


async def test_times_are_utc_with_a_z(media_api: MediaApi) -> None:
    said = (await media_api.look(await media_api.submitted())).json()
    for name in ("created_at", "updated_at"):
        assert said[name].endswith("Z")
        assert datetime.fromisoformat(said[name]).tzinfo is not None


@pytest.mark.parametrize(
    "media_id",
    ["31f5d543-7f65-4714-aa64-46dbed9b42a2", "01a1fcc6-b271-71eb-866c-1da9e934543b", "no-id", "%00", "0"],
)
async def test_what_is_not_there_is_not_found(media_api: MediaApi, media_id: str) -> None:
    answer = await media_api.client.get(f"/media/{media_id}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


async def test_an_unchanged_media_costs_a_304(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    tag = await settled_tag(media_api, rows, ticket)
    same = await media_api.look(ticket, headers={"If-None-Match": tag})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == tag
    assert same.headers["retry-after"] == "1"
    for header in (f'"other", {tag}', tag.removeprefix("W/"), "*"):
        assert (await media_api.look(ticket, headers={"If-None-Match": header})).status_code == 304
    await claim_step(rows, ticket.media_id)
    changed = await media_api.look(ticket, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


async def test_a_ready_media_keeps_its_etag(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    await finish_all(rows, ticket.media_id)
    tag = (await media_api.look(ticket)).headers["etag"]
    assert (await media_api.look(ticket, headers={"If-None-Match": tag})).status_code == 304


async def test_a_signed_url_is_renewed_before_half_of_its_life_is_over(
    media_api: MediaApi, rows: Connection, settings: Settings
) -> None:
    ticket = await media_api.submitted()
    await finish_all(rows, ticket.media_id)
    life = settings.download_url_seconds
    midnight = datetime.combine(datetime.now(UTC).date(), datetime.min.time(), UTC)  # a multiple of half the life
    assert (midnight.timestamp() / life * 2).is_integer()

    async def look(seconds: float, tag: str = "") -> httpx2.Response:
        with time_machine.travel(midnight + timedelta(seconds=seconds), tick=True):
            return await media_api.look(ticket, headers={"If-None-Match": tag})

    tag = (await look(60)).headers["etag"]
    assert (await look(life / 2 - 60, tag)).status_code == 304
    renewed = await look(life / 2 + 60, tag)
    assert (renewed.status_code, renewed.headers["etag"] != tag) == (200, True)


async def settled_tag(media_api: MediaApi, rows: Connection, ticket: Ticket) -> str:
    """The tag of a job whose hint was published: nothing changes it now but the test."""
    while (await rows.fetchval("SELECT status FROM job")) == "pending":
        await media_api.look(ticket, params={"wait": 5})
    return str((await media_api.look(ticket)).headers["etag"])


async def begin_waiting(
    api: Running, media_api: MediaApi, ticket: Ticket, **options: object
) -> asyncio.Task[httpx2.Response]:
    """A long poll that the server has begun to wait for."""
    before = api.services.watch.waiting
    waiting = asyncio.create_task(media_api.look(ticket, params={"wait": 30}, **options))
    while api.services.watch.waiting == before:
        assert not waiting.done()
        await asyncio.sleep(0.005)
    return waiting


async def test_a_long_poll_returns_when_the_job_changes(api: Running, media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    tag = await settled_tag(media_api, rows, ticket)
    waiting = await begin_waiting(api, media_api, ticket, headers={"If-None-Match": tag})
    await claim_step(rows, ticket.media_id)
    answer = await waiting
    assert answer.status_code == 200
    assert answer.json()["steps"][0]["status"] == "RUNNING"
    assert api.services.watch.waiting == 0


async def test_a_long_poll_without_a_change_ends_as_a_304(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    tag = await settled_tag(media_api, rows, ticket)
    answer = await media_api.look(ticket, params={"wait": 0.3}, headers={"If-None-Match": tag})
    assert answer.status_code == 304


async def test_a_long_poll_does_not_wait_for_what_the_caller_does_not_know_yet(
    media_api: MediaApi, rows: Connection
) -> None:
    ticket = await media_api.submitted()
    await settled_tag(media_api, rows, ticket)
    answer = await media_api.look(ticket, params={"wait": 30}, headers={"If-None-Match": 'W/"older"'})
    assert answer.status_code == 200


async def test_a_long_poll_does_not_wait_for_a_finished_media(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.submitted()
    await finish_all(rows, ticket.media_id)
    assert (await media_api.look(ticket, params={"wait": 30})).json()["status"] == "READY"


async def test_many_waiters_are_all_woken_and_hold_no_connection(
    api: Running, media_api: MediaApi, rows: Connection, settings: Settings
) -> None:
    ticket = await media_api.submitted()
    tag = await settled_tag(media_api, rows, ticket)
    many = settings.database_pool_size * 5
    waiters = [await begin_waiting(api, media_api, ticket, headers={"If-None-Match": tag}) for _ in range(many)]
    assert api.services.watch.waiting == many
    await claim_step(rows, ticket.media_id)
    assert {answer.status_code for answer in await asyncio.gather(*waiters)} == {200}


async def test_a_server_that_stops_lets_long_polls_go(settings: Settings, make_key: MakeKey, rows: Connection) -> None:
    async with client_of("", (await make_key()).text) as client:
        async with serving(settings) as api:
            client.base_url = httpx2.URL(api.url)
            media_api = MediaApi(client)
            ticket = await media_api.submitted()
            tag = await settled_tag(media_api, rows, ticket)
            waiting = await begin_waiting(api, media_api, ticket, headers={"If-None-Match": tag})
        assert (await waiting).status_code == 304


@pytest.mark.parametrize(
    ("wait", "reason"),
    [("31", "less than or equal to 30"), ("-1", "greater than or equal to 0"), ("soon", "valid number"),
     ("nan", "finite number"), ("inf", "finite number")],
)  # fmt: skip
async def test_a_wait_that_is_too_long_or_no_number_is_refused(media_api: MediaApi, wait: str, reason: str) -> None:
    ticket = await media_api.ticket()
    said = problem(await media_api.look(ticket, params={"wait": wait}), 422, "invalid_request")
    assert (said["errors"][0]["parameter"], said["errors"][0]["in"]) == ("wait", "query")
    assert reason in said["errors"][0]["detail"]


async def test_the_view_tells_tasks_in_the_words_of_the_requirement(media_api: MediaApi, rows: Connection) -> None:
    """7.2 of the image pipeline's text: its columns, states, lease and retries, for SREs who have it at hand."""

    async def seen() -> dict[str, Any]:
        found = await rows.fetch("SELECT * FROM processing_task WHERE media_id = $1", UUID(media))
        return {row["step"]: dict(row) for row in found}

    media = (await media_api.submitted()).media_id
    before = await seen()
    assert before["resize"].keys() >= {
        "id", "media_id", "step", "status", "retry_count", "lock_by", "lock_until", "input_key", "output_key",
        "last_error", "created_at", "updated_at",
    }  # fmt: skip
    assert {row["status"] for row in before.values()} == {"PENDING"}
    assert before["resize"]["input_key"] == f"media/{media}/original.jpg"
    claimed = await claim_step(rows, media)
    running = (await seen())["resize"]
    assert (running["status"], running["lock_by"]) == ("RUNNING", TERMS.owner)
    assert running["lock_until"] is not None
    await fail_step(rows, claimed, "store_unavailable", retryable=True)
    again = (await seen())["resize"]
    assert (again["status"], again["lock_by"], again["last_error"]) == (
        "RETRY", None, "store_unavailable: It did not work.",
    )  # fmt: skip
    await finish_step(rows, await claim_step(rows, media), "resize.jpg", value=ORIGINAL)
    done = await seen()
    assert (done["resize"]["status"], done["resize"]["retry_count"]) == ("SUCCEEDED", 1)
    assert done["resize"]["output_key"] == done["compress"]["input_key"] == f"media/{media}/resize.jpg"
    assert done["compress"]["status"] == "PENDING"
    await fail_step(rows, await claim_step(rows, media), "corrupt_image", retryable=False)
    assert (await seen())["compress"]["status"] == "FAILED"
