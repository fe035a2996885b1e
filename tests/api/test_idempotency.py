"""`Idempotency-Key`: repeating a request that creates creates nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasehold.api.http.idempotent import Answer, key_has_expired, once, once_over_transactions
from leasehold.db import idempotency
from leasehold.db.database import Connection, OneConnection, connect
from leasehold.db.idempotency import Reservation, StoredAnswer
from leasehold.domain.errors import Conflict, Invalid
from leasehold.pipelines.media import transitions
from leasehold.settings import Settings
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


async def test_a_key_in_flight_says_so(media_api: MediaApi, rows: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_LOCK_GRACE", idempotency.IN_FLIGHT)  # nobody holds its lock
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


@pytest.mark.parametrize(("age", "is_new"), [(100, False), (152, True)])
async def test_a_repeated_request_gets_the_first_answer_until_half_of_its_url_is_spent(
    media_api: MediaApi, rows: Connection, age: int, *, is_new: bool
) -> None:
    first = (await media_api.client.post("/upload-url", json=BODY, headers=KEY)).json()
    await rows.execute("UPDATE idempotency SET expires_at = expires_at - make_interval(secs => $1)", age)
    await asyncio.sleep(1.1)  # two signatures of the same second are equal
    again = (await media_api.client.post("/upload-url", json=BODY, headers=KEY)).json()
    assert again["media_id"] == first["media_id"]
    assert again["expires_in"] == 300
    assert (again != first) == is_new


async def test_an_upload_that_has_ended_gets_the_first_answer_again(media_api: MediaApi, rows: Connection) -> None:
    first = (await media_api.client.post("/upload-url", json=BODY, headers=KEY)).json()
    await rows.execute("UPDATE media SET status = 'UPLOADED'")
    await rows.execute("UPDATE idempotency SET expires_at = expires_at - interval '301 seconds'")
    again = (await media_api.client.post("/upload-url", json=BODY, headers=KEY)).json()
    assert again == first


async def test_nobody_elses_upload_gets_a_longer_life(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.ticket()
    before = await rows.fetchrow("SELECT * FROM upload")
    assert not await transitions.extend_upload(rows, "rival", ticket.original_key, 600)
    assert await rows.fetchrow("SELECT * FROM upload") == before
    assert await transitions.extend_upload(rows, "acme", ticket.original_key, 600)


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
    assert idempotency.fingerprint(b"a") != idempotency.fingerprint(b"a", b"")
    assert idempotency.fingerprint(b"a", b"b") == idempotency.fingerprint(b"a", b"b")


async def reserved(rows: Connection, tenant: str = "acme", key: str = "k", asked: bytes = b"one") -> Reservation:
    found = await idempotency.reserve(rows, tenant, key, asked)
    assert isinstance(found, Reservation)
    return found


ELSE: dict[str, dict[str, Any]] = {
    "another tenant's": {"tenant_id": "rival"},
    "another key": {"key": "other"},
    "a later reservation": {"locked_until": datetime(2999, 1, 1, tzinfo=UTC)},
}


@pytest.mark.parametrize("other", ELSE)
async def test_only_the_reservation_itself_stores_or_frees_its_key(rows: Connection, other: str) -> None:
    mine = await reserved(rows)
    await reserved(rows, "rival", "k")
    await reserved(rows, "acme", "other")
    await reserved(rows, "rival", "other")
    # All have one instant in common, so that nothing but the reservation's own name tells them apart.
    await rows.execute("UPDATE idempotency SET locked_until = $1", mine.locked_until)
    await rows.execute("DELETE FROM idempotency WHERE (tenant_id, key) IN (('rival', 'k'), ('acme', 'other'))")
    forged = replace(mine, **ELSE[other])
    with pytest.raises(Conflict):
        await idempotency.store(rows, forged, 201, b"forged")
    await idempotency.release(rows, forged)
    left = await rows.fetch("SELECT tenant_id, key, status_code FROM idempotency ORDER BY 1, 2")
    assert [tuple(row) for row in left] == [("acme", "k", None), ("rival", "other", None)]


async def test_an_answer_that_is_stored_is_neither_replaced_nor_freed(rows: Connection) -> None:
    mine = await reserved(rows)
    await idempotency.store(rows, mine, 201, b"said")
    with pytest.raises(Conflict):
        await idempotency.store(rows, mine, 200, b"said otherwise")
    await idempotency.release(rows, mine)
    stored = await idempotency.reserve(rows, "acme", "k", b"one")
    assert isinstance(stored, StoredAnswer)
    assert (stored.status_code, stored.body) == (201, b"said")


async def test_an_answer_outlasts_the_lock_of_its_request(rows: Connection) -> None:
    await idempotency.store(rows, await reserved(rows), 201, b"said")
    await rows.execute("UPDATE idempotency SET locked_until = clock_timestamp() - interval '1 hour'")
    assert isinstance(await idempotency.reserve(rows, "acme", "k", b"one"), StoredAnswer)


async def test_a_request_in_flight_keeps_its_key_for_a_minute_and_its_answer_for_a_day(
    rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "_LOCK_GRACE", idempotency.IN_FLIGHT)  # nobody holds its lock
    clock = "SELECT clock_timestamp()"
    before = await rows.fetchval(clock)
    mine = await reserved(rows)
    after = await rows.fetchval(clock)
    minute, day = timedelta(seconds=60), timedelta(hours=24)
    assert before + minute <= mine.locked_until <= after + minute
    for _ in range(2):
        with pytest.raises(Conflict):
            await idempotency.reserve(rows, "acme", "k", b"one")
    with pytest.raises(Invalid):
        await idempotency.reserve(rows, "acme", "k", b"other")
    before = await rows.fetchval(clock)
    await idempotency.store(rows, mine, 201, b"said")
    after = await rows.fetchval(clock)
    assert before + day <= await rows.fetchval("SELECT expires_at FROM idempotency") <= after + day


async def test_who_takes_over_a_dead_requests_key_asks_for_something_else(rows: Connection) -> None:
    await reserved(rows)
    await rows.execute("UPDATE idempotency SET locked_until = clock_timestamp() - interval '1 second'")
    again = await reserved(rows, asked=b"other")
    await idempotency.store(rows, again, 201, b"said")
    with pytest.raises(Invalid):
        await idempotency.reserve(rows, "acme", "k", b"one")
    assert isinstance(await idempotency.reserve(rows, "acme", "k", b"other"), StoredAnswer)


async def test_it_is_known_whether_a_key_has_an_answer(rows: Connection) -> None:
    mine = await reserved(rows)
    assert not await idempotency.is_answered(rows, "acme", "k")
    await idempotency.store(rows, mine, 201, b"said")
    assert await idempotency.is_answered(rows, "acme", "k")
    assert not await idempotency.is_answered(rows, "rival", "k")
    assert not await idempotency.is_answered(rows, "acme", "other")
    await rows.execute("UPDATE idempotency SET expires_at = clock_timestamp() - interval '1 second'")
    assert not await idempotency.is_answered(rows, "acme", "k")


@pytest.mark.parametrize("key", ["x", "x" * 255, "a b", "!~"])
async def test_a_key_has_up_to_255_printable_characters(rows: Connection, key: str) -> None:
    idempotency.check_key(key)
    await reserved(rows, key=key)


@pytest.mark.parametrize("key", ["", " x", "x ", "x" * 256, "a\tb", "a\nb", "x\n", "\x7f", "é"])
def test_another_key_is_none(key: str) -> None:
    with pytest.raises(Invalid):
        idempotency.check_key(key)


WAYS: list[Callable[..., Awaitable[Answer]]] = [once, once_over_transactions]


@pytest.mark.parametrize("way", WAYS)
async def test_only_a_stored_answer_keeps_its_key(rows: Connection, way: Callable[..., Awaitable[Answer]]) -> None:
    """A failure, and an answer that is not to be repeated, leave it free at once."""

    async def asked(answer: Answer | Exception) -> Answer:
        async def work(*_connection: Connection) -> Answer:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return await way(OneConnection(rows), "acme", "k", b"one", work)

    for _ in range(2):
        with pytest.raises(LookupError, match="of the work"):
            await asked(LookupError("of the work"))
    for body in (b"first", b"second"):
        assert await asked(Answer(409, body, is_stored=False)) == Answer(409, body, is_stored=False)
    said = await asked(Answer(201, b"made"))
    assert (said.body, said.age) == (b"made", timedelta(0))
    again = await asked(Answer(201, b"made twice"))
    assert (again.status_code, again.body) == (201, b"made")
    assert timedelta(0) < again.age < timedelta(minutes=1)


@pytest.mark.parametrize("way", WAYS)
async def test_no_work_begins_under_a_key_that_is_none(rows: Connection, way: Callable[..., Awaitable[Answer]]) -> None:
    async def work(*_connection: Connection) -> Answer:
        raise AssertionError

    with pytest.raises(Invalid, match="printable"):
        await way(OneConnection(rows), "acme", " x", b"one", work)


async def test_a_request_keeps_its_key_as_long_as_its_transaction_lasts(
    rows: Connection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "_LOCK_GRACE", timedelta(0))
    other = await connect(settings, "test")

    async def work(_connection: Connection) -> Answer:
        with pytest.raises(Conflict):
            await idempotency.reserve(other, "acme", "k", b"one")
        return Answer(201, b"made")

    try:
        assert (await once(OneConnection(rows), "acme", "k", b"one", work)).body == b"made"
    finally:
        await other.close()


def test_who_comes_as_an_answer_expires_may_come_again_after_a_second() -> None:
    said = key_has_expired()
    assert (said.code, said.retry_after) == ("idempotency_key_in_flight", 1)
