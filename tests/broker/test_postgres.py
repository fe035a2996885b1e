"""Without a broker: publishing always succeeds, and workers are woken soon, but never flooded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest
from pydantic import SecretStr

from leasehold.broker import Broker, make_broker, postgres
from leasehold.settings import Settings
from tests.broker.conftest import hints, until
from tests.broker.inbox import Inbox

OpenPostgres = Callable[..., Awaitable[Broker]]


@pytest.fixture
async def open_postgres(database_url: str) -> AsyncIterator[OpenPostgres]:
    opened: list[Broker] = []

    async def open_one(url: str = database_url, *, connected: bool = True) -> Broker:
        broker = make_broker(Settings(_env_file=None, broker="postgres", database_url=SecretStr(url)))
        opened.append(broker)
        await broker.open()
        if connected:
            await until(lambda: broker.connected)
        return broker

    yield open_one
    for broker in opened:
        await broker.close()


async def listening(broker: Broker, inbox: Inbox, *queues: str) -> None:
    """Listen, and take the first wake-ups, which come for every queue."""
    await broker.consume(dict.fromkeys(queues, 10), inbox.put, inbox.wake)
    for queue in queues:
        assert await inbox.next_wake() == queue


async def terminate(url: str, role: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = $1 AND datname = current_database()",
        f"leasehold {role}",
    )
    await connection.close()


async def test_a_worker_is_woken_for_the_queue_that_has_work(open_postgres: OpenPostgres) -> None:
    api, worker, inbox = await open_postgres(), await open_postgres(), Inbox()
    await listening(worker, inbox, "default", "media")
    assert await api.publish(hints(1, "media")) == [True]
    assert await inbox.next_wake() == "media"
    assert inbox.is_empty
    assert worker.last_delivery_at is not None


async def test_a_thousand_hints_are_one_notification_and_the_last_is_not_lost(
    open_postgres: OpenPostgres,
) -> None:
    api, worker, inbox = await open_postgres(), await open_postgres(), Inbox()
    await listening(worker, inbox, "media", "last")
    for _ in range(100):
        assert all(await api.publish(hints(10, "media")))
    await api.publish(hints(1, "last"))
    while await inbox.next_wake() != "last":
        pass
    assert inbox.waiting_wakes == 0


async def test_what_was_published_just_before_closing_is_told(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CLOSE_SECONDS", 60.0)  # a busy machine may keep PostgreSQL from its processor
    api, worker, inbox = await open_postgres(), await open_postgres(), Inbox()
    await listening(worker, inbox, "media")
    await api.publish(hints(1, "media"))
    assert await inbox.next_wake() == "media"
    await api.publish(hints(1, "media"))
    await api.close()
    assert await inbox.next_wake() == "media"


async def test_queues_of_others_wake_nobody(open_postgres: OpenPostgres) -> None:
    broker, inbox = await open_postgres(), Inbox()
    await listening(broker, inbox, "media")
    await broker.publish([*hints(1, "other"), *hints(1, "media")])
    assert await inbox.next_wake() == "media"
    assert inbox.waiting_wakes == 0


async def test_a_lost_listener_comes_back_and_wakes_every_queue(open_postgres: OpenPostgres, database_url: str) -> None:
    broker, inbox = await open_postgres(), Inbox()
    await listening(broker, inbox, "default", "media")
    await terminate(database_url, "listen")
    assert {await inbox.next_wake(), await inbox.next_wake()} == {"default", "media"}
    await broker.publish(hints(1, "media"))
    assert await inbox.next_wake() == "media"


async def test_a_lost_notifier_tells_later_what_it_could_not_tell(
    open_postgres: OpenPostgres, database_url: str
) -> None:
    broker, inbox = await open_postgres(), Inbox()
    await listening(broker, inbox, "media")
    await terminate(database_url, "notify")
    await until(lambda: not broker.connected)
    assert await broker.publish(hints(3)) == [True] * 3
    assert await inbox.next_wake() == "media"


async def test_a_watchdog_can_force_a_new_listener(open_postgres: OpenPostgres) -> None:
    broker, inbox = await open_postgres(), Inbox()
    await listening(broker, inbox, "media")
    broker.rebuild_consumer()
    assert await inbox.next_wake() == "media"


async def test_without_a_database_publishing_does_not_raise_and_closing_leaves_no_task(
    open_postgres: OpenPostgres,
) -> None:
    before = asyncio.all_tasks()
    away = await open_postgres("postgresql://nobody:secret-word@127.0.0.1:1/none", connected=False)
    here = await open_postgres()
    await here.consume({"media": 10}, Inbox().put, Inbox().wake)
    await away.consume({"media": 10}, Inbox().put, Inbox().wake)
    assert await away.publish(hints(2)) == [True, True]
    assert not away.connected
    await here.close()
    await away.close()
    await until(lambda: not asyncio.all_tasks() - before)
    assert "secret-word" not in repr(away.describe())


async def test_the_description_names_the_server(open_postgres: OpenPostgres) -> None:
    broker = await open_postgres()
    told = broker.describe()
    assert told["broker"] == "postgres"
    assert told["version"].split(".")[0].isdigit()
    assert told["publishing"] is True
