"""What a worker started within the last minute, by queue, and its way to the list of queues."""

from __future__ import annotations

from uuid import UUID, uuid4

import asyncpg
import pytest

from leasehold.db import run_reads
from leasehold.settings import Settings
from leasehold.transitions import workers
from leasehold.worker.leases.heartbeat import Heartbeat
from leasehold.worker.leases.registration import Registration
from leasehold.worker.leases.starts import Starts
from tests.factories import Rows
from tests.support.clock import Clock


def test_a_start_counts_for_a_minute() -> None:
    clock = Clock()
    starts = Starts(clock)
    assert starts.per_minute() == {}
    starts.count("mail")
    clock.now += 30
    for queue in ("mail", "mail", "media"):
        starts.count(queue)
    clock.now += 29
    assert starts.per_minute() == {"mail": 3, "media": 1}
    clock.now += 1
    assert starts.per_minute() == {"mail": 2, "media": 1}
    clock.now += 30
    assert starts.per_minute() == {}


def test_a_second_that_takes_the_place_of_one_a_minute_ago_begins_at_nothing() -> None:
    clock = Clock()
    starts = Starts(clock)
    for _ in range(3):
        starts.count("mail")
    clock.now += 60
    starts.count("mail")
    assert starts.per_minute() == {"mail": 1}
    clock.now += 600
    starts.count("mail")
    assert starts.per_minute() == {"mail": 1}


def test_a_steady_rate_is_counted_whole() -> None:
    clock = Clock()
    starts = Starts(clock)
    for _ in range(600):
        clock.now += 0.25
        starts.count("mail")
    assert starts.per_minute()["mail"] == pytest.approx(240, abs=4)  # the window ends with a second that is not full


async def register(rows: Rows, *queues: str) -> UUID:
    worker = uuid4()
    await workers.register(rows.connection, worker, host="h", pid=1, version="v", queues=queues)
    return worker


async def rates(rows: Rows) -> dict[str, int | None]:
    return {row["queue"]: row["starts_per_minute"] for row in await run_reads.queues(rows.connection, 30.0)}


async def test_the_heartbeat_writes_the_starts_with_its_renewal(settings: Settings, rows: Rows) -> None:
    starts = Starts()
    registration = Registration(uuid4(), ["default", "mail"])
    await registration.write(rows.connection)
    assert await rates(rows) == {"default": 0, "mail": 0}
    heartbeat = Heartbeat(settings, registration, starts, lambda _error: None, lambda: None)
    assert isinstance(rows.connection, asyncpg.Connection)
    heartbeat._connection = rows.connection
    for queue in ("mail", "mail", "default"):
        starts.count(queue)
    await heartbeat._renew()
    assert await rates(rows) == {"default": 1, "mail": 2}


async def test_the_rate_of_a_queue_is_that_of_all_workers_seen_within_a_minute(rows: Rows) -> None:
    first, second, silent = [await register(rows, "default", "ext:acme:reports") for _ in range(3)]
    await workers.record_alive(rows.connection, first, {"default": 40})
    await workers.record_alive(rows.connection, second, {"default": 2})
    await workers.record_alive(rows.connection, silent, {"default": 1000})
    await rows.connection.execute("UPDATE worker SET seen_at = seen_at - interval '61 seconds' WHERE id = $1", silent)
    assert await rates(rows) == {"default": 42, "ext:acme:reports": None}
    await workers.ask_to_drain(rows.connection, second)  # what it started within the minute, it has started
    assert (await rates(rows))["default"] == 42
