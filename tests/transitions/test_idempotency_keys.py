"""The rows of idempotency keys: a reservation is one tenant's and one key's, and ends as its row says."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold.db import idempotency
from leasehold.db.idempotency import Reservation, StoredAnswer
from leasehold.domain.errors import Conflict, Invalid
from tests.factories import Rows

HASH = idempotency.fingerprint(b"POST /v1/runs", b"{}")
NEIGHBOURS = (("t", "other"), ("other", "key"))


async def reserved(rows: Rows, tenant: str = "t", key: str = "key") -> Reservation:
    answer = await idempotency.reserve(rows.connection, tenant, key, HASH)
    assert isinstance(answer, Reservation)
    return answer


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


async def test_a_key_without_an_answer_is_not_answered(rows: Rows) -> None:
    await reserved(rows)
    assert not await idempotency.is_answered(rows.connection, "t", "key")
    with pytest.raises(Conflict):
        await idempotency.reserve(rows.connection, "t", "key", HASH)


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
