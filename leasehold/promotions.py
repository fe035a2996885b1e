"""Which conversions were promoted, and by whom at the moment: one request at a time copies a job's artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from leasehold.database import Connection

#: A request that died lets the next one try after this.
LEASE_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Turn:
    """The right to copy; `until` tells it from a later one."""

    tenant_id: str
    job_id: UUID
    until: datetime


_BEGIN = """
-- promotion_begin
UPDATE conversion SET promoting_until = clock_timestamp() + make_interval(secs => $3)
WHERE job_id = $1 AND tenant_id = $2 AND promoted IS NULL
  AND (promoting_until IS NULL OR promoting_until < clock_timestamp())
RETURNING promoting_until
"""
_FINISH = """
-- promotion_finish
UPDATE conversion SET promoted = $4, promoting_until = NULL
WHERE job_id = $1 AND tenant_id = $2 AND promoting_until = $3 AND promoted IS NULL
RETURNING job_id
"""
_GIVE_UP = """
-- promotion_give_up
UPDATE conversion SET promoting_until = NULL WHERE job_id = $1 AND tenant_id = $2 AND promoting_until = $3
"""


async def begin(connection: Connection, tenant_id: str, job_id: UUID) -> Turn | None:
    """None: it is promoted already, or another request is at it."""
    until = await connection.fetchval(_BEGIN, job_id, tenant_id, LEASE_SECONDS)
    return None if until is None else Turn(tenant_id, job_id, until)


async def finish(connection: Connection, turn: Turn, keys: Sequence[str]) -> bool:
    """False when the turn was lost: then another request decides."""
    done = await connection.fetchval(_FINISH, turn.job_id, turn.tenant_id, turn.until, list(keys))
    return done is not None


async def give_up(connection: Connection, turn: Turn) -> None:
    await connection.execute(_GIVE_UP, turn.job_id, turn.tenant_id, turn.until)
