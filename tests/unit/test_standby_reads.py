"""Which errors of a read show that the standby fails, so that everybody's reads go to the primary for some seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from fastapi import Request, Response

from leasehold.api.http.may_read_standby import _from_standby
from leasehold.api.process.replica_reads import Reading
from leasehold.db.replica import ReplicaUnusable


class NotEncodable(asyncpg.InterfaceError, ValueError):
    """As asyncpg raises it for a value that it cannot encode."""


@pytest.mark.parametrize(
    ("error", "is_over", "leaves"),
    [
        (OSError(), False, True),
        (ReplicaUnusable("too old"), False, True),
        (asyncpg.InterfaceError("connection is closed"), False, True),
        (OSError(), True, False),
        (NotEncodable("a value"), False, False),
        (asyncpg.UndefinedColumnError(), False, False),
    ],
)
async def test_only_an_error_of_the_standby_itself_sends_all_reads_to_the_primary(
    error: Exception, is_over: bool, leaves: bool
) -> None:
    assert await _errors_that_leave(error, has_failed=True, is_over=is_over) == ([error] if leaves else [])


@pytest.mark.parametrize("error", [OSError(), asyncpg.InterfaceError("connection is closed"), TimeoutError()])
async def test_an_error_of_the_primary_in_a_request_that_reads_from_the_standby_leaves_the_standby_in_use(
    error: Exception,
) -> None:
    """The primary decides about rates and keys also there. While it is away, the standby goes on to answer others."""
    assert await _errors_that_leave(error, has_failed=False, is_over=False) == []


async def _errors_that_leave(error: Exception, *, has_failed: bool, is_over: bool) -> list[BaseException]:
    """The errors for which a request that fails with `error` sends all reads to the primary."""
    left: list[BaseException] = []

    @contextmanager
    def reading() -> Iterator[Any]:
        yield SimpleNamespace(has_failed=has_failed, is_over=is_over, lag=None)

    async def handler(_request: Request) -> Response:
        raise error

    reads: Any = SimpleNamespace(reading=reading, replica=SimpleNamespace(leave=left.append))
    assert await _from_standby(Request({"type": "http"}), handler, reads) is None
    return left


class _Connection:
    """Connects to a standby that was read up to now, or does not connect."""

    def __init__(self, *, connects: bool) -> None:
        self._connects = connects

    async def __aenter__(self) -> SimpleNamespace:
        if not self._connects:
            raise OSError("refused")
        return SimpleNamespace(is_closed=lambda: False)

    async def __aexit__(self, *_error: object) -> None: ...


def _reading(*, connects: bool) -> Reading:
    async def check(_connection: object) -> float:
        return 0.0

    pool = SimpleNamespace(acquire=lambda: _Connection(connects=connects))
    replica: Any = SimpleNamespace(pool=pool, check=check)
    turns: Any = SimpleNamespace(turn=lambda _tenant: nullcontext())
    return Reading(replica, turns, seconds=60.0)


@pytest.mark.parametrize(
    ("connects", "error", "has_failed"),
    [(True, LookupError("gone"), False), (True, OSError("gone"), True), (False, OSError("refused"), True)],
)
async def test_a_reading_knows_whether_the_standby_has_failed(
    connects: bool, error: Exception, has_failed: bool
) -> None:
    reading = _reading(connects=connects)
    with pytest.raises(type(error), match=str(error)):
        async with reading.lend("acme"):
            raise error
    assert reading.has_failed == has_failed
    assert not _reading(connects=connects).has_failed
