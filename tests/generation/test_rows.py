"""What the statements of generations leave alone: each case here is kept out by one guard alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.housekeeping import _WITHDRAWALS
from leasehold.pipelines.generation.operations import withdraw, withdraw_adopted
from leasehold.pipelines.generation.pipeline import generation
from leasehold.pipelines.generation.rows import NewGeneration
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted
from leasehold.transitions.withdrawals import keep_orders
from tests.generation.conftest import Client

OURS = "pipeline = 'generation'"
WITHDRAWAL = "pipeline = 'generation_withdrawal'"


async def job_of(client: Client, task_id: str) -> UUID:
    return UUID((await client.look(task_id))["job_id"])


async def test_a_generation_is_its_tenants_alone_and_consumed_once(client: Client, connection: Connection) -> None:
    task_id = await client.ordered("a lighthouse")
    job_id = await job_of(client, task_id)
    assert await generations.find(connection, "rival", task_id, "image") is None
    assert await generations.counts(connection, "rival", None) == []
    assert await generations.withdrawn(connection, job_id, "rival", uuid4()) is None
    assert await generations.withdrawn(connection, job_id, "acme", uuid4()) is not None
    asked = [await generations.consume(connection, tenant, job_id) for tenant in ("rival", "acme", "acme")]
    assert asked == [False, True, False]


async def test_two_tenants_may_use_the_same_task_id(client: Client, connection: Connection) -> None:
    task_id = await client.ordered("a lighthouse", task_id="order-1")
    new = {
        tenant: NewGeneration(NewJob(generation, tenant), task_id, "image", "s", b"x") for tenant in ("rival", "acme")
    }
    assert await generations.existing_order(connection, new["rival"]) is None
    with pytest.raises(Conflict):
        await generations.existing_order(connection, new["acme"])


async def test_an_order_is_written_although_a_deleted_one_still_has_its_task_id(
    client: Client, connection: Connection
) -> None:
    """The request has looked for the task_id before the other order was written and its job deleted."""
    task_id = await client.ordered("a lighthouse", task_id="order-1")
    earlier = await job_of(client, task_id)
    request_hash = await connection.fetchval("SELECT request_hash FROM generation WHERE job_id = $1", earlier)
    new = NewGeneration(NewJob(generation, "acme"), task_id, "image", "s", request_hash)
    assert await generations.create(connection, new) == earlier
    assert await connection.fetchval("SELECT count(*) FROM job") == 1
    await connection.execute("UPDATE job SET keep_seconds = 0 WHERE id = $1", earlier)
    assert isinstance(await generations.create(connection, new), Submitted)
    assert await generations.existing_order(connection, new) == new.job.id


async def test_statistics_count_up_to_their_bound_and_of_one_server(
    client: Client, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in ("south", "south", "north"):
        await client.ordered("a lighthouse", server_id=server)
    assert [row["n"] for row in await generations.counts(connection, "acme", "south")] == [2]
    monkeypatch.setattr(generations, "MAX_COUNTED", 1)
    assert [row["n"] for row in await generations.counts(connection, "acme", None)] == [1]


async def test_a_source_image_is_dropped_by_its_tenant_and_if_nobody_has_kept_it_longer(connection: Connection) -> None:
    kept_until = await generations.keep_source(connection, "acme", "key", 3, timedelta(hours=1))
    assert kept_until is not None
    await generations.drop_sources(connection, "rival", {"key": kept_until})
    await generations.drop_sources(connection, "acme", {"key": kept_until - timedelta(seconds=1)})
    assert await generations.expired_sources(connection) == []
    assert not await generations.condemn_source(connection, "key")
    await generations.drop_sources(connection, "acme", {"key": kept_until})
    assert await generations.expired_sources(connection) == ["key"]
    await generations.forget_sources(connection, ["key"])
    assert await generations.expired_sources(connection) == ["key"], "it was not condemned, so its object is there"


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ("SELECT", True),
        (f"UPDATE job SET expires_at = NULL WHERE {OURS}", False),
        (f"UPDATE job SET pipeline = 'another' WHERE {OURS}", False),
        ("UPDATE result SET value = '{}'", False),
        ("UPDATE result SET task_id = (SELECT id FROM task WHERE step = 'poll')", False),
        (f"UPDATE job SET tenant_id = 'rival' WHERE {WITHDRAWAL}", False),
        (f"UPDATE job SET pipeline = 'another' WHERE {WITHDRAWAL}", False),
        (f"UPDATE job SET exclusive_key = 'another' WHERE {WITHDRAWAL}", False),
        (f"UPDATE job SET status = 'succeeded', finished_at = clock_timestamp() WHERE {WITHDRAWAL}", False),
    ],
    ids=["as it is", "not expired", "no generation", "no order", "of another step", "another tenant",
         "no withdrawal", "of another order", "ended"],
)  # fmt: skip
async def test_the_unfinished_withdrawal_of_a_generation_that_goes_keeps_its_order(
    client: Client, connection: Connection, generation_settings: Settings, change: str, *, is_kept: bool
) -> None:
    job_id = await job_of(client, await client.ordered("a lighthouse"))
    await withdraw(connection, generation_settings, job_id, "acme")
    await connection.execute("INSERT INTO result SELECT id, '{\"ref\": \"g1\"}' FROM task WHERE step = 'submit'")
    await connection.execute(f"UPDATE job SET expires_at = clock_timestamp() WHERE {OURS}")
    await connection.execute(change)
    await keep_orders(connection, [job_id], _WITHDRAWALS)
    orders = await connection.fetch("SELECT params -> 'order' ->> 'ref' AS ref FROM job WHERE params ? 'job_id'")
    assert [row["ref"] for row in orders] == ["g1" if is_kept else None]


@pytest.mark.parametrize("change", [f"UPDATE job SET tenant_id = 'rival' WHERE {WITHDRAWAL}", "DELETE FROM generation"])
async def test_a_withdrawal_is_written_of_ones_own_generation_unless_there_is_one(
    client: Client, connection: Connection, generation_settings: Settings, change: str
) -> None:
    job_id = await job_of(client, await client.ordered("a lighthouse"))
    assert await withdraw(connection, generation_settings, job_id, "rival") == []
    assert len(await withdraw(connection, generation_settings, job_id, "acme")) == 1
    assert await withdraw(connection, generation_settings, job_id, "acme") == []
    await connection.execute(change)
    assert len(await withdraw(connection, generation_settings, job_id, "acme")) == ("rival" in change)


class _WithdrawalEndsMeanwhile:
    """A connection. After its first query the withdrawal ends, and has withdrawn nothing."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetchval(self, *query: Any) -> Any:
        answer = await self._connection.fetchval(*query)
        ended = "UPDATE job SET status = 'succeeded', finished_at = clock_timestamp()"
        await self._connection.execute(f"{ended} WHERE {WITHDRAWAL} AND finished_at IS NULL")
        return answer


async def test_no_order_is_adopted_whose_withdrawal_ends_meanwhile(
    client: Client, connection: Connection, generation_settings: Settings
) -> None:
    job_id = await job_of(client, await client.ordered("a lighthouse"))
    await withdraw(connection, generation_settings, job_id, "acme")
    assert await withdraw_adopted(connection, generation_settings, job_id, "acme") == []
    meanwhile: Any = _WithdrawalEndsMeanwhile(connection)
    with pytest.raises(Conflict) as refused:
        await withdraw_adopted(meanwhile, generation_settings, job_id, "acme")
    assert refused.value.code == "order_being_withdrawn"
    assert len(await withdraw_adopted(connection, generation_settings, job_id, "acme")) == 1
