"""Reads and writes saved views, for the API and the console. A saved view is a filter of jobs that a client or a
person of a tenant has saved under a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.domain.ids import new_id

#: A list shows at most this many views, because it has no pages. The settings allow a tenant no more views than this.
MAX_VIEWS = 500

_COLUMNS = "id, name, filter, saved_by, saved_at"


async def list_views(connection: Connection, tenant_id: str) -> Sequence[Row]:
    """The tenant's views, by name."""
    return await connection.fetch(
        f"SELECT {_COLUMNS} FROM saved_view WHERE tenant_id = $1 ORDER BY lower(name), id LIMIT {MAX_VIEWS}", tenant_id
    )


async def exists(connection: Connection, tenant_id: str, name: str) -> bool:
    """Whether the tenant has a view with this name."""
    is_present: bool = await connection.fetchval(
        "SELECT EXISTS (SELECT FROM saved_view WHERE tenant_id = $1 AND name = $2)", tenant_id, name
    )
    return is_present


async def save(connection: Connection, tenant_id: str, name: str, job_filter: str, saved_by: str) -> Row:
    """Save the view. If the tenant has a view with this name, that view gets the new filter and `saved_by`."""
    row = await connection.fetchrow(
        "INSERT INTO saved_view (id, tenant_id, name, filter, saved_by) VALUES ($1, $2, $3, $4, $5)"
        " ON CONFLICT (tenant_id, name) DO UPDATE"
        " SET filter = excluded.filter, saved_by = excluded.saved_by, saved_at = clock_timestamp()"
        f" RETURNING {_COLUMNS}",
        new_id(), tenant_id, name, job_filter, saved_by,
    )  # fmt: skip
    assert row is not None
    return row


async def delete(connection: Connection, tenant_id: str, view_id: UUID) -> str | None:
    """Delete the view. Returns its name; None: there is no such view."""
    name: str | None = await connection.fetchval(
        "DELETE FROM saved_view WHERE id = $1 AND tenant_id = $2 RETURNING name", view_id, tenant_id
    )
    return name
