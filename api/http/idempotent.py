"""`Idempotency-Key`: an endpoint's work and the stored answer commit in one transaction. A request that repeats the key
gets the stored answer. Endpoints that create something call `once`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, TypeAlias

from fastapi import Header

from leasehold.db.database import Connection, ConnectionSource
from leasehold.db.idempotency import Reservation, StoredAnswer, hold, is_answered, release, reserve, store
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry.outages import DATABASE

IdempotencyKey: TypeAlias = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="Same key and same body within 24 hours: the API repeats the first answer. Same key and another "
        "body: 422.",
        json_schema_extra={"pattern": "^[!-~]([ -~]{0,253}[!-~])?$"},
    ),
]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request with a key. `age`: the time since the first answer; zero for a fresh answer. `is_stored`:
    a repeated request gets this answer again. An answer that is not stored leaves the key free for another request; the
    writes of `work` are committed in either case.
    """

    status_code: int
    body: bytes
    age: timedelta = timedelta(0)
    is_stored: bool = True


async def once(
    pool: ConnectionSource,
    tenant_id: str,
    key: str | None,
    request_hash: bytes,
    work: Callable[[Connection], Awaitable[Answer]],
) -> Answer:
    """Run `work` inside a transaction and return its answer; or return the first answer if `key` was used before.

    Raises Invalid and Conflict as `leasehold.db.idempotency.reserve`, and whatever `work` raises: then nothing is
    stored, and the key may be used again.
    """
    async with pool.acquire() as connection:
        if key is None:
            async with connection.transaction():
                return await work(connection)
        reserved = await reserve(connection, tenant_id, key, request_hash)
        if isinstance(reserved, StoredAnswer):
            return Answer(reserved.status_code, reserved.body, reserved.age)
        try:
            async with connection.transaction():
                await hold(connection, reserved)
                answer = await work(connection)
                if answer.is_stored:
                    await store(connection, reserved, answer.status_code, answer.body)
        except BaseException:
            await _release(connection, reserved)
            raise
        if not answer.is_stored:
            await _release(connection, reserved)
        return answer


async def is_repeated(pool: ConnectionSource, tenant_id: str, key: str | None) -> bool:
    """Whether an answer is stored for the key. Then the request needs no checks, even if rows have changed since."""
    if key is None:
        return False
    async with pool.acquire() as connection:
        return await is_answered(connection, tenant_id, key)


async def _release(connection: Connection, reserved: Reservation) -> None:
    try:
        await release(connection, reserved)
    except TRY_AGAIN as error:
        DATABASE.record_error(error, "idempotency keys, which stay reserved for a second")
