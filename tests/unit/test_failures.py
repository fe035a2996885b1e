"""What the exception of an attempt becomes: the worker must be able to settle whatever a handler raises."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from leasehold.domain.errors import (
    ObjectMissing,
    ObjectTooLarge,
    Permanent,
    Retryable,
    StoreError,
    StoreUnavailable,
)
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.runtime.foreign_errors import call_in_thread, contained, text_of
from leasehold.worker.attempts.directories import Directories
from leasehold.worker.attempts.failures import as_step_error
from leasehold.worker.attempts.workflows import _returns_coroutine


class Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError("no detail")


def test_an_error_whose_text_cannot_be_read_is_named_by_its_type() -> None:
    assert text_of(ValueError("odd")) == "ValueError: odd"
    assert text_of(Unprintable()) == "Unprintable: its message cannot be read"
    assert "Unprintable" in str(contained(Unprintable()))
    error = as_step_error(Unprintable())
    assert (error.code, error.retryable) == ("handler_error", True)


async def test_a_function_that_raises_stop_iteration_in_a_thread_hangs_nobody() -> None:
    def function() -> None:
        next(iter(()))

    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await call_in_thread(function)
        assert await call_in_thread(max, 1, 2) == 2


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (ObjectMissing("k"), "input_missing", False),
        (ObjectTooLarge("k"), "input_too_large", False),
        (StoreUnavailable("k"), "store_unavailable", True),
        (StoreError("k"), "store_unavailable", True),
    ],
)
def test_an_object_that_will_not_come_fails_for_good_and_an_outage_does_not(
    error: StoreError, code: str, *, retryable: bool
) -> None:
    step_error = as_step_error(error)
    assert (step_error.code, step_error.retryable) == (code, retryable)


def test_a_step_error_made_with_an_exception_has_its_text() -> None:
    cause: Any = ValueError("no such card")
    assert Permanent("refused", cause).message == "no such card"
    assert Retryable(cause).message == "no such card"


def test_a_delay_that_is_no_timedelta_is_refused_where_the_handler_raises() -> None:
    after: Any = 5
    with pytest.raises(TypeError, match="timedelta, not an int"):
        Retryable("later", after=after)
    assert Retryable("later", after=timedelta(seconds=5)).after == timedelta(seconds=5)


def test_a_handler_that_cannot_be_asked_to_stop_is_no_error(tmp_path: Path) -> None:
    directories, lease = Directories(tmp_path), Lease(new_id(), new_id(), 1, 1, 0.0)
    directories.request_stop(lease)  # it has no directory
    directory = directories.make(lease)
    directories.request_stop(lease)
    assert (directory / "cancel").exists()
    (directory / "cancel").unlink()
    (directory / "cancel").symlink_to(directory / "cancel")  # a loop: nothing can be created there
    directories.request_stop(lease)


def test_an_object_with_an_async_call_is_awaited() -> None:
    class Asynchronous:
        async def __call__(self) -> None: ...

    class Plain:
        def __call__(self) -> None: ...

    async def function() -> None: ...

    assert all(_returns_coroutine(partial(call)) for call in (function, Asynchronous(), Asynchronous().__call__))
    assert not any(_returns_coroutine(partial(call)) for call in (Plain(), len, dict, lambda: None))
