"""The header `Idempotency-Key`. An endpoint's work and its stored answer commit in one transaction. A request that
repeats the key gets the stored answer. Endpoints that create something call `once`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, TypeAlias, TypeVar

from fastapi import Header

from leasehold.api.process import deadline
from leasehold.api.process.best_effort import best_effort
from leasehold.db.database import Connection, ConnectionSource
from leasehold.db.idempotency import Reservation, StoredAnswer, check_key, hold, is_answered, release, reserve, store
from leasehold.domain.errors import Conflict

#: The result of the argument `read` of `unless_repeated`.
T = TypeVar("T")
IdempotencyKey: TypeAlias = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="Same key and same body within 24 hours: the API repeats the first answer. Same key and another "
        "body: 422.",
        json_schema_extra={"pattern": "^[!-~]([ -~]{0,253}[!-~])?$"},
    ),
]

#: `once_over_transactions` gets this many seconds to store the answer or to release the key, even if its work has used
#: up the request's deadline.
_EXTRA_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request with a key. `age`: the time since the first answer; zero if this is the first answer.

    `is_stored`: whether the answer is stored, so that a repeated request gets it again. If it is not stored, a later
    request with the key runs `work` again. The writes of `work` are committed in both cases.
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
    """Run `work` inside a transaction and return its answer. If `key` was used before, return the first answer instead.
    `request_hash`: identifies the request's content; a key that was used with other content is refused.

    The reservation of the key commits before `work` begins. So the API refuses a second request with this key until the
    first request has ended. The reservation by itself counts for one second only. `hold` keeps it valid until the
    transaction ends.

    Raises Invalid and Conflict as `check_key` and `reserve` of leasehold.db.idempotency do, and any error of `work`.
    After an error of `work` nothing is stored, and the key may be used again.
    """
    check_key(key)
    async with pool.acquire() as connection:
        if key is None:
            async with connection.transaction():
                return await work(connection)
        reservation = await reserve(connection, tenant_id, key, request_hash)
        if isinstance(reservation, StoredAnswer):
            return Answer(reservation.status_code, reservation.body, reservation.age)
        try:
            async with connection.transaction():
                await hold(connection, reservation)
                answer = await work(connection)
                if answer.is_stored:
                    await store(connection, reservation, answer.status_code, answer.body)
        except BaseException:
            await _release(connection, reservation)
            raise
        if not answer.is_stored:
            await _release(connection, reservation)
        return answer


async def once_over_transactions(
    pool: ConnectionSource,
    tenant_id: str,
    key: str | None,
    request_hash: bytes,
    work: Callable[[], Awaitable[Answer]],
) -> Answer:
    """Like `once`, but `work` itself commits several transactions, for example one for each of many jobs. This function
    holds no connection while the work runs.

    If the process dies during the work, a part of the work may be done. Then the key stays reserved for a minute. After
    this minute a repeated request does the whole work again. Raises the same errors as `once`.
    """
    check_key(key)
    if key is None:
        return await work()
    async with pool.acquire() as connection:
        # `is_held` is false, because the work has several transactions, and none of them holds the reservation.
        reservation = await reserve(connection, tenant_id, key, request_hash, is_held=False)
    if isinstance(reservation, StoredAnswer):
        return Answer(reservation.status_code, reservation.body, reservation.age)
    try:
        answer = await work()
        if answer.is_stored:
            with deadline.extra_time(_EXTRA_SECONDS):
                async with pool.acquire() as connection:
                    await store(connection, reservation, answer.status_code, answer.body)
    except BaseException:
        await _release_on_new_connection(pool, reservation)
        raise
    if not answer.is_stored:
        await _release_on_new_connection(pool, reservation)
    return answer


async def _release_on_new_connection(pool: ConnectionSource, reservation: Reservation) -> None:
    work = "the release of an idempotency key, which stays reserved for a minute"
    with best_effort(work), deadline.extra_time(_EXTRA_SECONDS):
        async with pool.acquire() as connection:
            await release(connection, reservation)


async def is_repeated(pool: ConnectionSource, tenant_id: str, key: str | None) -> bool:
    """Whether an answer is stored for the key. If so, the endpoint checks nothing, and repeats this answer even if rows
    have changed since.
    """
    if key is None:
        return False
    async with pool.acquire() as connection:
        return await is_answered(connection, tenant_id, key)


async def unless_repeated(
    pool: ConnectionSource, tenant_id: str, key: str | None, read: Callable[[], Awaitable[T]]
) -> T | None:
    """Call `read`, and return its result, which is the rows that the work needs. But if an answer is stored for the key
    (`is_repeated`), return None. The stored answer may expire before `once` looks for it. Then the work begins without
    its rows, and must raise `key_has_expired`.
    """
    return None if await is_repeated(pool, tenant_id, key) else await read()


def key_has_expired() -> Conflict:
    """The error of an endpoint whose stored answer expired after `is_repeated` had found it. The endpoint has checked
    nothing, because it expected to repeat the answer. So it cannot do the work.
    """
    return Conflict("idempotency_key_in_flight", "The key has just expired: try again.", retry_after=1)


async def _release(connection: Connection, reservation: Reservation) -> None:
    with best_effort("the release of an idempotency key, which stays reserved for a second"):
        await release(connection, reservation)
