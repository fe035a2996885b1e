"""`Idempotency-Key`: repeating a request that creates creates nothing twice."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from leasehold.db import idempotency
from leasehold.db.database import Connection
from leasehold.db.idempotency import Reservation, StoredAnswer
from leasehold.domain.errors import Conflict, Invalid
from tests.api.conftest import MakeKey, Running, client_of, count
from tests.api.media_api import MediaApi, problem

BODY = {"content_type": "image/jpeg", "file_name": "a.jpg"}
KEY = {"Idempotency-Key": "8e03978e-40d5-43dd-bc93-6894a57f9324"}


async def test_the_same_request_gets_the_first_answer_again(media_api: MediaApi, rows: Connection) -> None:
    first = await media_api.client.post("/upload-url", json=BODY, headers=KEY)
    again = await media_api.client.post("/upload-url", json=dict(reversed(BODY.items())), headers=KEY)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["location"] == first.headers["location"]
    assert await count(rows, "media") == 1


async def test_without_a_key_every_request_is_its_own(media_api: MediaApi, rows: Connection) -> None:
    await media_api.ticket()
    await media_api.ticket()
    assert await count(rows, "media") == 2


async def test_another_body_under_the_same_key_is_refused(media_api: MediaApi, rows: Connection) -> None:
    await media_api.client.post("/upload-url", json=BODY, headers=KEY)
    answer = await media_api.client.post("/upload-url", json=BODY | {"file_name": "b.jpg"}, headers=KEY)
    problem(answer, 422, "idempotency_key_reused")
    assert await count(rows, "media") == 1


async def test_ten_at_once_make_one_media(media_api: MediaApi, rows: Connection) -> None:
    """Those that come while the first is in flight are told so, the others get its answer."""
    answers = await asyncio.gather(*(media_api.client.post("/upload-url", json=BODY, headers=KEY) for _ in range(10)))
    made = [answer for answer in answers if answer.status_code == 201]
    assert len({answer.content for answer in made}) == 1
    for answer in answers:
        if answer not in made:
            problem(answer, 409, "idempotency_key_in_flight")
            assert answer.headers["retry-after"] == "1"
    assert await count(rows, "media") == 1


async def test_a_key_in_flight_says_so(media_api: MediaApi, rows: Connection) -> None:
    await media_api.client.post("/upload-url", json=BODY, headers=KEY)
    await rows.execute("UPDATE idempotency SET status_code = NULL, body = NULL")
    problem(await media_api.client.post("/upload-url", json=BODY, headers=KEY), 409, "idempotency_key_in_flight")


async def test_a_first_request_that_died_does_not_hold_its_key_for_ever(media_api: MediaApi, rows: Connection) -> None:
    first = await media_api.client.post("/upload-url", json=BODY, headers=KEY)
    await rows.execute(
        "UPDATE idempotency SET status_code = NULL, body = NULL, locked_until = clock_timestamp() - interval '1 s'"
    )
    again = await media_api.client.post("/upload-url", json=BODY, headers=KEY)
    assert again.status_code == 201
    assert again.content != first.content


async def test_a_request_that_was_refused_leaves_its_key_free(media_api: MediaApi, rows: Connection) -> None:
    wrong = BODY | {"content_type": "text/html"}
    problem(await media_api.client.post("/upload-url", json=wrong, headers=KEY), 422, "unsupported_content_type")
    assert (await media_api.client.post("/upload-url", json=BODY, headers=KEY)).status_code == 201


async def test_a_key_is_its_tenants_own(api: Running, media_api: MediaApi, make_key: MakeKey, rows: Connection) -> None:
    mine = await media_api.client.post("/upload-url", json=BODY, headers=KEY)
    async with client_of(api.url, (await make_key("rival")).text) as rival:
        theirs = await rival.post("/upload-url", json=BODY | {"file_name": "b.jpg"}, headers=KEY)
    assert theirs.status_code == 201
    assert theirs.json()["media_id"] != mine.json()["media_id"]


async def test_once_the_url_is_dead_the_same_media_gets_a_living_one(media_api: MediaApi, rows: Connection) -> None:
    first = (await media_api.client.post("/upload-url", json=BODY, headers=KEY)).json()
    await rows.execute("UPDATE idempotency SET expires_at = expires_at - interval '301 seconds'")
    again = (await media_api.client.post("/upload-url", json=BODY, headers=KEY)).json()
    assert again["media_id"] == first["media_id"]
    assert again["original_key"] == first["original_key"]
    assert await count(rows, "media") == 1


@pytest.mark.parametrize("key", ["x" * 256, "", "é"])
async def test_a_key_that_is_none_is_refused(media_api: MediaApi, key: str) -> None:
    headers = {b"Idempotency-Key": key.encode()}
    problem(await media_api.client.post("/upload-url", json=BODY, headers=headers), 422, "idempotency_key_malformed")


async def test_an_answer_is_forgotten_after_its_time(rows: Connection) -> None:
    first = await idempotency.reserve(rows, "acme", "k", b"one")
    assert isinstance(first, Reservation)
    await idempotency.store(rows, first, 201, b"said")
    stored = await idempotency.reserve(rows, "acme", "k", b"one")
    assert isinstance(stored, StoredAnswer)
    assert (stored.status_code, stored.body) == (201, b"said")
    assert timedelta(0) <= stored.age < timedelta(minutes=1)
    with pytest.raises(Invalid):
        await idempotency.reserve(rows, "acme", "k", b"other")
    await rows.execute("UPDATE idempotency SET expires_at = clock_timestamp() - interval '1 second'")
    assert isinstance(await idempotency.reserve(rows, "acme", "k", b"other"), Reservation)


async def test_a_reservation_that_was_lost_stores_nothing(rows: Connection) -> None:
    slow = await idempotency.reserve(rows, "acme", "k", b"one")
    assert isinstance(slow, Reservation)
    await rows.execute("UPDATE idempotency SET locked_until = clock_timestamp() - interval '1 second'")
    quick = await idempotency.reserve(rows, "acme", "k", b"one")
    assert isinstance(quick, Reservation)
    with pytest.raises(Conflict):
        await idempotency.store(rows, slow, 201, b"late")
    await idempotency.release(rows, slow)
    await idempotency.store(rows, quick, 201, b"said")
    stored = await idempotency.reserve(rows, "acme", "k", b"one")
    assert isinstance(stored, StoredAnswer)
    assert stored.body == b"said"


def test_what_is_asked_cannot_be_confused_by_its_borders() -> None:
    assert idempotency.fingerprint(b"ab", b"c") != idempotency.fingerprint(b"a", b"bc")
