"""Writes runs in the user's own transaction, for `task.submit_in` and `task.asubmit_in`. After the commit the app
publishes the runs' hints (messages that tell workers of due tasks), if the driver reports the commit and the app's
settings name the database. In all other cases a worker publishes the hints within a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

from leasehold.app.calls import Call
from leasehold.app.connection import Connections
from leasehold.app.drivers.adapters import Adapter, run_now
from leasehold.app.drivers.choosing import adapter_of, name_of_type
from leasehold.app.writing import Written, write
from leasehold.domain.errors import TransactionRefused
from leasehold.runtime.pacing import PIECE_SIZE
from leasehold.settings import Settings


def write_in(connection: Any, calls: Sequence[Call[Any]], connections: Connections) -> list[UUID]:
    """Write the runs of the calls on a connection of a sync driver. Returns their ids. Raises TypeError for a
    connection of an async driver.
    """
    adapter = adapter_of(connection)
    if not adapter.is_sync:
        raise TypeError(f"{name_of_type(connection)} needs an event loop: await task.asubmit_in(...)")
    return run_now(_write(adapter, calls, connections))


async def awrite_in(connection: Any, calls: Sequence[Call[Any]], connections: Connections) -> list[UUID]:
    """Write the runs of the calls on a connection of an async driver. Returns their ids. Raises TypeError for a
    connection of a sync driver.
    """
    adapter = adapter_of(connection)
    if adapter.is_sync:
        raise TypeError(f"{name_of_type(connection)} blocks the event loop: call task.submit_in(...)")
    return await _write(adapter, calls, connections)


def _settings_of(connections: Connections) -> Settings:
    """The app's settings. Raises TransactionRefused for an app that submits through the API."""
    if connections.is_over_http:
        raise TransactionRefused(
            "submit_in writes into Leasehold's tables by your connection, and this app submits over HTTP: submit after "
            "your commit with a key=, or give the app the database with app.use(Settings(...))"
        )
    return connections.settings


async def _write(adapter: Adapter, calls: Sequence[Call[Any]], connections: Connections) -> list[UUID]:
    settings = _settings_of(connections)
    # Raises TransactionRefused if the connection is in no transaction, or its transaction has failed.
    await adapter.check()
    connection: Any = adapter  # the adapter has the asyncpg methods that `write` uses
    all_written = Written()
    # Give `write` at most PIECE_SIZE calls at a time. `write` uses `jobs.submit`, which writes more jobs than that in
    # pieces, and lets the event loop run between two pieces. But a sync driver has no event loop.
    for start in range(0, len(calls), PIECE_SIZE):
        written = await write(
            connection, calls[start : start + PIECE_SIZE], settings.tenant, settings.retention_days * 86_400
        )
        all_written.ids += written.ids
        all_written.hints += written.hints
        # The concurrency limits of the runs. After the commit, `announce_soon` admits runs that wait at these limits,
        # if there is room.
        all_written.limits += written.limits
    # `announce_soon` opens the app's own connection. If the settings do not name `database_url`, that connection may
    # not reach the user's database.
    if "database_url" in settings.model_fields_set:
        adapter.on_commit(partial(connections.announce_soon, all_written))
    return all_written.ids
