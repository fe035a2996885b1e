"""Which errors of a read show that the standby fails, so that everybody's reads go to the primary for some seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from fastapi import Request, Response

from leasehold.api.http.may_read_standby import _from_standby
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
    left: list[BaseException] = []

    @contextmanager
    def reading() -> Iterator[Any]:
        yield SimpleNamespace(is_over=is_over, lag=None)

    async def handler(_request: Request) -> Response:
        raise error

    reads: Any = SimpleNamespace(reading=reading, replica=SimpleNamespace(leave=left.append))
    assert await _from_standby(Request({"type": "http"}), handler, reads) is None
    assert left == ([error] if leaves else [])
