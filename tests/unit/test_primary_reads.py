"""What an attempt reads comes from a server that takes writes, however long that is away: a standby may lack the newest
rows, and without them the attempt would do its work twice.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.worker.attempts.inline import InlineAttempt
from leasehold.worker.attempts.inputs import sources_of
from leasehold.worker.attempts.primary import primary_connection
from leasehold.worker.attempts.workflows import _Port
from leasehold.worker.leases.held_lease import HeldLease

LEASE = Lease(uuid4(), uuid4(), 2, attempt=1, trusted_until=0.0)


class Server(SimpleNamespace):
    """A connection to it. A held lease keeps connections in a set, so each is equal to itself alone."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def server(*rows: dict[str, Any], standby: bool = False) -> Any:
    """Its answer to every query."""

    async def fetch(*_args: Any) -> Any:
        return list(rows)

    async def fetchrow(*_args: Any) -> Any:
        return rows[0] if rows else None

    async def fetchval(*_args: Any) -> Any:
        return next(iter(rows[0].values())) if rows else None

    reported = SimpleNamespace(in_hot_standby="on" if standby else "off", default_transaction_read_only="off")
    return Server(get_settings=lambda: reported, fetch=fetch, fetchrow=fetchrow, fetchval=fetchval)


class Servers:
    """A pool, and where its connections lead one after the other; None: nowhere."""

    def __init__(self, *servers: Any) -> None:
        self.left = list(servers)
        self.lent: list[Any] = []

    async def acquire(self) -> Any:
        if (lent := self.left.pop(0)) is None:
            raise ConnectionRefusedError
        self.lent.append(lent)
        return lent

    async def release(self, connection: Any) -> None:
        self.lent.remove(connection)

    def all_returned(self) -> bool:
        return not self.left and not self.lent


def held_by(*, trusted: bool = True) -> HeldLease:
    return HeldLease(replace(LEASE, trusted_until=math.inf if trusted else 0.0), renew_until=math.inf)


def port_of(servers: Servers, *, trusted: bool = True) -> _Port:
    async def fetch_bytes(key: str, **_checks: Any) -> bytes:
        return key.encode()

    workflows: Any = SimpleNamespace(pool=servers, store=SimpleNamespace(fetch_bytes=fetch_bytes), max_result_bytes=9)
    attempt: Any = SimpleNamespace(handler=("p", "s"), tenant_id="t", lease=LEASE, is_last=False)
    slot: Any = None
    return _Port(workflows, attempt, held_by(trusted=trusted), slot)


def attempt_of(servers: Servers, *, trusted: bool = True) -> InlineAttempt:
    pipeline = Pipeline("p", module=__name__, steps=[Step("s")])
    claimed: Any = SimpleNamespace(lease=LEASE, job_id=uuid4(), params={})
    parts, pool = SimpleNamespace(), servers
    any_pool: Any = pool
    any_parts: Any = parts
    return InlineAttempt(
        claimed, pipeline, pipeline.steps[0], held_by(trusted=trusted), any_parts, any_pool, any_parts, opened=None,
        directories=any_parts, workflows=any_parts, announcer=any_parts, slot=any_parts,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["note", "value", "joined", "item"])
async def test_an_attempt_reads_what_a_standby_lacks_yet(method: str) -> None:
    """Without its note, the attempt would order a second time; without the results of its parts, it would fan out."""
    servers = Servers(server(standby=True), None, server({"value": {"ordered": 7}}))
    attempt = attempt_of(servers)
    answer = await (attempt.value("first") if method == "value" else getattr(attempt, method)())
    assert answer == ([{"ordered": 7}] if method == "joined" else {"ordered": 7})
    assert servers.all_returned()


async def test_a_step_reads_the_outputs_that_a_standby_lacks_yet() -> None:
    row = {"step": "first", "name": "n", "key": "k", "size": 1, "sha256": "0", "content_type": "text/plain"}
    servers = Servers(server(standby=True), server(row))
    pipeline = Pipeline("p", module=__name__, steps=[Step("first"), Step("s", needs=("first",), reads=("first",))])
    claimed, pool = SimpleNamespace(job_id=uuid4()), servers
    any_claimed: Any = claimed
    any_pool: Any = pool
    (source,) = await sources_of(any_pool, held_by(), pipeline, pipeline.steps[1], any_claimed)
    assert (source.name, source.key) == ("n", "k")
    assert servers.all_returned()


async def test_the_connection_of_an_attempt_leads_to_a_server_that_takes_writes() -> None:
    primary = server()
    servers = Servers(None, server(standby=True), primary)
    async with attempt_of(servers).connection() as connection:
        assert connection is primary
    assert servers.all_returned()
    servers = Servers(primary)
    with pytest.raises(KeyError):
        await _fails(attempt_of(servers))
    assert servers.all_returned()


async def _fails(attempt: InlineAttempt) -> None:
    async with attempt.connection():
        raise KeyError


async def test_a_workflow_has_the_result_of_a_step_that_a_standby_lacks_yet() -> None:
    servers = Servers(server(standby=True), None, server({"key": "the result", "sha256": "0"}))
    assert await port_of(servers).fetch(uuid4(), "result", is_run=False) == b"the result"
    assert servers.all_returned()


async def test_a_workflow_has_the_signal_that_a_standby_lacks_yet() -> None:
    servers = Servers(server(standby=True), server({"id": 7, "name": "go", "payload": 1, "at": None}))
    signal = await port_of(servers).signal("go", 6)
    assert signal is not None
    assert signal.id == 7


async def test_a_standby_that_has_no_row_of_the_lease_is_not_believed() -> None:
    """A lease that only seems lost would be charged to the task."""
    servers = Servers(server(standby=True), server())
    with pytest.raises(LeaseLost):
        await port_of(servers).read([("", number) for number in range(100)])
    assert servers.all_returned()


async def test_nobody_waits_for_the_server_beyond_the_lease() -> None:
    with pytest.raises(LeaseLost):
        await port_of(Servers(None), trusted=False).signal("go", 6)
    with pytest.raises(LeaseLost):
        await attempt_of(Servers(server(standby=True)), trusted=False).note()


async def test_a_handler_that_was_given_up_while_it_waited_for_a_connection_gets_none() -> None:
    """Nobody would cut it any more, and the pool would lack it for as long as the handler runs on."""
    servers, held = Servers(server({"value": 1})), held_by()
    acquire = servers.acquire

    async def acquire_late() -> Any:
        held.give_up()
        return await acquire()

    servers.acquire = acquire_late  # type: ignore[method-assign]
    pool: Any = servers
    with pytest.raises(LeaseLost):
        async with primary_connection(pool, held):
            raise AssertionError("the handler has a connection")
    assert servers.all_returned()
