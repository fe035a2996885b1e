"""Lines and chunks that a worker cannot write any more are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Lock
from typing import Any

import pytest
from prometheus_client import REGISTRY

from leasehold.db.database import Connection
from leasehold.settings import Settings
from leasehold.telemetry.emissions import Emissions
from leasehold.worker.attempts.chunk_writer import ChunkWriter

Items = tuple[int, list[bytes]]


def lost() -> float:
    return REGISTRY.get_sample_value("leasehold_attempt_items_lost_total", {"kind": "test"}) or 0


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_items_that_are_not_written_when_the_writer_closes_are_counted(turns: int) -> None:
    """Also those that wait for an earlier write of their attempt."""

    async def append(connection: Connection, chunks: Sequence[Items]) -> None:
        """Never called: nothing starts the writer."""

    def chunk_of(_claimed: Any, first_number: int, items: list[bytes]) -> Items:
        return first_number, items

    before = lost()
    writer: ChunkWriter[Emissions, Items] = ChunkWriter(Settings(_env_file=None), "test", chunk_of, append)
    emissions = Emissions(10, 1000, Lock())
    writer.open(claimed=None, buffer=emissions)  # type: ignore[arg-type]  # only `chunk_of` reads it
    for number in range(3):
        emissions.emit("a")
        if number < turns:
            await writer.turn()
            await asyncio.sleep(0)
    await writer.close()
    assert lost() == before + 3
