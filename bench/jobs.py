"""Waits until jobs have finished, and reads from their rows when they ran. All times are of the database's clock."""

from __future__ import annotations

import asyncio
from datetime import datetime

from bench.testbed import Installation
from leasehold.embedded.process import Server

_LOOK_SECONDS = 0.25
_PATIENCE_SECONDS = 600.0


async def until_finished(installation: Installation, *servers: Server) -> None:
    """Wait until no job is unfinished. Raises RuntimeError if a job did not succeed, EmbeddedError if one of
    `servers` ended.
    """
    async with installation.connection() as connection, asyncio.timeout(_PATIENCE_SECONDS):
        await connection.execute("SET enable_seqscan = off")  # this poll must not load the measured server
        while await connection.fetchval("SELECT 1 FROM job WHERE finished_at IS NULL LIMIT 1"):
            for server in servers:
                if not server.running:
                    raise server.failure("ended in the middle of a measurement")
            await asyncio.sleep(_LOOK_SECONDS)
        if failed := await connection.fetchval("SELECT count(*) FROM job WHERE status <> 'succeeded'"):
            raise RuntimeError(f"{failed} jobs did not succeed")


async def now(installation: Installation) -> datetime:
    async with installation.connection() as connection:
        at: datetime = await connection.fetchval("SELECT clock_timestamp()")
        return at


async def seconds_of(installation: Installation, since: datetime) -> float:
    """The seconds from the first claim to the last completion, of the jobs that were submitted after `since`."""
    async with installation.connection() as connection:
        seconds: float = await connection.fetchval(
            "SELECT extract(epoch FROM max(t.finished_at) - min(t.started_at))::float8"
            " FROM task t JOIN job j ON j.id = t.job_id WHERE j.created_at > $1",
            since,
        )
        return seconds
