"""`submit` writes a run that a worker runs once, and its handle follows it: with a loop and without."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
import time_machine
from pydantic import BaseModel, RootModel, SecretStr, model_serializer, model_validator

from leasehold import App, Context, InvalidArguments, Retry, TaskFailed, current
from leasehold.app import link
from leasehold.app.calls import Call
from leasehold.app.link import DatabaseLink, Outcome
from leasehold.app.run import Run
from leasehold.app.writing import write, write_plain
from leasehold.db.database import Connection, connect
from leasehold.domain.errors import Conflict, Invalid, NotFound, ObjectMissing, Unanswered, Unreachable
from leasehold.domain.ids import id_of_instant, new_id
from leasehold.embedded.ports import free_port
from leasehold.settings import Settings
from leasehold.transitions.workflows import signals
from tests.app.conftest import Serve
from tests.support.lock_waits import until_waiting

Using = Callable[..., App]
SECONDS = 60.0
app = App("shop")


class Order(BaseModel):
    id: int
    email: str = "a@b"


@app.task
def send_receipt(order: Order) -> str:
    return f"sent to {order.email}"


@app.task
async def large(size: int) -> str:
    return "x" * size


@app.task(retry=Retry(times=0))
async def fail(sentence: str) -> None:
    raise ValueError(sentence)


@app.task
async def wait_long() -> None:
    await asyncio.sleep(60)


@app.task
def nothing() -> None: ...


@app.workflow
async def approves(ctx: Context) -> Any:
    return await ctx.wait_for("go")


@app.task
def has_a_key(key: str, n: int = 1) -> str:
    return key * n


@app.task(name="a" * 58)
def with_a_long_name(n: int) -> int:
    return n


@app.task(debounce=timedelta(hours=1))
def later_if_again(n: int) -> int:
    return n


class Numbers(RootModel[list[int]]): ...


class Prices(RootModel[dict[str, int]]): ...


class Either(RootModel[Order | Prices]): ...


class Listed(BaseModel):
    number: int

    @model_serializer
    def _as_list(self) -> list[int]:
        return [self.number]

    @model_validator(mode="before")
    @classmethod
    def _of_list(cls, value: Any) -> Any:
        return {"number": value[0]} if isinstance(value, list) else value


@app.task
def total(numbers: Numbers) -> int:
    return sum(numbers.root)


@app.task
def total_price(prices: Prices) -> int:
    return sum(prices.root.values())


@app.task
def either(thing: Either) -> str:
    return type(thing.root).__name__


@app.task
def listed(thing: Listed) -> int:
    return thing.number


@pytest.fixture(autouse=True)
def _use(using: Using) -> None:
    using(app)


@app.task(retry=Retry(times=1, delay=timedelta(0)))
def speak(words: int) -> None:
    for n in range(words):
        current().emit(f"word {n}")
    if current().number == 1:
        raise OSError
    current().emit({"end": True})


async def test_what_a_run_emits_is_iterated_until_it_ends(serve: Serve, connection: Connection) -> None:
    with pytest.raises(NotFound):
        [one async for one in speak.find(new_id()).astream()]
    async with serve(app), asyncio.timeout(SECONDS):
        run = await speak.asubmit(700)  # more than one read has
        found = [(one.event, one.chunk) async for one in run.astream()]
        again = await asyncio.to_thread(lambda: [(one.event, one.chunk) for one in run.stream()])
    words = [("chunk", f"word {n}") for n in range(700)]
    assert found == again == [*words, ("restart", None), *words, ("chunk", {"end": True})]
    with pytest.raises(RuntimeError, match="astream"):
        next(run.stream())


async def test_a_run_is_submitted_waited_for_and_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_READ_SECONDS", SECONDS)  # PostgreSQL may stand still for longer than its second
    async with serve(app), asyncio.timeout(SECONDS):
        run = await send_receipt.asubmit(Order(id=1, email="me@home"))
        assert await run == "sent to me@home"
        assert await run.astatus() == "succeeded"
        assert await (await run.awaited(timeout=60)).aresult() == "sent to me@home"
        assert await run.aresult(timeout=0) == "sent to me@home"
        assert await send_receipt.find(run.id).aresult() == "sent to me@home"
        run_of_nothing: Run[Any] = await nothing.asubmit()
        assert await run_of_nothing is None


@pytest.mark.parametrize(
    ("submit", "params", "result"),
    [
        (lambda: total.asubmit(Numbers([1, 2])), {"numbers": [1, 2]}, 3),
        (lambda: total_price.asubmit(Prices({"a": 3})), {"a": 3}, 3),
        (lambda: either.asubmit(Either(Prices({"a": 3}))), {"a": 3}, "Prices"),
    ],
    ids=["a list", "an object", "one of two objects"],
)
async def test_parameters_are_stored_as_an_object_of_whatever_type_they_are(
    serve: Serve, connection: Connection, submit: Callable[[], Awaitable[Any]], params: Any, result: Any
) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        run = await submit()
        assert await run == result
    assert await connection.fetchval("SELECT params FROM job WHERE id = $1", run.id) == params


async def test_a_model_that_writes_itself_as_no_object_is_refused(connection: Connection) -> None:
    with pytest.raises(InvalidArguments, match="the JSON of Listed is a list, not an object"):
        await listed.asubmit(Listed(number=1))
    assert await connection.fetchval("SELECT count(*) FROM job") == 0


async def test_a_program_without_a_loop_does_the_same(serve: Serve) -> None:
    def program() -> tuple[str, str, str]:
        run = send_receipt.submit(Order(id=1))
        return run.wait(timeout=SECONDS).result(), run.status(), nothing.submit().wait(SECONDS).status()

    async with serve(app):
        assert await asyncio.to_thread(program) == ("sent to a@b", "succeeded", "succeeded")


async def test_waiting_without_a_loop_inside_a_loop_is_refused_and_names_the_other_method(
    connection: Connection,
) -> None:
    run = send_receipt.submit(Order(id=1))  # a commit of some milliseconds: allowed
    with pytest.raises(RuntimeError, match=r"await run\.aresult\(\)"):
        run.result()
    with pytest.raises(RuntimeError, match=r"await run\.awaited\(\)"):
        run.wait()


async def test_a_wait_that_is_too_short_raises_and_the_run_goes_on(connection: Connection) -> None:
    run = await send_receipt.asubmit(Order(id=1))
    with pytest.raises(TimeoutError):
        await run.awaited(timeout=0.05)
    with pytest.raises(TimeoutError):
        await run.awaited(timeout=0)
    assert await run.astatus() in ("pending", "queued")


async def test_a_large_result_is_read_from_the_store(serve: Serve) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        assert await (await large.asubmit(5_000_000)) == "x" * 5_000_000


async def test_a_result_whose_output_is_gone_is_named_as_missing(serve: Serve, connection: Connection) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        run = await large.asubmit(100_000)
        await run
        await connection.execute("DELETE FROM output WHERE job_id = $1", run.id)
        with pytest.raises(ObjectMissing, match=f"the run {run.id} has no output result.json"):
            await large.find(run.id)


async def test_a_failure_is_raised_with_its_code_where_the_result_is_read(serve: Serve) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        run = await fail.asubmit("no such customer")
        with pytest.raises(TaskFailed, match="ValueError: no such customer") as failed:
            await run
        assert failed.value.code == "handler_error"


async def test_a_cancelled_run_stops_and_says_why(serve: Serve) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        run = await wait_long.asubmit()
        while await run.astatus() != "running":
            await asyncio.sleep(0.02)
        assert await run.acancel("not needed") in ("cancel_requested", "cancelled")
    unstarted = await wait_long.asubmit()
    assert await unstarted.acancel("not needed") == "cancelled"
    with pytest.raises(TaskFailed, match="cancelled: not needed"):
        await unstarted


@pytest.mark.parametrize(("reason", "shown"), [("a\x00b", "ab"), ("half: \ud83d", "half: ?"), ("x" * 501, "x" * 500)])
async def test_no_reason_keeps_a_run_from_being_cancelled(connection: Connection, reason: str, shown: str) -> None:
    run = await send_receipt.asubmit(Order(id=1))
    assert await run.acancel(reason) == "cancelled"
    assert await connection.fetchval("SELECT cancel ->> 'reason' FROM job") == shown


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        ("a\x00b", "at its root, a text with a NUL character cannot be stored"),
        ({"a\x00": 1}, "NUL character"),
        ({"prices": [1.5, float("nan")]}, "at /prices/1, JSON has neither NaN nor infinity"),
        (2**70, "at its root, an integer has at most 64 bits"),
        ("half: \ud83d", "surrogates not allowed"),
        (object(), "The payload is not JSON: Unable to serialize"),
    ],
)
async def test_a_signal_that_its_workflow_could_not_read_as_it_was_sent_is_refused(
    connection: Connection, payload: Any, sentence: str
) -> None:
    run = await approves.asubmit()
    with pytest.raises(Invalid, match=sentence) as refused:
        await run.asignal("go", payload)
    assert refused.value.code == "invalid_payload"
    assert await connection.fetchval("SELECT count(*) FROM signal") == 0


async def test_a_signal_has_as_much_as_the_api_takes_and_no_more(connection: Connection) -> None:
    run = await approves.asubmit()
    text = "x" * (256 * 1024 - len(b'{"payload":""}'))
    with pytest.raises(Invalid, match="at most 262144 are accepted") as refused:
        await run.asignal("go", f"{text}x")
    assert refused.value.code == "payload_too_large"
    assert await connection.fetchval("SELECT count(*) FROM signal") == 0
    await run.asignal("go", text)
    assert await connection.fetchval("SELECT count(*) FROM signal") == 1


@pytest.mark.parametrize("name", ["", "x" * 201, "a\x00", "a/b", "a#1"])
async def test_a_signal_for_which_no_workflow_can_wait_is_refused(connection: Connection, name: str) -> None:
    run = await approves.asubmit()
    with pytest.raises(Invalid, match="1 to 200 printable characters without # and /") as refused:
        await run.asignal(name)
    assert refused.value.code == "invalid_name"
    await run.asignal("x" * 200)
    assert await connection.fetchval("SELECT count(*) FROM signal") == 1


async def test_arguments_are_checked_where_submit_is_called_and_nothing_is_written(connection: Connection) -> None:
    with pytest.raises(InvalidArguments, match=r"^/id: "):
        await send_receipt.asubmit({"id": "x"})  # type: ignore[call-overload]  # that is the test
    with pytest.raises(InvalidArguments, match="missing a required argument: 'order'"):
        await send_receipt.asubmit()  # type: ignore[call-overload]  # that is the test
    with pytest.raises(InvalidArguments, match=r"^/email: .*NUL"):
        await send_receipt.asubmit(Order(id=1, email="\x00"))
    with pytest.raises(InvalidArguments, match="64 bits"):
        await send_receipt.asubmit(Order(id=2**70))
    with pytest.raises(Invalid, match="at most 262144"):
        await send_receipt.asubmit(Order(id=1, email="x" * 300_000))
    assert await connection.fetchval("SELECT count(*) FROM job") == 0


@pytest.mark.parametrize(
    "options",
    [{"key": ""}, {"key": "é"}, {"key": "x" * 201}, {"delay": timedelta(seconds=-1)}, {"priority": "urgent"},
     {"tags": {"Customer": "7"}}, {"tags": {"customer": 7}}, {"tags": {"customer": "7\x00"}},
     {"tags": {"customer": "\ud83d"}}, {"tags": {"customer": ""}}, {"tags": {"customer": "7" * 65}},
     {"key": 17}, {"key": b"17"}, {"delay": 60}, {"delay": "60"}, {"priority": []}, {"tags": ["a"]}, {"tags": "a"},
     {"tags": {7: "customer"}}],
)  # fmt: skip
async def test_options_are_checked_too(options: Any, connection: Connection) -> None:
    with pytest.raises(Invalid):
        await send_receipt.asubmit(Order(id=1), **options)
    assert await connection.fetchval("SELECT count(*) FROM job") == 0


async def test_a_key_makes_one_run_however_often_and_from_wherever_it_is_submitted(connection: Connection) -> None:
    runs = await asyncio.gather(*(send_receipt.asubmit(Order(id=17), key="order-17") for _ in range(8)))
    assert len({run.id for run in runs}) == 1
    assert await connection.fetchval("SELECT count(*) FROM job") == 1
    with pytest.raises(Invalid, match=r"The key '.+' of .+ was used with other arguments"):
        await send_receipt.asubmit(Order(id=18), key="order-17")
    hurried = await send_receipt.asubmit(
        Order(id=17), key="order-17", priority="high", delay=timedelta(hours=1), tags={"customer": "7"}
    )
    assert hurried.id == runs[0].id
    other = await has_a_key.options(key="order-17").asubmit("a")  # a key is the task's own
    assert other.id != runs[0].id


@pytest.mark.parametrize("key", ["x" * 200, "order 17 ", " "])
async def test_a_key_that_is_allowed_makes_one_run_however_long_the_name_of_its_task(
    connection: Connection, key: str
) -> None:
    runs = [await with_a_long_name.asubmit(n, key=f"{key}{end}"[-200:]) for n, end in ((1, ""), (1, ""), (2, "2"))]
    assert runs[0] == runs[1]
    assert runs[2] != runs[0]
    with pytest.raises(Invalid, match="was used with other arguments") as refused:
        await with_a_long_name.asubmit(2, key=key)
    assert refused.value.code == "idempotency_key_reused"
    assert await connection.fetchval("SELECT count(*) FROM job") == 2


@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_delay_counts_by_the_clock_of_the_database(connection: Connection, hours: int) -> None:
    delay = timedelta(minutes=10)
    with time_machine.travel(datetime.now(UTC) + timedelta(hours=hours), tick=True):  # a program whose clock is wrong
        await send_receipt.asubmit(Order(id=1), delay=delay)
        await send_receipt.asubmit(Order(id=1), delay=delay, key="k")
        await later_if_again.asubmit(1)
    found = await connection.fetch(
        "SELECT scheduled_at - created_at AS wait FROM run JOIN job ON id = job_id ORDER BY 1"
    )
    assert [round(row["wait"] / timedelta(minutes=5)) for row in found] == [2, 2, 12]


async def test_calls_of_one_submission_with_one_key_are_one_run_of_equal_arguments(connection: Connection) -> None:
    keyed = send_receipt.options(key="k")
    calls = [keyed.call(Order(id=1)), send_receipt.call(Order(id=2)), keyed.call(Order(id=1))]
    first, plain, second = await send_receipt.asubmit_many(calls)
    assert (first.id, plain.id, second.id) == (calls[0].run_id, calls[1].run_id, calls[0].run_id)
    assert await connection.fetchval("SELECT count(*) FROM job") == 2
    other = send_receipt.options(key="other")
    with pytest.raises(Invalid, match=r"The key 'other' of .+ was used with other arguments"):
        await send_receipt.asubmit_many([other.call(Order(id=1)), other.call(Order(id=2))])
    assert await connection.fetchval("SELECT count(*) FROM job") == 2


async def test_submissions_of_the_same_keys_in_any_order_do_not_deadlock(
    connection: Connection, settings: Settings
) -> None:
    """Nor do those of tasks with the same limits: both are locked in one order, the keys first."""
    await connection.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('me', 'tenant', 9, true)")
    await connection.execute(
        "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('me', $1, 9, true), ('me', $2, 9, true)",
        f"template:{has_a_key.name}",
        f"template:{send_receipt.name}",
    )
    calls = [send_receipt.options(key="b").call(Order(id=1)), has_a_key.options(key="a").call("a")]
    other = await connect(settings, "test")
    async with other.transaction():
        await write(other, [calls[1]], "me", 60)
        writing = asyncio.create_task(_written(connection, calls))
        await until_waiting(other)
        ids = (await write(other, calls, "me", 60)).ids
    assert await writing == ids
    await other.close()


async def _written(connection: Connection, calls: list[Call[Any]]) -> list[UUID]:
    async with connection.transaction():
        return (await write(connection, calls, "me", 60)).ids


async def test_a_parameter_with_the_name_of_an_option_keeps_it(connection: Connection) -> None:
    await has_a_key.asubmit("abc", n=2)
    await has_a_key.asubmit(key="abc")  # type: ignore[call-overload]  # the first parameter is positional for the checker
    params = await connection.fetch("SELECT params FROM job ORDER BY id")
    assert [row["params"] for row in params] == [{"key": "abc", "n": 2}, {"key": "abc", "n": 1}]
    assert await connection.fetchval("SELECT count(*) FROM idempotency") == 0


async def test_options_reach_the_row(connection: Connection) -> None:
    mine = new_id()
    run = await send_receipt.asubmit(
        Order(id=1), delay=timedelta(minutes=1), tags={"customer": "7"}, priority="high", id=mine
    )
    row = await connection.fetchrow(
        "SELECT j.tenant_id, j.priority, j.params, j.keep_seconds, t.status, j.pipeline, r.template,"
        " t.available_at - j.created_at > interval '50 seconds' AS later,"
        " (SELECT value FROM job_tag g WHERE g.job_id = j.id AND name = 'customer') AS customer"
        " FROM job j JOIN task t ON t.job_id = j.id JOIN run r ON r.job_id = j.id WHERE j.id = $1",
        run.id,
    )
    assert run.id == mine
    assert row is not None
    assert dict(row) == {
        "tenant_id": "me", "priority": 0, "params": {"id": 1, "email": "a@b"}, "keep_seconds": 7 * 86_400,
        "status": "waiting", "pipeline": "shop.send_receipt", "template": "shop.send_receipt", "later": True,
        "customer": "7",
    }  # fmt: skip


async def test_a_repeated_id_starts_no_second_run_and_another_tasks_id_is_refused(connection: Connection) -> None:
    mine = new_id()
    for _ in range(2):
        assert (await send_receipt.asubmit(Order(id=1), id=mine)).id == mine
    assert await connection.fetchval("SELECT count(*) FROM job") == 1
    with pytest.raises(Conflict, match="Another run"):
        await large.asubmit(1, id=mine)


async def test_an_id_may_be_text_and_a_repetition_gives_the_first_run(connection: Connection) -> None:
    mine = new_id()
    first = await send_receipt.asubmit(Order(id=1), id=str(mine))
    prepared = await send_receipt.options(id=str(mine).upper()).asubmit(Order(id=1))
    assert first == prepared == send_receipt.find(mine)
    assert first.id == prepared.id == mine
    assert await connection.fetchval("SELECT count(*) FROM job") == 1


async def test_a_run_is_found_by_its_id_as_text(serve: Serve) -> None:
    async with serve(app), asyncio.timeout(SECONDS):
        run = await speak.asubmit(1)
        found = speak.find(str(run.id))
        chunks = [(one.event, one.chunk) async for one in found.astream()]
        await found.aresult()
    assert chunks == [("chunk", "word 0"), ("restart", None), ("chunk", "word 0"), ("chunk", {"end": True})]


@pytest.mark.parametrize("wrong", ["", "17", "not an id", 17, b"x" * 16, None])
def test_what_is_no_id_is_refused_where_it_is_given(wrong: Any) -> None:
    calls: list[Callable[[], object]] = [lambda: send_receipt.find(wrong)]
    if wrong is not None:  # the default: the platform makes the id
        calls += [lambda: send_receipt.options(id=wrong), lambda: send_receipt.submit(Order(id=1), id=wrong)]
    for call in calls:
        with pytest.raises(Invalid, match="is a UUID") as refused:
            call()
        assert refused.value.code == "invalid_id"


async def test_the_id_of_a_new_run_must_have_the_time_of_its_making(connection: Connection) -> None:
    """Lists go by the times in ids, and bulk operations act on what lists find."""
    yesterday = id_of_instant(datetime.now(UTC) - timedelta(hours=25))
    ahead = id_of_instant(datetime.now(UTC) + timedelta(hours=1))
    for wrong in (uuid4(), yesterday, ahead):
        for call in (send_receipt.options, partial(send_receipt.submit, Order(id=1))):
            with pytest.raises(Invalid, match="a UUIDv7 of the last 24 hours") as refused:
                call(id=str(wrong))
            assert refused.value.code == "invalid_id"
        with pytest.raises(NotFound):  # a handle takes any: runs of earlier code may have it
            await send_receipt.find(wrong).astatus()
    hours_old = id_of_instant(datetime.now(UTC) - timedelta(hours=23))  # an outage lasted
    assert (await send_receipt.asubmit(Order(id=1), id=hours_old)).id == hours_old
    assert await connection.fetchval("SELECT count(*) FROM job") == 1


async def test_many_are_written_together_in_order_or_not_at_all(connection: Connection, using: Using) -> None:
    calls = [Order(id=n) for n in range(40)] + [send_receipt.options(key="k").call(Order(id=40))]
    runs = await send_receipt.asubmit_many(calls)
    params = {row["id"]: row["params"]["id"] for row in await connection.fetch("SELECT id, params FROM job")}
    assert [params[run.id] for run in runs] == [*range(41)]
    assert await send_receipt.asubmit_many([]) == []
    with pytest.raises(InvalidArguments):
        await send_receipt.asubmit_many([Order(id=1), {"id": "x"}])  # type: ignore[list-item]  # that is the test
    using(app, batch_max_tasks=10)
    with pytest.raises(Invalid, match="At most 10 runs"):
        await send_receipt.asubmit_many([Order(id=n) for n in range(11)])
    assert await connection.fetchval("SELECT count(*) FROM job") == 41


async def test_many_of_several_tasks_with_keys_and_debounces_are_each_a_run_of_their_own_task(
    connection: Connection,
) -> None:
    calls: list[Any] = [
        later_if_again.options(key="same").call(1),
        send_receipt.options(key="same").call(Order(id=1)),
        send_receipt.call(Order(id=2)),
        later_if_again.options(key="same").call(2),
        send_receipt.options(key="same").call(Order(id=1)),
        later_if_again.options(key="other").call(3),
    ]
    runs = await send_receipt.asubmit_many(calls)
    assert [run.id for run in runs] == [calls[place].run_id for place in (0, 1, 2, 0, 1, 5)]
    assert [run.task for run in runs] == [call.task.name for call in calls]
    rows = await connection.fetch("SELECT id, pipeline, params FROM job")
    assert {row["id"]: (row["pipeline"], row["params"]) for row in rows} == {
        calls[0].run_id: (later_if_again.name, {"n": 2}),
        calls[1].run_id: (send_receipt.name, calls[1].params),
        calls[2].run_id: (send_receipt.name, calls[2].params),
        calls[5].run_id: (later_if_again.name, {"n": 3}),
    }
    again = await send_receipt.asubmit_many([calls[1], calls[3]])
    assert [run.id for run in again] == [runs[1].id, runs[0].id]


@pytest.mark.parametrize("tries", [1, 2])
async def test_many_whose_answer_was_lost_are_each_one_run(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """Some have a key of an earlier run, some are one run together, and some only an id."""
    earlier = await send_receipt.asubmit(Order(id=0), key="k")
    write, lost = DatabaseLink._write, [ConnectionResetError()] * tries

    async def losing(link: DatabaseLink, calls: Any) -> Any:
        written = await write(link, calls)
        if lost:
            raise lost.pop()
        return written

    monkeypatch.setattr(DatabaseLink, "_write", losing)
    calls = [
        send_receipt.options(key="k").call(Order(id=0)),
        send_receipt.call(Order(id=1)),
        send_receipt.options(key="new").call(Order(id=2)),
        send_receipt.call(Order(id=3)),
    ]
    runs = await send_receipt.asubmit_many(calls)
    assert [run.id for run in runs] == [earlier.id, *(call.run_id for call in calls[1:])]
    later = [later_if_again.options(key="same").call(n) for n in (1, 2)]
    lost += [ConnectionResetError()] * tries
    together = await later_if_again.asubmit_many(later)
    assert {run.id for run in together} == {later[0].run_id}
    assert await connection.fetchval("SELECT count(*) FROM job") == 5


async def test_a_second_outage_while_a_lost_answer_is_looked_up_is_waited_for(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, look = DatabaseLink._write, DatabaseLink._ids_written_earlier
    lost, cut = [ConnectionResetError()], [TimeoutError()]

    async def losing(link: DatabaseLink, calls: Any) -> Any:
        written = await write(link, calls)
        if lost:
            raise lost.pop()
        return written

    async def being_cut(link: DatabaseLink, calls: Any) -> Any:
        if cut:
            raise cut.pop()
        return await look(link, calls)

    monkeypatch.setattr(DatabaseLink, "_write", losing)
    monkeypatch.setattr(DatabaseLink, "_ids_written_earlier", being_cut)
    call = send_receipt.call(Order(id=1))
    assert [run.id for run in await send_receipt.asubmit_many([call])] == [call.run_id]
    assert await connection.fetchval("SELECT count(*) FROM job") == 1
    assert not lost
    assert not cut


async def test_a_debounced_run_that_began_before_its_lost_answer_was_repeated_is_one_run(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lost = DatabaseLink._write, [ConnectionResetError()]

    async def losing(link: DatabaseLink, calls: Any) -> Any:
        written = await write(link, calls)
        if lost:
            async with link._pool.acquire() as own:
                await own.execute("UPDATE task SET epoch = 1")  # as a claim does
            raise lost.pop()
        return written

    monkeypatch.setattr(DatabaseLink, "_write", losing)
    calls = [later_if_again.options(key="same").call(n) for n in (1, 2)]
    assert {run.id for run in await later_if_again.asubmit_many(calls)} == {calls[0].run_id}
    assert await connection.fetchval("SELECT count(*) FROM job") == 1


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_debounced_submission_that_is_repeated_gives_its_arguments_once(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """A waiting run has taken its arguments. Until the lost answer is repeated, the run begins, or takes newer ones."""
    write, lost = DatabaseLink._write, [ConnectionResetError()]
    run = await later_if_again.options(key="same").asubmit(1)

    async def losing(link: DatabaseLink, calls: Any) -> Any:
        written = await write(link, calls)
        if calls[0].params == {"n": 2} and lost:
            error = lost.pop()
            if has_begun:
                async with link._pool.acquire() as own:
                    await own.execute("UPDATE task SET epoch = 1")  # as a claim does
            else:
                assert await later_if_again.options(key="same").asubmit(3) == run
            raise error
        return written

    monkeypatch.setattr(DatabaseLink, "_write", losing)
    mine = new_id()
    assert await later_if_again.options(key="same", id=mine).asubmit(2) == run
    assert await connection.fetchval("SELECT params ->> 'n' FROM job") == ("2" if has_begun else "3")
    assert await later_if_again.options(key="same", id=mine).asubmit(2) == run, "by the program itself"
    assert await connection.fetchval("SELECT count(*) FROM job") == 1


async def test_the_first_debounced_submission_takes_nothing_back_when_it_is_repeated(connection: Connection) -> None:
    mine = new_id()
    run = await later_if_again.options(key="same", id=mine).asubmit(1)
    assert await later_if_again.options(key="same").asubmit(2) == run
    assert await later_if_again.options(key="same", id=mine).asubmit(1) == run
    assert await connection.fetchval("SELECT params ->> 'n' FROM job") == "2"


async def test_ids_of_an_earlier_submission_come_back_with_new_ones(connection: Connection) -> None:
    mine = new_id()
    await send_receipt.asubmit(Order(id=1), id=mine)
    calls = [send_receipt.options(id=mine).call(Order(id=1)), send_receipt.call(Order(id=2))]
    runs = await send_receipt.asubmit_many(calls)
    assert [run.id for run in runs] == [mine, calls[1].run_id]
    assert await connection.fetchval("SELECT count(*) FROM job") == 2


async def test_a_run_of_another_tenant_is_not_there(using: Using) -> None:
    run = await send_receipt.asubmit(Order(id=1))
    using(app, tenant="you")
    for look in (run.astatus, run.awaited, run.aresult, run.acancel):
        with pytest.raises(NotFound):
            await look()


async def test_a_server_that_stays_away_leaves_the_ids_to_submit_again(settings: Settings, using: Using) -> None:
    using(app, database_url=SecretStr(f"postgresql://me@127.0.0.1:{free_port()}/x"), submit_seconds=0.3)
    mine = new_id()
    with pytest.raises(Unanswered, match=r"No answer for 0\.3 s") as unanswered:
        await send_receipt.asubmit(Order(id=1), id=mine)
    assert unanswered.value.ids == [mine]


async def test_a_run_that_cannot_be_reached_is_an_error_of_ours(settings: Settings, using: Using) -> None:
    using(app, database_url=SecretStr(f"postgresql://me@127.0.0.1:{free_port()}/x"), submit_seconds=0.3)
    run = send_receipt.find(new_id())
    for look in (run.astatus, run.awaited, run.aresult, run.acancel, partial(run.asignal, "go")):
        with pytest.raises(Unreachable, match=r"it was away for 0\.3 s") as unreachable:
            await look()
        assert unreachable.value.run_id == run.id


async def test_a_run_that_is_retried_at_its_end_has_the_result_of_its_next_end(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody retries the failed run before its outcome is read."""
    not_yet = [Outcome("queued", ended=False)]
    waits: list[float | None] = []

    async def ended(link: DatabaseLink, run_id: UUID, seconds: float | None) -> bool:
        waits.append(seconds)
        return True

    async def retried(link: DatabaseLink, run_id: UUID) -> Outcome:
        return not_yet.pop() if not_yet else Outcome("succeeded", ended=True, value={"value": "sent"})

    monkeypatch.setattr(DatabaseLink, "wait", ended)
    monkeypatch.setattr(DatabaseLink, "outcome", retried)
    assert await send_receipt.find(new_id()).aresult() == "sent"
    assert waits == [None, None]
    not_yet.append(Outcome("queued", ended=False))
    assert await send_receipt.find(new_id()).aresult(timeout=SECONDS) == "sent"
    assert waits[2] == SECONDS
    assert waits[3] is not None
    assert 0 < waits[3] < SECONDS, "what is left of it"


async def test_a_wait_in_an_outage_ends_with_its_timeout(settings: Settings, using: Using) -> None:
    using(app, database_url=SecretStr(f"postgresql://me@127.0.0.1:{free_port()}/x"), submit_seconds=600.0)
    with pytest.raises(TimeoutError, match="has not ended after"):
        await send_receipt.find(new_id()).aresult(timeout=0.05)


async def test_a_session_that_broke_is_replaced_and_a_signal_is_sent_once(
    connection: Connection, using: Using, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be repeated is asked again on a new connection. A signal whose answer was lost is not sent again."""
    run = await send_receipt.asubmit(Order(id=1))
    stored: list[Any] = []
    send = signals.send

    async def unanswered(*arguments: Any, **named: Any) -> Any:
        stored.append(await send(*arguments, **named))
        raise ConnectionResetError

    async def break_sessions() -> None:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    await break_sessions()
    assert await run.astatus() == "queued"
    await break_sessions()
    await run.asignal("go")
    assert await connection.fetchval("SELECT count(*) FROM signal") == 1
    monkeypatch.setattr(signals, "send", unanswered)
    with pytest.raises(Unreachable, match="may or may not be stored"):
        await run.asignal("go")
    assert len(stored) == 1


async def test_only_a_single_call_without_key_debounce_and_limit_needs_no_transaction(connection: Connection) -> None:
    plain = send_receipt.call(Order(id=1))
    others: list[list[Call[Any]]] = [
        [send_receipt.options(key="k").call(Order(id=1))],
        [later_if_again.call(1)],
        [send_receipt.call(Order(id=1)), send_receipt.call(Order(id=2))],
    ]
    for calls in others:
        assert await write_plain(connection, calls, "me", 60) is None
    written = await write_plain(connection, [plain], "me", 60)
    assert written is not None
    assert (written.ids, len(written.hints), connection.is_in_transaction()) == ([plain.run_id], 1, False)
    assert [row["id"] for row in await connection.fetch("SELECT id FROM job")] == [plain.run_id]
    await connection.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('me', 'tenant', 1, true)")
    assert await write_plain(connection, [send_receipt.call(Order(id=2))], "me", 60) is None
    assert await connection.fetchval("SELECT count(*) FROM job") == 1
    held = await send_receipt.asubmit(Order(id=3))
    assert await connection.fetchval("SELECT gated FROM job WHERE id = $1", held.id)


async def test_declared_limits_hold_what_an_app_submits(connection: Connection, serve: Serve) -> None:
    await connection.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('me', 'tenant', 1, true)")
    runs = await send_receipt.asubmit_many([Order(id=n) for n in range(3)])
    assert await connection.fetchval("SELECT count(*) FROM job WHERE gated") == 3
    async with serve(app), asyncio.timeout(SECONDS):
        assert [await run for run in runs] == ["sent to a@b"] * 3


async def test_a_hint_reaches_the_worker_before_its_poll(serve: Serve) -> None:
    async with serve(app, poll_seconds=600.0), asyncio.timeout(SECONDS):
        assert await (await send_receipt.asubmit(Order(id=1))) == "sent to a@b"
        for run in await send_receipt.asubmit_many([Order(id=n) for n in range(5)]):
            await run


async def test_a_forked_child_opens_connections_of_its_own(connection: Connection) -> None:
    await send_receipt.asubmit(Order(id=1))

    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                send_receipt.submit(Order(id=2))
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    if sys.version_info < (3, 12):  # later ones warn of a fork beside threads, and our tests raise warnings
        assert await asyncio.to_thread(fork) == 0
        assert await connection.fetchval("SELECT count(*) FROM job") == 2


def test_current_is_the_attempts_own_in_concurrent_runs() -> None:
    with pytest.raises(Exception, match="works only in code that a task runs"):
        current()
    assert isinstance(new_id(), UUID)
