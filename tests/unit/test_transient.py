from __future__ import annotations

import asyncpg
import pytest

from leasehold.runtime.transient import TRY_AGAIN, may_try_again


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.DiskFullError, asyncpg.OutOfMemoryError, asyncpg.TooManyConnectionsError, asyncpg.PostgresIOError,
        asyncpg.ReadOnlySQLTransactionError, asyncpg.CrashShutdownError, asyncpg.CannotConnectNowError,
        asyncpg.ConnectionDoesNotExistError, asyncpg.DeadlockDetectedError, asyncpg.SerializationError,
        ConnectionResetError, TimeoutError,
    ],
)  # fmt: skip
def test_what_a_server_in_trouble_says_is_repeated(error: type[Exception]) -> None:
    assert may_try_again(error("no"))


@pytest.mark.parametrize(
    "error", [asyncpg.UniqueViolationError, asyncpg.PostgresSyntaxError, asyncpg.UndefinedTableError]
)
def test_what_would_fail_again_is_not(error: type[Exception]) -> None:
    assert not isinstance(error("no"), TRY_AGAIN)
    assert not may_try_again(error("no"))
