"""Makes any number of finished jobs: copies of one job that the platform wrote, with ascending ids."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Table

from bench.by_hand import complete, fill, terms
from bench.testbed import Installation
from leasehold.db.database import connect
from leasehold.db.tables import job, task
from leasehold.transitions import claims


def _copy(table: Table, source: str, replacements: Mapping[str, str]) -> str:
    """The statement that makes $1 copies of the row of `table` whose column `source` is $2, with ascending ids."""
    columns = [column.name for column in table.columns]
    values = ", ".join(replacements.get(name, f"original.{name}") for name in columns)
    return (
        f"INSERT INTO {table.name} ({', '.join(columns)}) SELECT {values}"
        " FROM (SELECT ('01900000' || lpad(to_hex(g), 24, '0'))::uuid AS id FROM generate_series(1, $1::int) AS g) AS n"
        f" CROSS JOIN {table.name} AS original WHERE original.{source} = $2"
    )


_COPY_JOBS = _copy(job, "id", {"id": "n.id"})
_COPY_TASKS = _copy(task, "job_id", {"id": "n.id", "job_id": "n.id"})


async def grow(installation: Installation, finished: int) -> None:
    """Make one finished job and `finished` copies of it, then vacuum, as autovacuum does in an installation."""
    await fill(installation, 1)
    connection = await connect(installation.settings, "bench")
    try:
        (first,) = await claims.claim_due(connection, terms(), ["default"], 1)
        await complete(connection, [first])
    finally:
        await connection.close()
    async with installation.connection() as superuser:
        await superuser.execute(_COPY_JOBS, finished, first.job_id)
        await superuser.execute(_COPY_TASKS, finished, first.job_id)
        await superuser.execute("VACUUM ANALYZE job, task")
