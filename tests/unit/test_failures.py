"""What the exception of an attempt becomes: the worker must be able to settle whatever a handler raises."""

from __future__ import annotations

import asyncio
import errno
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leasehold.domain.errors import (
    ChildCrashed,
    ObjectCorrupt,
    ObjectMissing,
    ObjectTooLarge,
    Permanent,
    Retryable,
    StepError,
    StepTimeout,
    StoreAbsent,
    StoreError,
    StoreUnavailable,
    Unforeseen,
)
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Step
from leasehold.runtime.foreign_errors import call_in_thread, contained, text_of
from leasehold.transitions.settlements import Failure
from leasehold.worker.attempts.directories import Directories
from leasehold.worker.attempts.failures import as_step_error, failure_of, traceback_of
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
        (ObjectCorrupt("k"), "input_corrupt", True),
        (StoreAbsent("k"), "store_not_configured", False),
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


def test_a_full_disk_is_named_and_the_step_is_tried_again() -> None:
    error = as_step_error(OSError(errno.ENOSPC, "no space left on device"))
    assert (error.code, error.retryable) == ("disk_full", True)
    assert as_step_error(OSError(errno.EIO, "input/output error")).code == "handler_error"


LADDER = (timedelta(minutes=1), timedelta(hours=1), timedelta(days=1))


def failed(error: StepError, *, errors: int = 0, crashes: int = 0, timeout_is_final: bool = False) -> Failure:
    claimed: Any = SimpleNamespace(lease=Lease(new_id(), new_id(), 1, 1, 0.0), errors=errors, crashes=crashes)
    return failure_of(claimed, Step("s", timeout_is_final=timeout_is_final), error, LADDER)


@pytest.mark.parametrize(
    ("error", "before", "cause", "delay"),
    [
        (Retryable("m"), {}, "error", LADDER[0]),
        (Retryable("m"), {"errors": 1}, "error", LADDER[1]),
        (Retryable("m"), {"errors": 1, "crashes": 2}, "error", LADDER[1]),
        (StepTimeout("step_timeout", "m"), {"errors": 2, "crashes": 1}, "timeout", LADDER[2]),
        (ChildCrashed("oom", "m"), {"errors": 2}, "crash", LADDER[0]),
        (ChildCrashed("oom", "m"), {"errors": 2, "crashes": 1}, "crash", LADDER[1]),
        (Unforeseen("m"), {"errors": 2}, "error", timedelta(seconds=4)),
    ],
)
def test_a_failure_waits_by_the_failures_of_its_own_kind(
    error: StepError, before: dict[str, Any], cause: str, delay: timedelta
) -> None:
    """A crash is no error: a task that errs often has all its crashes left."""
    failure = failed(error, **before)
    assert (failure.cause, failure.retryable) == (cause, True)
    assert delay.total_seconds() / 2 <= failure.delay <= delay.total_seconds()


def test_a_handler_that_names_a_delay_gets_this_delay() -> None:
    for after in (timedelta(0), timedelta(seconds=5), timedelta(days=40)):
        assert failed(Retryable("m", after=after), errors=1).delay == after.total_seconds()


@pytest.mark.parametrize("timeout_is_final", [False, True])
def test_what_cannot_succeed_is_not_tried_again_and_a_time_limit_only_where_the_step_says_so(
    *, timeout_is_final: bool
) -> None:
    retried = {
        type(error): failed(error, timeout_is_final=timeout_is_final).retryable
        for error in (Permanent("c", "m"), StepTimeout("c", "m"), ChildCrashed("c", "m"), Retryable("m"))
    }
    assert retried == {Permanent: False, StepTimeout: not timeout_is_final, ChildCrashed: True, Retryable: True}


def test_an_error_is_told_without_secrets_and_no_longer_than_postgresql_takes_it() -> None:
    failure = failed(Retryable("x" * 5000, code="c" * 500))
    assert (failure.message, failure.code) == ("x" * 2000, "c" * 200)
    secret = "lh_0123456789ab_" + "s" * 40
    half = failed(Retryable("x" * 1960 + " " + secret)).message  # the cut goes through the secret
    assert "sss" not in half
    assert failed(Retryable("x" + chr(0))).message.startswith("x")
    assert chr(0) not in failed(Retryable("x" + chr(0))).message


def cause_of(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as raised:
        return raised


def test_a_traceback_has_the_causes_of_an_error_and_begins_in_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    def outer(*, explicit: bool) -> None:
        try:
            inner()
        except KeyError as cause:
            if explicit:
                raise ValueError("outer") from cause
            raise ValueError("outer")  # noqa: B904 - the context is what is tested

    def inner() -> None:
        raise KeyError("inner")

    for explicit in (True, False):
        with pytest.raises(ValueError, match="outer") as found:
            outer(explicit=explicit)
        text = traceback_of(found.value)
        assert "KeyError: 'inner'" in text
        assert "in inner" in text
        assert "in outer" in text
    error = Retryable("m")
    error.trace = "the child's traceback"
    assert traceback_of(error) == "the child's traceback"
    assert "Retryable: m" in traceback_of(cause_of(Retryable("m")))


def test_a_traceback_leaves_the_workers_frames_out_and_has_them_all_where_no_other_is() -> None:
    """As a pipeline's handler is called, and where the worker itself has refused something."""
    worker: dict[str, Any] = {}
    source = "def call(handler):\n    return handler()\n\ndef refuse():\n    raise ValueError('refused')\n"
    exec(compile(source, traceback_of.__code__.co_filename.replace("failures", "inline"), "exec"), worker)  # noqa: S102

    def handler() -> None:
        raise KeyError("of the handler")

    def chained() -> None:
        try:
            worker["refuse"]()
        except ValueError as cause:
            raise KeyError("of the handler") from cause

    def stack_of(call: Any) -> str:
        with pytest.raises((KeyError, ValueError)) as found:
            worker["call"](call)
        own_frame = found.value.__traceback__
        assert own_frame is not None
        return traceback_of(found.value.with_traceback(own_frame.tb_next))

    assert "in handler" in stack_of(handler)
    assert "in call" not in stack_of(handler)
    assert "in call" in stack_of(worker["refuse"])
    assert "in refuse" in stack_of(worker["refuse"])
    assert "ValueError: refused" in stack_of(chained)
    with pytest.raises(ValueError, match="refused") as refused:
        worker["refuse"]()
    assert refused.value.__traceback__ is not None
    cause = refused.value.with_traceback(refused.value.__traceback__.tb_next)

    def later() -> None:
        raise KeyError("of the handler") from cause

    assert "ValueError: refused" in stack_of(later)
    assert "in refuse" not in stack_of(later)  # as far as the handler is concerned, it explains nothing
