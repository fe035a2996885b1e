"""What a workflow reads on a connection of its own comes from a server that takes writes, however long that is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease
from leasehold.worker.attempts.workflows import _Port


def server(*, standby: bool, row: Any) -> Any:
    async def fetchrow(*_args: Any) -> Any:
        return row

    reported = SimpleNamespace(in_hot_standby="on" if standby else "off", default_transaction_read_only="off")
    return SimpleNamespace(get_settings=lambda: reported, fetchrow=fetchrow)


def port_of(servers: list[Any], *, trusted: bool = True) -> _Port:
    """`servers`: what the pool lends, one after the other; None: no server answers."""

    @asynccontextmanager
    async def acquire() -> AsyncIterator[Any]:
        if (lent := servers.pop(0)) is None:
            raise ConnectionRefusedError
        yield lent

    async def fetch_bytes(key: str, **_checks: Any) -> bytes:
        return key.encode()

    workflows: Any = SimpleNamespace(
        pool=SimpleNamespace(acquire=acquire), store=SimpleNamespace(fetch_bytes=fetch_bytes)
    )
    lease = Lease(uuid4(), uuid4(), 1, attempt=1, trusted_until=0.0)
    attempt: Any = SimpleNamespace(handler=("p", "s"), tenant_id="t", lease=lease)
    held: Any = SimpleNamespace(trusted=lambda: trusted)
    slot: Any = None
    return _Port(workflows, attempt, held, slot)


async def test_the_result_of_a_step_is_there_though_a_standby_lacks_it_yet() -> None:
    servers = [
        server(standby=True, row=None),
        None,
        server(standby=False, row={"key": "the result", "sha256": "0"}),
    ]
    assert await port_of(servers).fetch(uuid4(), "result") == b"the result"
    assert not servers


async def test_a_signal_is_there_though_a_standby_lacks_it_yet() -> None:
    row = {"id": 7, "name": "go", "payload": 1, "at": None}
    servers = [server(standby=True, row=None), server(standby=False, row=row)]
    signal = await port_of(servers).signal("go", 6)
    assert signal is not None
    assert signal.id == 7


async def test_nobody_waits_for_the_server_beyond_the_lease() -> None:
    with pytest.raises(LeaseLost):
        await port_of([None], trusted=False).signal("go", 6)


async def test_a_standby_that_has_no_row_of_the_lease_is_not_believed() -> None:
    """A lease that only seems lost would be charged to the task."""
    servers = [server(standby=True, row=None), server(standby=False, row=None)]
    with pytest.raises(LeaseLost):
        await port_of(servers).read([("", number) for number in range(100)])
    assert not servers
