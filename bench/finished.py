"""Finished jobs in any number: copies of one that the platform wrote, with ids in the order of time."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Table

from bench.by_hand import complete, fill, terms
from bench.testbed import Installation
from leasehold.db.database import connect
from leasehold.db.tables import job, task
from leasehold.transitions import claims


def _copy(table: Table, source: str, instead: Mapping[str, str]) -> str:
    """$1 copies of the row of `table` whose `source` is $2, with ids in order."""
    columns = [column.name for column in table.columns]
    taken = ", ".join(instead.get(name, f"one.{name}") for name in columns)
    return (
        f"INSERT INTO {table.name} ({', '.join(columns)}) SELECT {taken}"
        " FROM (SELECT ('01900000' || lpad(to_hex(g), 24, '0'))::uuid AS id FROM generate_series(1, $1::int) AS g) AS n"
        f" CROSS JOIN {table.name} AS one WHERE one.{source} = $2"
    )


_COPY_JOBS = _copy(job, "id", {"id": "n.id"})
_COPY_TASKS = _copy(task, "job_id", {"id": "n.id", "job_id": "n.id"})


async def grow(installation: Installation, finished: int) -> None:
    """So many finished jobs beside the first, vacuumed as autovacuum does in life."""
    await fill(installation, 1)
    connection = await connect(installation.settings, "bench")
    try:
        (first,) = await claims.claim_due(connection, terms(), ["default"], 1)
        await complete(connection, [first])
    finally:
        await connection.close()
    async with installation.connection() as unhurried:
        await unhurried.execute(_COPY_JOBS, finished, first.job_id)
        await unhurried.execute(_COPY_TASKS, finished, first.job_id)
        await unhurried.execute("VACUUM ANALYZE job, task")
