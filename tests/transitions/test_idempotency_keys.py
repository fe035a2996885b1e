"""The rows of idempotency keys: a reservation is one tenant's and one key's, and ends as its row says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from leasehold.api.http.idempotent import Answer, once, once_over_transactions
from leasehold.db import idempotency
from leasehold.db.database import Connection, Pool, make_pool
from leasehold.db.idempotency import Reservation, StoredAnswer
from leasehold.domain.errors import Conflict, Invalid
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from tests.factories import Rows
from tests.transitions.conftest import Open

HASH = idempotency.fingerprint(b"POST /v1/runs", b"{}")
NEIGHBOURS = (("t", "other"), ("other", "key"))


async def reserved(rows: Rows, tenant: str = "t", key: str = "key") -> Reservation:
    answer = await idempotency.reserve(rows.connection, tenant, key, HASH)
    assert isinstance(answer, Reservation)
    return answer


async def is_refused(rows: Rows) -> bool:
    """Whether nobody else may have a key that has just been reserved, and that no transaction holds yet. That is so for
    a second only, which may be over on a busy machine: then it is reserved anew, and tried again.
    """
    for _ in range(10):
        await rows.connection.execute(
            "UPDATE idempotency SET locked_until = clock_timestamp() + $1::interval", idempotency.IN_FLIGHT
        )
        try:
            await reserved(rows)
        except Conflict:
            return True
    return False


async def kept(rows: Rows) -> dict[tuple[str, str], dict[str, Any]]:
    found = await rows.connection.fetch("SELECT * FROM idempotency")
    return {(row["tenant_id"], row["key"]): dict(row) for row in found}


async def test_storing_and_releasing_touch_no_neighbour(rows: Rows) -> None:
    """The same key of another tenant and another key of the same tenant, reserved at the same moment."""
    own = await reserved(rows)
    for tenant, key in NEIGHBOURS:
        await reserved(rows, tenant, key)
    await rows.connection.execute("UPDATE idempotency SET locked_until = $1", own.locked_until)
    before = await kept(rows)
    await idempotency.store(rows.connection, own, 202, b"answer")
    after = await kept(rows)
    assert {place: after[place] for place in NEIGHBOURS} == {place: before[place] for place in NEIGHBOURS}
    assert (after["t", "key"]["status_code"], after["t", "key"]["body"]) == (202, b"answer")
    other = Reservation("t", "other", own.locked_until)
    await idempotency.release(rows.connection, other)
    assert (await kept(rows)).keys() == {("t", "key"), ("other", "key")}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
async def test_an_answer_is_known_by_its_tenant_and_its_key(rows: Rows, neighbour: tuple[str, str]) -> None:
    await idempotency.store(rows.connection, await reserved(rows), 202, b"answer")
    assert await idempotency.is_answered(rows.connection, "t", "key")
    assert not await idempotency.is_answered(rows.connection, *neighbour)
    answer = await idempotency.reserve(rows.connection, "t", "key", HASH)
    assert isinstance(answer, StoredAnswer)
    assert (answer.status_code, answer.body) == (202, b"answer")
    assert answer.age.total_seconds() < 60 * 60
    assert isinstance(await idempotency.reserve(rows.connection, *neighbour, HASH), Reservation)


async def test_the_same_key_of_two_tenants_has_two_answers(rows: Rows) -> None:
    for tenant in ("t", "other"):
        own = await idempotency.reserve(rows.connection, tenant, "key", tenant.encode())
        assert isinstance(own, Reservation)
        await idempotency.store(rows.connection, own, 202, tenant.encode())
    for tenant in ("t", "other"):
        answer = await idempotency.reserve(rows.connection, tenant, "key", tenant.encode())
        assert isinstance(answer, StoredAnswer)
        assert answer.body == tenant.encode()


class _ReleasesMeanwhile:
    """A connection. After its first statement the reservation is released."""

    def __init__(self, connection: Connection, reservation: Reservation) -> None:
        self._connection, self._reservation = connection, reservation

    async def fetchval(self, *statement: Any) -> Any:
        answer = await self._connection.fetchval(*statement)
        await idempotency.release(self._connection, self._reservation)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def test_who_asks_while_the_first_request_releases_its_key_may_come_again(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "_LOCK_GRACE", idempotency.IN_FLIGHT)  # nothing but its release frees the key
    connection: Any = _ReleasesMeanwhile(rows.connection, await reserved(rows))
    with pytest.raises(Conflict) as refused:
        await idempotency.reserve(connection, "t", "key", HASH)
    assert (refused.value.code, refused.value.retry_after) == ("idempotency_key_in_flight", 1)
    await reserved(rows)


def test_releases_that_run_side_by_side_compute_the_same_fingerprint() -> None:
    """With another one, a repetition during an upgrade, or a day after it, would count as another request."""
    assert idempotency.fingerprint(b"POST /v1/runs", b"{}").hex() == (
        "56e847a315230ddaa9c41adb65abfedaee2fba5a5731248756a33f75d475c0d2"
    )


async def test_a_key_without_an_answer_is_not_answered(rows: Rows) -> None:
    await reserved(rows)
    assert not await idempotency.is_answered(rows.connection, "t", "key")
    assert await is_refused(rows)


async def test_an_answer_past_its_time_is_none_and_its_key_is_free(rows: Rows) -> None:
    await idempotency.store(rows.connection, await reserved(rows), 202, b"answer")
    with pytest.raises(Invalid):
        await idempotency.reserve(rows.connection, "t", "key", b"another request")
    await rows.connection.execute("UPDATE idempotency SET expires_at = clock_timestamp()")
    assert not await idempotency.is_answered(rows.connection, "t", "key")
    await reserved(rows)
    row = (await kept(rows))["t", "key"]
    assert (row["status_code"], row["body"]) == (None, None)


async def test_a_reservation_that_lapsed_is_another_ones_and_stores_nothing(rows: Rows) -> None:
    late = await reserved(rows)
    await rows.connection.execute("UPDATE idempotency SET locked_until = clock_timestamp() - interval '1 second'")
    await reserved(rows)
    before = await kept(rows)
    with pytest.raises(Conflict):
        await idempotency.store(rows.connection, late, 202, b"late")
    await idempotency.release(rows.connection, late)
    assert await kept(rows) == before


async def test_a_stored_answer_is_neither_replaced_nor_released(rows: Rows) -> None:
    own = await reserved(rows)
    await idempotency.store(rows.connection, own, 202, b"answer")
    before = await kept(rows)
    with pytest.raises(Conflict):
        await idempotency.store(rows.connection, own, 500, b"again")
    await idempotency.release(rows.connection, own)
    assert await kept(rows) == before


async def test_a_reservation_counts_only_while_its_transaction_lasts(rows: Rows, another: Open) -> None:
    """Its API process died, or its connection did: the client's next try must not be refused for a minute."""
    first, second = (await another()).connection, (await another()).connection
    own = await idempotency.reserve(first, "t", "key", HASH)
    assert isinstance(own, Reservation)
    async with first.transaction():
        await idempotency.hold(first, own)
        await rows.connection.execute("UPDATE idempotency SET locked_until = locked_until - interval '2 seconds'")
        with pytest.raises(Conflict):
            await idempotency.reserve(second, "t", "key", HASH)
    again = await idempotency.reserve(second, "t", "key", HASH)
    assert isinstance(again, Reservation)
    assert await is_refused(rows)  # its transaction has yet to begin
    with pytest.raises(Conflict):
        await idempotency.store(first, own, 202, b"late")


async def test_a_request_that_works_for_more_than_its_minute_loses_its_key_although_its_transaction_lasts(
    rows: Rows, another: Open
) -> None:
    """It hangs, perhaps for ever. The client's next try takes the key over."""
    first, second = (await another()).connection, (await another()).connection
    own = await reserved(rows)
    async with first.transaction():
        await idempotency.hold(first, own)
        for seconds, is_free in ((30, False), (31, True)):
            await rows.connection.execute(
                "UPDATE idempotency SET locked_until = locked_until - make_interval(secs => $1)", seconds
            )
            if is_free:
                assert isinstance(await idempotency.reserve(second, "t", "key", HASH), Reservation)
            else:
                with pytest.raises(Conflict):
                    await idempotency.reserve(second, "t", "key", HASH)


async def test_a_reservation_over_several_transactions_counts_for_its_minute_whichever_request_asks(rows: Rows) -> None:
    """Nobody holds its lock. A request of another kind with its key took it over after a second."""
    for is_held in (True, False):
        own = await idempotency.reserve(rows.connection, "t", "key", HASH, is_held=False)
        assert isinstance(own, Reservation)
        await rows.connection.execute("UPDATE idempotency SET locked_until = locked_until - interval '30 seconds'")
        with pytest.raises(Conflict):
            await idempotency.reserve(rows.connection, "t", "key", HASH, is_held=is_held)
        await rows.connection.execute("UPDATE idempotency SET locked_until = locked_until - interval '30 seconds'")
        again = await idempotency.reserve(rows.connection, "t", "key", HASH, is_held=is_held)
        assert isinstance(again, Reservation)
        await idempotency.release(rows.connection, again)


async def test_a_held_key_of_one_tenant_holds_no_neighbours(rows: Rows, another: Open) -> None:
    first, second = (await another()).connection, (await another()).connection
    own = await reserved(rows)
    for tenant, key in NEIGHBOURS:
        await reserved(rows, tenant, key)
    await rows.connection.execute("UPDATE idempotency SET locked_until = locked_until - interval '2 seconds'")
    async with first.transaction():
        await idempotency.hold(first, own)
        for tenant, key in NEIGHBOURS:
            assert isinstance(await idempotency.reserve(second, tenant, key, HASH), Reservation)


async def test_a_request_whose_connection_broke_is_repeated_within_seconds(rows: Rows, settings: Settings) -> None:
    async with make_pool(settings, "tests", 2) as pool:

        async def breaks(connection: Connection) -> Answer:
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            raise AssertionError("the session is over")

        async def works(_connection: Connection) -> Answer:
            return Answer(202, b"done")

        for key in map(str, range(10)):
            with pytest.raises(TRY_AGAIN):
                await once(pool, "t", key, HASH, breaks)
            try:
                await once(pool, "t", key, HASH, works)
            except Conflict:
                break  # else the second of its reservation was over: on a busy machine it may be
        else:
            pytest.fail("a key whose reservation still counts was reserved")
        await rows.connection.execute("UPDATE idempotency SET locked_until = locked_until - interval '1 second'")
        assert (await once(pool, "t", key, HASH, works)).body == b"done"


async def once_on_its_connection(pool: Pool, key: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
    async def working(_connection: Connection) -> Answer:
        return await work()

    return await once(pool, "t", key, HASH, working)


async def once_on_any_connection(pool: Pool, key: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
    return await once_over_transactions(pool, "t", key, HASH, work)


EITHER = pytest.mark.parametrize("act", [once_on_its_connection, once_on_any_connection])
Act = Callable[[Pool, str, Callable[[], Awaitable[Answer]]], Awaitable[Answer]]


async def done() -> Answer:
    return Answer(202, b"done")


async def must_not_begin() -> Answer:
    raise AssertionError("the work began")


@EITHER
async def test_while_a_first_request_works_another_with_its_key_is_refused(
    rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    """However long it works: a reservation that only counts for its first second would be over at once here."""
    monkeypatch.setattr(idempotency, "_LOCK_GRACE", timedelta(0))
    async with make_pool(settings, "tests", 2) as pool:

        async def works_long() -> Answer:
            with pytest.raises(Conflict) as refused:
                await act(pool, "key", must_not_begin)
            assert refused.value.code == "idempotency_key_in_flight"
            return await done()

        assert (await act(pool, "key", works_long)).body == b"done"
        assert (await act(pool, "key", must_not_begin)).body == b"done"


@EITHER
@pytest.mark.parametrize("ends", ["not stored", "failed"])
async def test_a_key_without_an_answer_to_repeat_may_be_used_again_at_once(
    rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch, act: Act, ends: str
) -> None:
    monkeypatch.setattr(idempotency, "_LOCK_GRACE", idempotency.IN_FLIGHT)  # nothing but its release frees the key

    async def first() -> Answer:
        if ends == "failed":
            raise Invalid("wrong", "It was wrong.")
        return Answer(409, b"not now", is_stored=False)

    async with make_pool(settings, "tests", 2) as pool:
        if ends == "failed":
            with pytest.raises(Invalid):
                await act(pool, "key", first)
        else:
            answer = await act(pool, "key", first)
            assert (answer.status_code, answer.body) == (409, b"not now")
        assert await kept(rows) == {}
        assert (await act(pool, "key", done)).body == b"done"
        assert (await act(pool, "key", must_not_begin)).body == b"done"


async def test_what_was_written_stays_although_the_answer_is_not_stored(rows: Rows, settings: Settings) -> None:
    """A refusal that a schedule shows, for example."""

    async def writes(connection: Connection) -> Answer:
        await idempotency.reserve(connection, "t", "written by the work", HASH)
        return Answer(409, b"not now", is_stored=False)

    async with make_pool(settings, "tests", 1) as pool:
        await once(pool, "t", "key", HASH, writes)
    assert (await kept(rows)).keys() == {("t", "written by the work")}


@EITHER
@pytest.mark.parametrize("key", ["", "a\nb", "x" * 256, "é"])
async def test_no_work_begins_under_a_key_that_is_none(rows: Rows, settings: Settings, act: Act, key: str) -> None:
    async with make_pool(settings, "tests", 1) as pool:
        with pytest.raises(Invalid) as refused:
            await act(pool, key, must_not_begin)
    assert refused.value.code == "idempotency_key_malformed"
    assert await kept(rows) == {}


@EITHER
async def test_a_first_answer_is_new_and_a_repeated_one_as_old_as_it_is(
    rows: Rows, settings: Settings, act: Act
) -> None:
    async with make_pool(settings, "tests", 1) as pool:
        assert (await act(pool, "key", done)).age == timedelta(0)
        await rows.connection.execute("UPDATE idempotency SET expires_at = expires_at - interval '100 seconds'")
        again = await act(pool, "key", must_not_begin)
    assert timedelta(seconds=100) <= again.age < timedelta(hours=1)
