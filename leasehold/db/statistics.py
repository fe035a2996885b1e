"""Renews PostgreSQL's statistics of tables that grow quickly.

A session plans each statement once (`PLANNER_SETTINGS` in database.py). If the statistics say that a table has hardly
any rows, PostgreSQL chooses plans that read a whole index for each row of a batch. The statistics say this after each
vacuum of an installation that is nearly idle. If a burst of jobs follows, the statements would become slower with each
new row, until autovacuum analyses the table, about a minute later. So this module renews the statistics earlier. New
statistics make all sessions plan again.
"""

from __future__ import annotations

import structlog

from leasehold.db.database import Connection

log = structlog.get_logger(__name__)


async def analyze_grown_tables(connection: Connection) -> list[str]:
    """Analyse each table of the platform that has more than doubled since its statistics were made. Returns the names
    of the analysed tables. Migration 0051 has the exact bounds. A table that somebody vacuums or analyses at this
    moment is left to the next call.
    """
    names: list[str] = await connection.fetchval("SELECT analyze_grown_tables()")
    if names:
        log.info("tables_analyzed", tables=names)
    return names
