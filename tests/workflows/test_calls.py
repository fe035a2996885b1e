"""`ctx.call`: what is recorded before a function is called, what when it has ended, and what goes on beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold import Cancelled, Context, Permanent, TaskFailed
from leasehold.domain.errors import ResultUnreadable
from leasehold.domain.storable import as_stored, encode_storable
from leasehold.transitions.workflows.reading import Entry, Journal, StoredSignal
from leasehold.transitions.workflows.records import Call
from leasehold.workflows.driver import Driver
from tests.workflows import shop
from tests.workflows.conftest import Runs, Start
from tests.workflows.test_running import MEMORY

AT = datetime(2026, 1, 1, tzinfo=UTC)
CHILD = UUID(int=7)
#: The characters that PostgreSQL stores.
TEXT = st.characters(exclude_characters="\0", exclude_categories=["Cs"])


class Port:
    """A journal that takes its time. `cancels`: the run is being cancelled, and its workflow does not know.
    `called`: each function that was called, and what the journal had then.
    """

    def __init__(self, *entries: Entry, signals: Sequence[StoredSignal] = (), cancels: bool = False) -> None:
        self.journal = Journal(
            news=0, started_at=AT, version=1, entries=list(entries), signals=list(signals), read_at=AT
        )
        self.cancels = cancels
        self.recorded: list[str] = []
        self.called: list[tuple[str, list[str]]] = []

    async def read(self, _places: object) -> Journal:
        return self.journal

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
        if self.cancels and not cancelling:
            return False
        self.recorded += [f"{call.kind} {call.state}" for call in calls]
        return True

    async def call(self, function: Callable[[], Any]) -> Any:
        name = function.func.__name__  # type: ignore[attr-defined]  # the context makes a partial
        self.called.append((name, list(self.recorded)))
        return await function()

    def cancelled(self) -> bool:
        return False

    def is_last_attempt(self) -> bool:
        return True

    def check(self) -> None: ...


def entry(kind: str, name: str, *, number: int = 1, **known: Any) -> Entry:
    fields: dict[str, Any] = {
        "state": "open", "value": None, "child": None, "status": None, "code": None, "message": None, "seconds": None,
        "at": AT,
    }  # fmt: skip
    return Entry("", number, kind, name, **fields | known)


async def driven(port: Any, function: Callable[[Context], Coroutine[Any, Any, Any]]) -> Any:
    return (await Driver(uuid4(), lambda it: function(Context(it)), 100).advance(port)).result


async def note() -> None: ...


async def naps(ctx: Context) -> None:
    await ctx.sleep(5)
    await ctx.call(note)


async def listens(ctx: Context) -> None:
    try:
        await ctx.wait_for("go", timeout=5)
    except TimeoutError:
        await ctx.call(note)
    else:
        await ctx.call(note)


async def awaits_a_run(ctx: Context) -> None:
    child = await ctx.start(shop.approved, None)
    try:
        await child.result()
    except TaskFailed:
        await ctx.call(note)


async def patches(ctx: Context) -> None:
    if ctx.patched("new"):
        await ctx.call(note)


ENDED_WAITS = pytest.mark.parametrize(
    ("function", "port", "row"),
    [
        (naps, lambda **how: Port(entry("sleep", "sleep", seconds=0.0), **how), "sleep done"),
        (listens, lambda **how: Port(entry("signal", "go", seconds=0.0), **how), "signal timed_out"),
        (listens, lambda **how: Port(signals=[StoredSignal(1, "go", 7, AT)], **how), "signal done"),
        (
            awaits_a_run,
            lambda **how: Port(
                entry("start", "approved", child=CHILD),
                entry("result", "approved", number=2, child=CHILD, status="failed", code="broken", message="m"),
                **how,
            ),
            "result failed",
        ),
        (patches, Port, "patch done"),
    ],
    ids=["a sleep that was over", "a wait that timed out", "a signal", "a run that failed", "a patch"],
)


async def test_the_time_of_a_workflow_is_utc_also_where_the_journal_has_texts_of_another_zone() -> None:
    """A pooler may drop the setting of the session, and earlier releases did not set it."""

    async def code(ctx: Context) -> list[str]:
        before = ctx.now()
        await ctx.sleep(5)
        return [before.isoformat(), ctx.now().isoformat()]

    in_tokyo = datetime(2026, 1, 1, 10, tzinfo=timezone(timedelta(hours=9)))
    port = Port(entry("sleep", "sleep", state="done", at=in_tokyo))
    assert await driven(port, code) == ["2026-01-01T00:00:00+00:00", "2026-01-01T01:00:00+00:00"]


async def test_a_recorded_result_that_this_release_does_not_read_is_no_failure_that_the_workflow_handles() -> None:
    """The code has gone on by the result: it must not undo now what it has used."""

    async def code(ctx: Context) -> str:
        try:
            await ctx.call(note)
        except TaskFailed:
            return "handled"
        return "read"

    with pytest.raises(ResultUnreadable):
        await driven(Port(entry("call", "note", state="done", value={"value": 7})), code)


@ENDED_WAITS
async def test_how_a_wait_has_ended_is_recorded_before_a_function_is_called(
    function: Callable[[Context], Coroutine[Any, Any, Any]], port: Callable[..., Port], row: str
) -> None:
    """If the worker died after the effect, and a signal had come since, a replay took the other way."""
    journal = port()
    await driven(journal, function)
    assert journal.called == [("note", [row])]
    assert journal.recorded == [row, "call done"]


@ENDED_WAITS
async def test_a_cancel_that_comes_before_that_is_met_in_place_of_the_call(
    function: Callable[[Context], Coroutine[Any, Any, Any]], port: Callable[..., Port], row: str
) -> None:
    journal = port(cancels=True)
    with pytest.raises(Cancelled):
        await driven(journal, function)
    assert (journal.called, journal.recorded) == ([], [])  # nothing of what led to the call counts


async def test_a_function_that_waits_for_its_turn_to_record_is_not_called_after_a_cancel() -> None:
    """The row of the sleep meets the cancel first. What it then records does not count for the function."""

    async def both(ctx: Context) -> None:
        await ctx.gather(ctx.sleep(5), patches(ctx))

    port = Port(cancels=True)
    with pytest.raises(Cancelled):
        await driven(port, both)
    assert port.called == []


async def _bad() -> Any:
    return object()


@pytest.mark.parametrize("functions", [(note, _bad), (_bad, note)])
async def test_a_function_that_ended_beside_one_whose_result_is_refused_is_recorded(
    functions: tuple[Callable[[], Any], ...],
) -> None:
    """A retry of the run called it again."""

    async def both(ctx: Context) -> None:
        await ctx.gather(*(ctx.call(function) for function in functions))

    port = Port()
    with pytest.raises(Permanent) as refused:
        await driven(port, both)
    assert refused.value.code == "result_not_serialisable"
    assert port.recorded == ["call done"]


@pytest.mark.parametrize("together", [True, False])
async def test_a_function_beyond_the_most_calls_of_a_workflow_is_not_called(*, together: bool) -> None:
    """Its result was thrown away, and each retry of the run called it again."""

    async def code(ctx: Context) -> None:
        await ctx.call(note)
        if together:
            await ctx.gather(ctx.call(note), ctx.call(note))
        await ctx.call(note)
        await ctx.call(note)

    port: Any = Port()
    with pytest.raises(Permanent) as refused:
        await Driver(uuid4(), lambda it: code(Context(it)), 2).advance(port)
    assert refused.value.code == "workflow_too_long"
    assert port.recorded == ["call done"] * len(port.called)
    assert len(port.called) == (1 if together else 2)


async def test_branches_whose_functions_end_together_go_on_in_the_order_of_a_replay() -> None:
    order: list[int] = []

    async def branch(ctx: Context, number: int) -> None:
        await ctx.call(note)
        order.append(number)

    async def many(ctx: Context) -> None:
        await ctx.gather(*(branch(ctx, number) for number in range(50)))

    await driven(Port(), many)
    assert order == list(range(50))


@MEMORY
async def test_a_step_beside_a_call_begins_before_the_function_has_ended(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    shop.ran.clear()
    assert await runs.ended(await runs.submit(shop.calls_beside_a_step, 7)) == ("succeeded", True)


async def test_a_cancel_that_comes_while_a_function_runs_is_met_by_the_branch_beside_it() -> None:
    met: list[str] = []

    async def waits(ctx: Context) -> None:
        try:
            await ctx.sleep(5)
        except Cancelled:
            met.append("cancel")
            raise

    async def until_met() -> None:
        while not met:
            await asyncio.sleep(0)

    async def both(ctx: Context) -> None:
        await ctx.gather(waits(ctx), ctx.call(until_met))

    port = Port(cancels=True)
    with pytest.raises(Cancelled):
        async with asyncio.timeout(20):
            await driven(port, both)
    assert port.recorded == ["sleep cancelled", "call done"]


async def test_a_workflow_goes_through_a_recorded_dict_in_the_same_order_at_each_replay(
    runs: Runs, worker_of: Start
) -> None:
    """The journal gave the names in another order than the function, so a replay took one name's step for another's."""
    await worker_of(workflow_memory=0)
    run = await runs.submit(shop.doubles_prices)
    assert await runs.ended(run) == ("succeeded", {"zebra": 2, "ant": 4, "Ant": 6})
    assert (await runs.steps(run)).keys() == {"double#1", "double#2", "double#3"}


@pytest.mark.parametrize(
    "value",
    [
        "{'bb': 1, 'a': [{'d': 1, 'c': {'ä': 1, 'zz': 2, 'z': 3}}]}",
        "[1e16, -1e16, 1.2345678901234567e19, 1e22, 5.0, -0.0, 0.5, -1, True, None, 'text']",
    ],
)
async def test_a_function_gives_the_workflow_what_its_journal_gives_back(
    runs: Runs, worker_of: Start, value: str
) -> None:
    await worker_of()
    run = await runs.submit(shop.odd_values, value)
    status, result = await runs.ended(run)
    recorded = await runs.connection.fetchval("SELECT value -> 'value' FROM journal WHERE job_id = $1", run)
    assert (status, result) == ("succeeded", repr(recorded))
    assert result != value


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(10**25), 10**25).map(float)
    | st.text(TEXT),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(TEXT, max_size=4), inner),
    max_leaves=20,
)


async def test_what_postgresql_makes_of_a_value_is_known_without_asking_it(runs: Runs) -> None:
    """A function's result is what its row holds, and the driver does not read the row for that."""
    seen: list[Any] = []

    @settings(max_examples=2000, database=None, deadline=None)
    @given(JSON)
    def collect(value: Any) -> None:
        seen.append(orjson.loads(encode_storable(value)))

    collect()
    stored = await runs.connection.fetchval("SELECT $1::jsonb", seen)
    for value, expected in zip(seen, stored, strict=True):
        assert orjson.dumps(as_stored(value)) == orjson.dumps(expected), value
