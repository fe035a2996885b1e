"""`batch`: one call of the function serves the runs of several attempts, and each run keeps its own fate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, List  # noqa: UP035 - people write it

import pytest

from leasehold import App, Batch, Cancelled, DeclarationError, Permanent, Retry, TaskFailed
from leasehold.app.batches import Batches
from leasehold.app.run import Run
from leasehold.db.database import Connection
from leasehold.runtime.foreign_errors import exits_contained
from tests.app.conftest import Serve

SECONDS = 60.0
LONG = timedelta(seconds=20)
AT_ONCE = Retry(times=2, delay=timedelta(0), never=(KeyError,))
app = App("batches")
calls: list[list[Any]] = []
started = asyncio.Event()


@app.task(batch=Batch(size=4, wait=LONG), retry=AT_ONCE)
async def double(numbers: list[int]) -> list[int]:
    calls.append(numbers)
    if 13 in numbers:
        raise ValueError("thirteen")
    return [2 * n for n in numbers]


@app.task(batch=Batch(size=100))
def thread_names(words: list[str]) -> list[str]:
    calls.append(words)
    return [threading.current_thread().name for _ in words]


@app.task(batch=Batch(size=2, wait=LONG), retry=AT_ONCE)
async def each(numbers: list[int]) -> list[int | Any]:
    return [KeyError(n) if n < 0 else n for n in numbers]


@app.task(batch=Batch(size=1), retry=AT_ONCE)
async def too_few(numbers: list[int]) -> list[int]:
    return []


@pytest.fixture(autouse=True)
def _use(using: Callable[..., App]) -> None:
    using(app)
    calls.clear()
    started.clear()


async def results_of(runs: list[Run[Any]]) -> list[Any]:
    return [await run for run in runs]


async def test_a_full_batch_is_one_call_and_each_run_has_its_own_result(serve: Serve, connection: Connection) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        runs = await double.asubmit_many([1, 2, 3, 4])
        assert await results_of(runs) == [2, 4, 6, 8]
    assert sorted(calls[0]) == [1, 2, 3, 4]
    assert len(calls) == 1
    assert await connection.fetchval("SELECT count(*) FROM task WHERE status = 'succeeded' AND attempt = 1") == 4


async def test_a_batch_that_does_not_fill_is_called_after_its_wait_in_a_thread(serve: Serve) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        (name,) = await results_of(await thread_names.asubmit_many(["one"]))
    assert name.startswith("handler-")
    assert calls == [["one"]]


async def test_tenants_never_share_a_call(serve: Serve, using: Callable[..., App]) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        await double.asubmit_many([1, 2])
        using(app, tenant="other")
        others = await double.asubmit_many([5, 6, 7, 8])
        assert await results_of(others) == [10, 12, 14, 16]
        assert [sorted(call) for call in calls] == [[5, 6, 7, 8]]


async def test_an_item_that_always_fails_spends_no_others_attempts(serve: Serve, connection: Connection) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        good, bad, *more = await double.asubmit_many([1, 13, 3, 4])
        assert await results_of([good, *more]) == [2, 6, 8]
        with pytest.raises(TaskFailed, match="thirteen"):
            await bad
    assert all(len(call) == 1 for call in calls[1:])
    assert await connection.fetchval("SELECT array_agg(attempt ORDER BY attempt) FROM task") == [2, 2, 2, 3]


async def test_an_error_in_the_list_is_of_its_item_alone(serve: Serve, connection: Connection) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        good, bad = await each.asubmit_many([1, -1])
        assert await good == 1
        with pytest.raises(TaskFailed, match="KeyError: -1"):
            await bad
    assert await connection.fetchval("SELECT max(attempt) FROM task") == 1


async def test_another_number_of_results_fails_for_good(serve: Serve) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        with pytest.raises(TaskFailed, match=r"batch_mismatch.*got 1 item and returned 0 results"):
            await (await too_few.asubmit(1))


async def test_a_call_stops_only_when_no_attempt_waits_for_it_any_more() -> None:
    batches, two = Batches(), Batch(size=2, wait=LONG)

    async def hold(items: list[int]) -> list[int]:
        calls.append(items)
        started.set()
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            calls.append(["stopped"])
            raise
        return items

    async with asyncio.timeout(SECONDS):
        left = asyncio.create_task(batches.result_of("t", "me", two, 0, hold))
        await asyncio.sleep(0)
        left.cancel()  # before the call: nobody calls for its item
        await asyncio.wait([left])
        attempts = [asyncio.create_task(batches.result_of("t", "me", two, n, hold)) for n in (1, 2)]
        await started.wait()
        for attempt in attempts:
            await asyncio.sleep(0.01)
            assert calls == [[1, 2]]
            attempt.cancel()
            await asyncio.wait([attempt])
        while len(calls) < 2:
            await asyncio.sleep(0.01)
    assert calls == [[1, 2], ["stopped"]]


def test_a_run_without_a_server_is_a_batch_of_one() -> None:
    assert double.local(4) == 8
    assert thread_names.local("x") == threading.current_thread().name
    with pytest.raises(KeyError):
        each.local(-3)
    with pytest.raises(Permanent, match="returned 0 results"):
        too_few.local(1)


async def test_a_worker_keeps_nothing_of_a_batch_that_has_ended() -> None:
    async def call_all(items: list[int]) -> list[int]:
        return items

    batches = Batches()
    for tenant in ("acme", "globex"):
        assert await batches.result_of("t", tenant, Batch(size=1), 7, call_all) == 7
    assert batches._collectors == {}


async def test_an_item_whose_result_is_a_stop_iteration_holds_up_no_other() -> None:
    async def call_all(_items: list[int]) -> list[Any]:
        return [StopIteration("odd"), 2]

    batches = Batches()
    async with asyncio.timeout(SECONDS):
        outcomes = await asyncio.gather(
            *(batches.result_of("t", "acme", Batch(size=2, wait=LONG), n, call_all) for n in range(2)),
            return_exceptions=True,
        )
    assert [type(outcome) for outcome in outcomes] == [RuntimeError, int]


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({}, "takes one parameter, a list"),
        ({"process": True}, "takes one parameter, a list"),
    ],
)
def test_a_function_of_one_item_is_refused_at_import(terms: dict[str, Any], words: str) -> None:
    def single(number: int) -> int:
        raise NotImplementedError

    def unlisted(numbers: list[int]) -> int:
        raise NotImplementedError

    def untyped(numbers: List) -> list[int]:  # type: ignore[type-arg]  # noqa: UP006 - that is the test
        raise NotImplementedError

    def untyped_results(numbers: list[int]) -> List:  # type: ignore[type-arg]  # noqa: UP006 - as above
        raise NotImplementedError

    def named(*, numbers: list[int]) -> list[int]:
        raise NotImplementedError

    def starred(*numbers: list[int]) -> list[int]:
        raise NotImplementedError

    refused: list[tuple[Any, str]] = [
        (single, words),
        (untyped, words),
        (unlisted, r"returns a list\["),
        (untyped_results, r"returns a list\["),
        (named, "by their position"),
        (starred, "by their position"),
    ]
    for function, sentence in refused:
        with pytest.raises(DeclarationError, match=rf"test_batch\.py:\d+: .*{sentence}"):
            App("a").task(batch=Batch(size=2), **terms)(function)


def test_a_batch_in_a_child_is_refused_at_import() -> None:
    def listed(numbers: list[int]) -> list[int]:
        raise NotImplementedError

    elsewhere: list[dict[str, Any]] = [{"process": True}, {"isolated": True}]
    for terms in elsewhere:
        with pytest.raises(DeclarationError, match="a batch runs in the worker"):
            App("a").task(batch=Batch(size=2), **terms)(listed)


def test_a_batch_that_waits_until_its_attempts_have_no_time_left_is_refused_at_import() -> None:
    """Each run that found no others timed out before its call."""

    def listed(numbers: list[int]) -> list[int]:
        raise NotImplementedError

    batch = Batch(size=2, wait=timedelta(seconds=5))
    with pytest.raises(DeclarationError, match=r"test_batch\.py:\d+: .*waits 5 s for others, and its timeout is 5 s"):
        App("a").task(batch=batch, timeout=timedelta(seconds=5))(listed)
    App("a").task(batch=batch, timeout=timedelta(seconds=6))(listed)


@pytest.mark.parametrize("terms", [{"size": 0}, {"size": 10**6}, {"size": 1, "wait": timedelta(hours=1)}])
def test_a_batch_of_no_size_or_of_hours_is_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError):
        Batch(**terms)


@pytest.mark.parametrize("raised", [asyncio.CancelledError, Cancelled])
async def test_items_do_not_wait_for_ever_for_a_call_that_was_cancelled_inside(raised: type[BaseException]) -> None:
    async def call_all(_items: list[int]) -> list[int]:
        raise raised

    batches = Batches()
    async with asyncio.timeout(SECONDS):
        outcomes = await asyncio.gather(
            *(batches.result_of("t", "acme", Batch(size=2, wait=LONG), n, call_all) for n in range(2)),
            return_exceptions=True,
        )
    assert [type(outcome) for outcome in outcomes] == [raised, raised]


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_a_call_that_exits_fails_its_items_and_ends_no_event_loop(raised: type[BaseException]) -> None:
    async def call_all(_items: list[int]) -> list[int]:
        raise raised

    async with asyncio.timeout(SECONDS):
        with pytest.raises(RuntimeError, match=raised.__name__):
            await Batches().result_of("t", "acme", Batch(size=1, wait=LONG), 1, call_all)


async def test_a_task_of_a_call_that_exits_fails_its_items_and_ends_no_event_loop() -> None:
    async def exits() -> None:
        raise SystemExit(0)

    async def call_all(_items: list[int]) -> list[int]:
        await asyncio.gather(exits())
        return []

    with exits_contained():
        async with asyncio.timeout(SECONDS):
            with pytest.raises(RuntimeError, match="SystemExit"):
                await Batches().result_of("t", "acme", Batch(size=1, wait=LONG), 1, call_all)
