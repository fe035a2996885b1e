"""What a handler raises inside asyncio.TaskGroup arrives as a group, and means what it means alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from leasehold.app.handling import FinalErrors
from leasehold.app.process_child import _failure_of
from leasehold.app.processes import error_of
from leasehold.client import external
from leasehold.client.external import ExternalWorker
from leasehold.domain.errors import Cancelled, LeaseLost, ObjectExists, Permanent, Retryable, deciding
from leasehold.transitions.settlements import Completion, Failure
from leasehold.worker.sandbox.child import _frame_of_error
from tests.worker.test_runner import Attempt

LATER = Retryable("away", code="away", after=timedelta(minutes=7))
HOPELESS = Permanent("hopeless", "this will never work")
PLAIN, OTHER = ValueError("plain"), OSError("other")


def group(*errors: BaseException) -> BaseException:
    """As nested TaskGroups raise them."""
    return BaseExceptionGroup("inner", [BaseExceptionGroup("outer", list(errors))])


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([PLAIN], PLAIN),
        ([PLAIN, LATER], LATER),
        ([LATER, PLAIN, HOPELESS], HOPELESS),
        ([HOPELESS, Cancelled()], Cancelled),
        ([Cancelled(), HOPELESS, LeaseLost()], LeaseLost),
        ([Cancelled(), ObjectExists("key")], ObjectExists),
        ([PLAIN, OTHER], ExceptionGroup),
    ],
)
def test_one_error_of_a_group_decides(errors: list[BaseException], expected: Any) -> None:
    decides = deciding(group(*errors))
    assert type(decides) is expected if isinstance(expected, type) else decides is expected
    assert deciding(PLAIN) is PLAIN


async def settlement(error: BaseException) -> Any:
    async def handler(*_: Any) -> Completion:
        raise error

    return await Attempt(handler).settlement()


async def test_a_group_settles_its_attempt_as_its_error_does() -> None:
    failure = await settlement(group(PLAIN, HOPELESS))
    assert isinstance(failure, Failure)
    assert (failure.code, failure.message, failure.retryable) == ("hopeless", "this will never work", False)
    failure = await settlement(group(LATER))
    assert (failure.code, failure.delay, failure.retryable) == ("away", 420.0, True)
    failure = await settlement(group(Cancelled()))
    assert failure.code == "handler_cancelled"
    failure = await settlement(group(PLAIN))
    assert (failure.code, failure.message) == ("handler_error", "ValueError: plain")
    assert await settlement(group(LeaseLost(), PLAIN)) is None


def test_a_group_crosses_from_a_process_as_its_error_does() -> None:
    from_process: Any = error_of(_failure_of(group(LATER)))
    assert (type(from_process), from_process.code, from_process.after) == (Retryable, "away", LATER.after)
    assert "inner" in from_process.trace
    frame = _frame_of_error(group(PLAIN, HOPELESS))
    assert (frame.error, frame.code) == ("permanent", "hopeless")
    assert "plain" in frame.traceback  # the other errors are in the log
    assert _frame_of_error(group(Cancelled())).error == "cancelled"


@pytest.mark.parametrize("raised", [PLAIN, group(PLAIN), group(OTHER, PLAIN)])
def test_an_error_after_which_no_attempt_follows_does_so_in_a_group(raised: BaseException) -> None:
    with pytest.raises(Permanent, match="ValueError: plain"), FinalErrors((ValueError,)):
        raise raised


@pytest.mark.parametrize("stronger", [LeaseLost(), Cancelled()])
def test_a_lost_lease_or_a_cancel_in_the_group_is_stronger(stronger: BaseException) -> None:
    raised = group(PLAIN, stronger)
    with pytest.raises(BaseExceptionGroup), FinalErrors((ValueError,)):
        raise raised


@pytest.mark.parametrize(
    ("error", "is_cancelled", "expected"),
    [
        (group(HOPELESS), False, ("fail", "hopeless", False)),
        (group(PLAIN), False, ("fail", "handler_error", True)),
        (group(Cancelled()), True, ("acknowledge-cancel", None, None)),
        (group(Cancelled()), False, ("fail", "handler_cancelled", False)),
    ],
)
async def test_a_group_settles_the_task_of_an_external_worker(
    error: BaseException, *, is_cancelled: bool, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[tuple[Any, ...]] = []

    async def settle(_worker: Any, _task: Any, verb: str, **body: Any) -> None:
        posted.append((verb, body.get("code"), body.get("retryable")))

    async def handle(_task: Any) -> None:
        raise error

    monkeypatch.setattr(ExternalWorker, "_settle", settle)
    task: Any = type("Task", (), {"cancelled": is_cancelled, "log_failure": lambda *_: None})()
    worker = external.ExternalWorker("http://127.0.0.1:1", "lh_key", queues=["q"])
    async with worker:
        await worker._run(handle, task)
        assert posted == [expected]
        lost = group(LeaseLost())

        async def loses(_task: Any) -> None:
            raise lost

        with pytest.raises(LeaseLost):
            await worker._run(loses, task)
