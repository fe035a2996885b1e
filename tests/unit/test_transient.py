from __future__ import annotations

import asyncio

import asyncpg
import pytest

from leasehold.runtime.transient import TRY_AGAIN, may_try_again, until_answered


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.DiskFullError, asyncpg.OutOfMemoryError, asyncpg.TooManyConnectionsError, asyncpg.PostgresIOError,
        asyncpg.ReadOnlySQLTransactionError, asyncpg.CrashShutdownError, asyncpg.CannotConnectNowError,
        asyncpg.ConnectionDoesNotExistError, asyncpg.DeadlockDetectedError, asyncpg.SerializationError,
        ConnectionResetError, TimeoutError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError,
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


async def test_a_cancel_that_a_statement_turns_into_an_error_ends_the_repetition() -> None:
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise asyncpg.InterfaceError("closed") from None

    task = asyncio.create_task(until_answered(work, within=float("inf"), pause=0.0))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=60)
    assert task.cancelled()
    assert tries == 1


async def test_work_that_is_answered_late_is_repeated_until_then() -> None:
    errors = [OSError(), TimeoutError()]

    async def work() -> int:
        if errors:
            raise errors.pop()
        return 7

    assert await until_answered(work, within=60.0, pause=0.0) == 7
