"""Lends connections to requests. A tenant can hold all connections except one, which stays free for other tenants.
Tenants that wait get connections in turn. The module also bounds how many bulk writes (requests that write many jobs)
run at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar

from leasehold.api.process import deadline, replica_reads
from leasehold.api.process.turnstile import Turnstile
from leasehold.db.database import Connection, Pool
from leasehold.db.pool_sizes import pool_of_api
from leasehold.domain.errors import TooMany, Unavailable
from leasehold.runtime.transient import TRY_AGAIN, may_try_again
from leasehold.settings import Settings
from leasehold.telemetry.outages import DATABASE

#: The Retry-After of a refused request.
_RETRY_SECONDS = 1.0
#: After this many seconds, a bulk write tries no further job. If PostgreSQL does not write a job in time, the bulk
#: write goes on with the next job, because perhaps only this one job is locked. But if PostgreSQL is down or slow, no
#: job is written in time, and the bulk write must still end, because the console must get its answer while the
#: reservation of its idempotency key counts (`IN_FLIGHT` of db/idempotency.py).
BULK_SECONDS = 30.0
#: The reason that a client sees for a job that a bulk write has not tried because BULK_SECONDS were over.
NOT_TRIED = "The jobs before took too long, so nothing was tried."
#: The tenant of the current request. Empty for a request without a key.
_tenant: ContextVar[str] = ContextVar("tenant", default="")


def set_tenant(tenant_id: str) -> None:
    """From now on, count each connection that the current request acquires as one of this tenant's connections."""
    _tenant.set(tenant_id)


def current_tenant() -> str:
    """The tenant of the current request. Empty for a request without a key."""
    return _tenant.get()


class TenantPool:
    """Lends the connections of `pool` to requests. `size`: how many connections the pool has. `patience`: the seconds
    for which a request waits for a connection.
    """

    def __init__(self, pool: Pool, size: int, patience: float) -> None:
        self._pool = pool
        self._turns = Turnstile(at_most=size, per_tenant=max(1, size - 1), patience=patience, refusal=_busy)

    @property
    def lent(self) -> int:
        """How many connections requests hold now."""
        return self._turns.inside

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """Lend a connection for the block, until the request's deadline. If the request reads from the standby
        (replica_reads.py), it is a connection to the standby. Raises Unavailable `busy` if no connection becomes free
        within `patience` seconds, or one of TRY_AGAIN (runtime/transient.py) if PostgreSQL does not answer now.
        """
        reading = replica_reads.current()
        lending = deadline.acquired_in_time(self._lend()) if reading is None else reading.lend(_tenant.get())
        async with lending as connection:
            yield connection

    @asynccontextmanager
    async def _lend(self) -> AsyncIterator[Connection]:
        async with self._turns.turn(_tenant.get()), self._pool.acquire() as connection:
            yield connection


class BulkWrites:
    """Bounds how many bulk writes (batches, backfills, bulk replays and bulk settlements) run at once, so that
    connections stay free for other requests.
    """

    def __init__(self, settings: Settings) -> None:
        self._per_tenant = settings.bulk_writes_per_tenant
        self._turns = Turnstile(
            at_most=min(settings.bulk_writes_at_once, pool_of_api(settings) - 1),
            per_tenant=self._per_tenant,
            waiting=settings.bulk_writes_waiting,
            patience=settings.bulk_writes_wait_seconds,
            refusal=self._refusal,
        )

    def turn(self, tenant_id: str) -> AbstractAsyncContextManager[None]:
        """Hold a turn for one bulk write. The request has no deadline from now on, but each statement keeps its own
        limit.

        Raises TooMany `bulk_writes_waiting` immediately if too many bulk writes of the tenant wait already, and after
        `bulk_writes_wait_seconds` if no turn became free.
        """
        deadline.current().lift()
        return self._turns.turn(tenant_id)

    def _refusal(self) -> TooMany:
        return TooMany(
            "bulk_writes_waiting",
            "Too many batches, backfills or replays are being written, of this tenant or of all. Try again soon.",
            policy="bulk-writes",
            at_most=self._per_tenant,
            retry_after=_RETRY_SECONDS,
        )


class NotInTime(Unavailable):
    """PostgreSQL did not write a job of a bulk write in time. The job may be locked, or PostgreSQL may be down."""

    def __init__(self) -> None:
        super().__init__(
            "database_unavailable", "PostgreSQL did not answer in time, perhaps because the job is locked."
        )


@contextmanager
def in_time(part: str) -> Iterator[None]:
    """Use this around the write of one job of a bulk write. If PostgreSQL does not write the job in time, or not at all
    (an error of TRY_AGAIN in runtime/transient.py, after which a repetition may succeed), this raises NotInTime in
    place of the error. `part`: the part of the API that the log of an outage names.
    """
    try:
        yield
    except TRY_AGAIN as error:
        if not may_try_again(error):
            raise
        DATABASE.record_error(error, part)
        raise NotInTime from error


def _busy() -> Unavailable:
    return Unavailable("busy", "Too many requests wait for the database. Try again soon.", retry_after=_RETRY_SECONDS)
