"""A worker runs workflows: steps, waits, signals, gathers, failures; from memory, and from the journal alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import TypeAdapter

from leasehold import App, DeclarationError
from leasehold.db import job_reads
from leasehold.db.job_reads import MAX_STEPS, DeadLetterFilter, find_job
from leasehold.domain.errors import Invalid
from leasehold.domain.template import Template
from leasehold.evaluation.model_schemas import compile_model_schema
from leasehold.transitions import jobs
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.workflows.reading import SHORT, Journal, Reading
from leasehold.worker.attempts.journals import Journals
from tests.workflows import shop
from tests.workflows.conftest import SECONDS, Runs, Start
from tests.workflows.shop import Order

#: With its coroutine in memory between two waits, and without.
MEMORY = pytest.mark.parametrize("memory", [1000, 0], ids=["kept", "replayed"])
BOTH_STEPS_HAVE_ENDED = (
    "(SELECT count(*) = 2 FROM task t WHERE t.job_id = j.id AND t.contained AND t.status = 'succeeded')"
)


def dead_letters(code: str) -> dict[str, float]:
    """How many steps of each name the worker has counted as dead letters with this code."""
    return {
        sample.labels["step"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "leasehold_dead_letters_total" and sample.labels["code"] == code
    }


@MEMORY
async def test_a_workflow_runs_its_steps_one_after_the_other(runs: Runs, worker_of: Start, memory: int) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.checkout, Order(id=7, amount=5))
    assert await runs.ended(run) == ("succeeded", "7: 5")
    assert await runs.steps(run) == {"charge#1": "succeeded", "receipt#1": "succeeded"}
    assert await runs.journal(run) == [("", 1, "run", "charge", "open"), ("", 2, "run", "receipt", "open")]


async def test_large_results_of_the_steps_of_a_template_replace_each_other_not(runs: Runs, worker_of: Start) -> None:
    """Each is an output `result.json`, of an async task or of a plain one."""
    handlers = [task.runnable.handler for task in (shop.double, shop.triple, shop.triple)]
    steps = [{"id": name, "worker_type": handler} for name, handler in zip("abc", handlers, strict=True)]
    several = NewJob(Template.model_validate({"type": "several", "steps": steps}).pipeline(), "t", params={"number": 7})
    await jobs.submit(runs.connection, [several])
    worker = await worker_of(result_inline_bytes=0)
    await runs.until(several.id, "j.status = 'succeeded'")
    rows = await runs.connection.fetch("SELECT step, name, key, sha256 FROM output ORDER BY step")
    assert [(row["step"], row["name"]) for row in rows] == [(step, "result.json") for step in "abc"]
    stored = [await worker.parts.store.fetch_bytes(row["key"], sha256=row["sha256"], max_bytes=9) for row in rows]
    assert stored == [b"14", b"21", b"21"]
    assert len({row["key"] for row in rows}) == 3


async def test_a_second_workflow_in_a_run_fails_and_takes_no_result_of_the_first(runs: Runs, worker_of: Start) -> None:
    """Of a template that names two workflows, whose run began before the API refused such templates."""
    handlers = [shop.doubles.runnable.handler, shop.fans.runnable.handler]
    steps = [{"id": name, "worker_type": handler} for name, handler in zip("ab", handlers, strict=True)]
    two = NewJob(Template.model_validate({"type": "two", "steps": steps}).pipeline(), "t", params={"count": 2})
    await jobs.submit(runs.connection, [two])
    await worker_of()
    status, _ = await runs.ended(two.id)
    error = await runs.connection.fetchval("SELECT error FROM job WHERE id = $1", two.id)
    assert (status, error["code"], error["step"]) == ("failed", "two_workflows", "b")


@MEMORY
async def test_a_gather_waits_for_all_and_branches_have_places_of_their_own(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.fans, 40)
    assert await runs.ended(run) == ("succeeded", [sum(range(40)) * 2, 0, 4, 8])
    steps = await runs.steps(run)
    assert len(steps) == 46
    assert {"double#40", "2.0/double#1", "2.2/double#2"} <= steps.keys()


@MEMORY
async def test_a_call_that_stands_twice_in_a_gather_is_one_step_and_wakes_the_workflow(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.doubles_once, 2)
    assert await runs.ended(run) == ("succeeded", [4, 4])
    assert await runs.steps(run) == {"double#1": "succeeded"}


@MEMORY
async def test_a_gather_that_is_awaited_in_several_places_makes_its_calls_once(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.gathers_a_gather)
    assert await runs.ended(run) == ("succeeded", [[2, 8]] * 4)
    assert (await runs.steps(run)).keys() == {"double#1", "2.1/double#1", "2.1/double#2"}


@MEMORY
@pytest.mark.parametrize("what", ["call", "call in a gather", "call of a branch of the branch", "gather"])
async def test_a_call_that_another_branch_might_begin_at_a_replay_fails_its_run_with_the_way_out(
    runs: Runs, worker_of: Start, memory: int, what: str
) -> None:
    """Its place in the journal would be that of the branch that comes first."""
    await worker_of(workflow_memory=memory, workflow_memory_seconds=600.0)
    run = await runs.submit(shop.races, what)
    await runs.until(run, BOTH_STEPS_HAVE_ENDED)
    await runs.waits(run)
    await runs.signal(run, "go", None)
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "workflow_awaits")
    assert "to their gather, too" in error["message"]
    assert len(await runs.steps(run)) == 2


@MEMORY
@pytest.mark.parametrize(
    ("who_begins", "results"),
    [
        ("their gather", [2, 2, 2, 2]),
        ("an earlier branch", [2, 2, 2]),
        ("the first await of a branch", [2, 2, [2], 2]),
    ],
)
async def test_branches_share_a_call_if_it_is_clear_which_of_them_begins_it(
    runs: Runs, worker_of: Start, memory: int, who_begins: str, results: list[Any]
) -> None:
    await worker_of(workflow_memory=memory, workflow_memory_seconds=600.0)
    run = await runs.submit(shop.shares, who_begins)
    await runs.until(run, BOTH_STEPS_HAVE_ENDED)
    await runs.signal(run, "go", None)
    assert await runs.ended(run) == ("succeeded", results)
    assert len(await runs.steps(run)) == 2


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("one coroutine twice", "one coroutine twice"),
        ("a branch waits for its own gather", "neither could end"),
        ("two gathers wait for each other", "neither could end"),
    ],
)
async def test_a_gather_that_could_never_end_fails_its_run_with_the_reason(
    runs: Runs, worker_of: Start, how: str, words: str
) -> None:
    await worker_of()
    status, error = await runs.ended(await runs.submit(shop.never_could_end, how))
    assert (status, error["code"]) == ("failed", "workflow_awaits")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("workflow", "steps"),
    [(shop.doubles, 10_000), (shop.loops, 1000)],
    ids=["10,000 in one gather", "1,000 one after another"],
)
async def test_a_workflow_has_many_steps(runs: Runs, worker_of: Start, workflow: Any, steps: int) -> None:
    await worker_of()
    run = await runs.submit(workflow, steps)
    assert await runs.ended(run, within=250) == ("succeeded", sum(range(steps)) * 2)
    counted = await runs.connection.fetch(
        "SELECT status, max(attempt), count(*) FROM task WHERE job_id = $1 AND contained GROUP BY status",
        run,
    )
    assert [tuple(row) for row in counted] == [("succeeded", 1, steps)]
    assert len({place[:2] for place in await runs.journal(run)}) == steps


async def test_the_answer_about_a_workflow_has_its_own_step_however_many_it_has_started(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of()
    run = await runs.submit(shop.doubles, MAX_STEPS)
    await runs.ended(run, within=250)
    row = await find_job(runs.connection, "t", run)
    assert row is not None
    assert len(row["steps"]) == MAX_STEPS
    assert [step["result"] for step in row["steps"] if step["id"] == "run"] == [{"value": MAX_STEPS * (MAX_STEPS - 1)}]


@pytest.mark.parametrize("kind", ["start", "call", "wait"])
async def test_a_workflow_makes_as_many_calls_as_the_settings_allow(runs: Runs, worker_of: Start, kind: str) -> None:
    await worker_of(workflow_max_calls=3, workflow_memory=0)
    most = await runs.submit(shop.repeats, kind, 3)
    assert (await runs.ended(most))[0] == "succeeded"
    too_many = await runs.submit(shop.repeats, kind, 4)
    status, error = await runs.ended(too_many)
    assert (status, error["code"]) == ("failed", "workflow_too_long")
    assert len(await runs.journal(too_many)) == 3


@MEMORY
async def test_a_failed_step_is_raised_where_it_is_awaited_and_the_run_goes_on(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.compensates, "stolen")
    assert await runs.ended(run) == ("succeeded", "stolen; 42")
    assert await runs.steps(run) == {"double#1": "succeeded", "refuse#1": "failed"}


async def test_a_failed_step_of_a_workflow_is_no_dead_letter_and_its_failed_run_is_one(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of()
    assert await runs.ended(await runs.submit(shop.compensates, "unpaid")) == ("succeeded", "unpaid; 42")
    failed = await runs.submit(shop.fails, "unpaid")
    assert (await runs.ended(failed))[0] == "failed"
    async with asyncio.timeout(SECONDS):
        while not dead_letters("unpaid"):  # the worker counts once PostgreSQL has answered
            await asyncio.sleep(0.01)
    every = DeadLetterFilter(runs=True, pipelines=(), owned=())
    (letter,) = await job_reads.dead_letters(runs.connection, "t", every, limit=10)
    assert dead_letters("unpaid") == {letter["step"]: 1.0}


async def test_a_gather_raises_the_first_failure_in_order_once_all_have_ended(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.partly)
    assert await runs.ended(run) == ("succeeded", ["2", "a", "b", "c"])
    assert set((await runs.steps(run)).values()) == {"succeeded", "failed"}


async def test_a_workflow_whose_calls_a_failover_undid_makes_them_again(runs: Runs, worker_of: Start) -> None:
    """An asynchronous failover loses the last commits. The coroutine in memory knows calls that nobody has any more."""
    await worker_of(workflow_memory_seconds=600.0)
    run = await runs.submit(shop.naps, 60.0)
    await runs.waits(run)
    await runs.connection.execute("DELETE FROM journal WHERE job_id = $1", run)
    await runs.connection.execute("UPDATE task SET available_at = clock_timestamp() WHERE job_id = $1", run)
    async with asyncio.timeout(SECONDS):
        while not (rows := await runs.journal(run)):
            await asyncio.sleep(0.01)
    assert [row[:4] for row in rows] == [("", 1, "sleep", "sleep")]


async def test_a_workflow_whose_suspension_a_failover_undid_consumes_no_signal_twice(
    runs: Runs, worker_of: Start
) -> None:
    """The coroutine in memory has the payload. The signal is there again, and the worker that forgot the task has
    released it.
    """
    await worker_of(workflow_memory_seconds=600.0)
    run = await runs.submit(shop.hears_twice, 500.0)
    await runs.waits(run)
    await runs.signal(run, "go", 1)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.state = 'done')")
    await runs.waits(run)
    async with runs.connection.transaction():
        await runs.connection.execute(
            "UPDATE journal SET value = NULL, state = 'open' WHERE job_id = $1 AND kind = 'signal'", run
        )
        await runs.connection.execute("UPDATE journal SET due_at = clock_timestamp() WHERE kind = 'sleep'")
        await runs.signal(run, "go", 1)
        await runs.connection.execute(
            "UPDATE task SET status = 'pending', available_at = clock_timestamp() WHERE job_id = $1", run
        )
    await runs.until(run, "(SELECT count(*) = 3 FROM journal e WHERE e.job_id = j.id)")
    await runs.signal(run, "go", 2)
    assert await runs.ended(run) == ("succeeded", [1, 2])


async def test_what_the_workflow_raises_ends_its_run(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.fails, "stolen")
    status, error = await runs.ended(run)
    assert (status, error["code"], error["message"]) == ("failed", "stolen", "no such card")


async def test_a_workflow_that_exits_ends_its_run_and_not_the_worker(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    status, error = await runs.ended(await runs.submit(shop.exits, "itself"))
    assert (status, error["code"]) == ("failed", "handler_error")
    status, message = await runs.ended(await runs.submit(shop.exits, "in a call"))
    assert status == "succeeded"
    assert "SystemExit: 3" in message


@MEMORY
async def test_a_sleep_holds_no_lease_and_values_are_the_same_at_each_replay(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.naps, 0.3)
    await runs.until(run, "EXISTS (SELECT 1 FROM history e WHERE e.job_id = j.id AND e.task_status = 'waiting')")
    status, (late, drawn, number) = await runs.ended(run)
    assert (status, late) == ("succeeded", "True")
    other = await runs.submit(shop.naps, 0.0)
    assert (await runs.ended(other))[1][1:] != [drawn, number]


@MEMORY
async def test_the_time_of_a_workflow_is_utc_whatever_the_zone_of_postgresql(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    """As on a host with another zone, whose initdb writes it into postgresql.conf."""
    name = await runs.connection.fetchval("SELECT current_database()")
    await runs.connection.execute(f"ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'")
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.reads_the_clock)
    await runs.signal(run, "go", None)
    status, times = await runs.ended(run)
    assert status == "succeeded"
    assert {time[-6:] for time in times} == {"+00:00"}
    assert times == sorted(times)


@MEMORY
async def test_a_call_is_made_once_and_its_result_recorded(runs: Runs, worker_of: Start, memory: int) -> None:
    await worker_of(workflow_memory=memory)
    shop.ran.clear()
    run = await runs.submit(shop.calls)
    status, (drawn, code, message) = await runs.ended(run)
    assert (status, code, message) == ("succeeded", "handler_error", "ValueError: broken")
    assert len(drawn) == 32
    assert shop.ran == [("drawn", None)]


async def test_a_large_result_of_a_step_comes_from_the_object_store(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.reads_much, 5_000_000)
    assert await runs.ended(run) == ("succeeded", 5_000_000)


async def test_a_workflow_reads_each_result_that_the_settings_allow(runs: Runs, worker_of: Start) -> None:
    size = 64 * 1024 * 1024 + 1
    await worker_of(result_max_bytes=2 * size)
    assert await runs.ended(await runs.submit(shop.reads_much, size)) == ("succeeded", size)


async def test_a_workflow_reads_a_result_that_was_stored_when_the_settings_allowed_more(
    runs: Runs, worker_of: Start
) -> None:
    first = await worker_of(workflow_memory=0)
    run = await runs.submit(shop.reads_and_waits, 200_000)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(run)
    await first.__aexit__()
    await worker_of(result_max_bytes=100_000)
    await runs.signal(run, "go", None)
    assert await runs.ended(run) == ("succeeded", 200_000)


async def test_a_call_of_a_function_whose_annotation_is_unknown_here_takes_any_json(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of()
    assert await runs.ended(await runs.submit(shop.calls_the_unknown)) == ("succeeded", 7)


@MEMORY
@pytest.mark.parametrize("how", ["step", "run"])
async def test_a_result_that_its_type_does_not_read_is_a_failure_that_the_workflow_may_handle(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch, memory: int, how: str
) -> None:
    """Once the retries are used up: another worker may have the release that reads it. A later release does not read it
    any more: the workflow has gone on.
    """
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.compensates_what_it_cannot_read, how)
    own = "SELECT id, status, errors FROM task WHERE job_id = $1 AND NOT contained"
    for errors in range(1, 5):
        await runs.until(run, f"EXISTS (SELECT 1 FROM ({own}) t WHERE status = 'retry' AND errors = $2)", errors)
        await runs.connection.execute(
            "UPDATE task SET available_at = clock_timestamp() WHERE job_id = $1 AND status = 'retry'", run
        )
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(run)
    monkeypatch.setattr(shop.price.results, "_adapter", TypeAdapter(dict[str, int]))
    await runs.signal(run, "go", None)
    status, (code, message, undone) = await runs.ended(run)
    assert (status, code, undone) == ("succeeded", "result_unreadable", "42")
    assert "cents Extra inputs are not permitted" in message
    assert "failed" in {state for *_, state in await runs.journal(run)}


@MEMORY
async def test_a_call_returns_a_model_whose_json_has_other_names(runs: Runs, worker_of: Start, memory: int) -> None:
    await worker_of(workflow_memory=memory)
    assert await runs.ended(await runs.submit(shop.typed_calls, aliased=True)) == ("succeeded", 7)


async def test_a_call_whose_result_no_replay_could_read_ends_its_run_at_once(runs: Runs, worker_of: Start) -> None:
    """Once it was recorded, every attempt would fail."""
    await worker_of()
    shop.ran.clear()
    run = await runs.submit(shop.typed_calls, aliased=False)
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "result_not_serialisable")
    assert "at /number: Input should be a valid integer" in error["message"]
    assert shop.ran == [("rounded", None)]
    assert await runs.journal(run) == []


async def test_a_call_returns_as_much_as_a_row_may_have_and_the_error_names_the_way(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of(result_inline_bytes=100_000)
    shop.ran.clear()
    assert await runs.ended(await runs.submit(shop.calls_much, 99_998)) == ("succeeded", 99_998)
    run = await runs.submit(shop.calls_much, 99_999)  # two quotes more in JSON
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "result_too_large")
    assert "100001 bytes" in error["message"]
    assert "ctx.run" in error["message"]
    assert shop.ran == [("much", 99_998), ("much", 99_999)]
    assert await runs.journal(run) == []


async def test_a_setting_that_sends_all_results_to_the_store_leaves_calls_what_they_had(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of(result_inline_bytes=0)
    assert (await runs.ended(await runs.submit(shop.calls_much, 65_534)))[0] == "succeeded"


async def test_a_workflow_is_no_step_of_another_and_the_error_names_the_way(runs: Runs, worker_of: Start) -> None:
    """Both would write to the same places of the run's journal."""
    await worker_of()
    run = await runs.submit(shop.runs_a_workflow)
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "workflow_as_step")
    assert "checkout is a workflow" in error["message"]
    assert "ctx.start" in error["message"]
    assert await runs.steps(run) == {}


@MEMORY
async def test_a_wait_for_a_signal_is_one_call_of_those_that_the_settings_allow(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    """However it ends: by a signal that came before or after the wait began, or by its time."""
    await worker_of(workflow_max_calls=4, workflow_memory=memory)
    run = await runs.submit(shop.listens, ["a", "b", "c", "d"])
    await runs.signal(run, "d", 4)
    for number, name in enumerate("abc", 1):
        waits = "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.name = $2 AND e.state = 'open')"
        await runs.until(run, waits, name)
        await runs.signal(run, name, number)
    assert await runs.ended(run) == ("succeeded", [1, 2, 3, 4])
    timed_out = await runs.submit(shop.listens_in_vain, 4)
    assert await runs.ended(timed_out) == ("succeeded", 4)
    too_many = await runs.submit(shop.listens, ["a", "b", "c", "d", "e"])
    for name in "abcde":
        await runs.signal(too_many, name, 1)
    status, error = await runs.ended(too_many)
    assert (status, error["code"]) == ("failed", "workflow_too_long")


async def test_a_workflow_that_awaits_anything_else_fails_with_the_way_out(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    status, error = await runs.ended(await runs.submit(shop.awaits_else))
    assert (status, error["code"]) == ("failed", "workflow_awaits")
    assert "ctx.call" in error["message"]


def test_a_workflow_is_an_async_def_with_a_context() -> None:
    app = App("other")

    def plain(ctx: Any) -> None: ...
    async def bare() -> None: ...
    async def forgotten(order: int) -> None: ...
    async def untyped(order) -> None: ...  # type: ignore[no-untyped-def]  # that is the test

    wrong = ((plain, "async def"), (bare, "first parameter"), (forgotten, "first parameter"), (untyped, "first param"))
    for function, sentence in wrong:
        with pytest.raises(DeclarationError, match=f"test_running.py:[0-9]+: .*{sentence}"):
            app.workflow(function)  # type: ignore[arg-type]  # it is the test


@MEMORY
async def test_a_wait_times_out_and_a_later_signal_changes_nothing(runs: Runs, worker_of: Start, memory: int) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.approved, 0.2)
    assert await runs.ended(run) == ("succeeded", "nobody approved")
    assert await runs.journal(run) == [("", 1, "signal", "approved", "timed_out")]


async def test_a_signal_that_came_before_its_wait_and_does_not_fit_ends_the_run_with_the_way_out(
    runs: Runs, worker_of: Start
) -> None:
    """Nobody knew the model when it came. A replay of the run waits for another signal."""
    run = await runs.submit(shop.approved)
    await runs.signal(run, "approved", {"by": 7})
    await worker_of()
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "signal_invalid")
    for words in ("signal approved", "at /by: Input should be a valid string", "SignalInvalid", "runs:write"):
        assert words in error["message"]
    assert "errors.pydantic.dev" not in error["message"]
    assert await runs.journal(run) == [("", 1, "signal", "approved", "open")]
    await jobs.replay(runs.connection, run, "t")
    await runs.waits(run)
    with pytest.raises(Invalid):  # the model of the wait is known now
        await runs.signal(run, "approved", {"by": 7})
    for name in ("anna", "bert"):
        await runs.signal(run, "approved", {"by": name})
    assert await runs.ended(run) == ("succeeded", "anna, bert")


@MEMORY
async def test_a_workflow_that_catches_a_signal_that_does_not_fit_waits_for_the_next(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    run = await runs.submit(shop.insists)
    await runs.signal(run, "approved", {"by": 7})
    await worker_of(workflow_memory=memory)
    await runs.until(run, "(SELECT count(*) = 2 FROM journal e WHERE e.job_id = j.id)")
    await runs.waits(run)
    await runs.signal(run, "approved", {"by": "anna"})
    refusal = "approved /by: Input should be a valid string"
    assert await runs.ended(run) == ("succeeded", [refusal, "anna"])


@MEMORY
async def test_of_two_signals_before_the_wait_the_first_may_be_wrong(runs: Runs, worker_of: Start, memory: int) -> None:
    run = await runs.submit(shop.insists)
    await runs.signal(run, "approved", {})
    await runs.signal(run, "approved", {"by": "anna"})
    await worker_of(workflow_memory=memory)
    assert await runs.ended(run) == ("succeeded", ["approved /by: Field required", "anna"])
    assert await runs.connection.fetchval("SELECT count(*) FROM signal WHERE job_id = $1", run) == 0


@MEMORY
async def test_signals_come_in_their_order_however_many_others_came_before(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    run = await runs.submit(shop.listens, ["last", *["item"] * 40, "late", "item"])
    for number in range(41):
        await runs.signal(run, "item", number)
    await runs.signal(run, "last", 41)
    await worker_of(workflow_memory=memory)
    await runs.waits(run)
    assert await runs.connection.fetchval("SELECT count(*) FROM signal WHERE job_id = $1", run) == 1
    await runs.signal(run, "late", 42)
    assert await runs.ended(run) == ("succeeded", [41, *range(40), 42, 40])
    assert await runs.connection.fetchval("SELECT count(*) FROM signal WHERE job_id = $1", run) == 0


async def test_a_workflow_that_waits_for_many_calls_delays_no_other_when_it_reads_them(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workflows of a worker share a connection for their journals: what many calls have returned is not read
    there.
    """
    counts: list[int] = []
    read = Journals.read

    async def counting_read(journals: Journals, request: Reading) -> Journal | None:
        counts.append(len(request.places or ()))
        return await read(journals, request)

    monkeypatch.setattr(Journals, "read", counting_read)
    await worker_of()
    for steps in (SHORT, SHORT + 1):
        run = await runs.submit(shop.doubles, steps)
        assert await runs.ended(run) == ("succeeded", sum(range(steps)) * 2)
    assert max(counts) == SHORT


async def test_a_signal_that_does_not_fit_the_wait_is_refused_whoever_sends_it(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.insists)
    await runs.waits(run)
    with pytest.raises(Invalid, match="does not fit at /by: 7 is not of type") as refused:
        await runs.signal(run, "approved", {"by": 7})
    assert refused.value.code == "invalid_payload"
    await runs.signal(run, "approved", {"by": "anna"})
    assert await runs.ended(run) == ("succeeded", ["anna"])


TIMED = {
    "at": "2026-03-29T02:30:00",
    "local": "2026-03-29T02:30:00",
    "day": "2026-03-29T00:00:00",
    "opens": "08:30:00",
    "lasts": "PT1.5S",
    "key": "0192f0c1d4604e8aad0bb99fedfc2e04",
    "url": "https://de.wikipedia.org/wiki/K\u00f6ln",
}


async def test_a_signal_that_the_model_of_the_wait_reads_is_taken_whatever_the_formats_of_json_schema_allow(
    runs: Runs, worker_of: Start
) -> None:
    """So are Python's own values as they are written: a time without a zone, a duration of seconds."""
    await worker_of()
    run = await runs.submit(shop.listens_to_times)
    await runs.waits(run)
    await runs.signal(run, "go", TIMED)
    assert await runs.ended(run) == ("succeeded", sorted(TIMED))


@pytest.mark.parametrize("field", TIMED)
async def test_a_signal_that_no_model_reads_is_refused_by_the_formats(runs: Runs, worker_of: Start, field: str) -> None:
    await worker_of()
    run = await runs.submit(shop.listens_to_times)
    await runs.waits(run)
    with pytest.raises(Invalid, match=f"at /{field}: ") as refused:
        await runs.signal(run, "go", {field: "no such thing"})
    assert refused.value.code == "invalid_payload"


def test_an_address_and_a_pattern_are_for_the_model_alone_to_check() -> None:
    schema = {"properties": {"mail": {"format": "email"}, "pattern": {"format": "regex"}}}
    validator = compile_model_schema(schema)
    assert validator is not None
    assert validator.is_valid({"mail": "j\u00fcrgen@ex\u00e4mple.de", "pattern": "^(?!a)"})


async def test_a_pattern_that_only_python_knows_is_checked_by_the_workflow(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.listens_to_a_word)
    await runs.waits(run)
    await runs.signal(run, "go", {"word": "bee"})
    assert await runs.ended(run) == ("succeeded", "bee")
    refusing = await runs.submit(shop.listens_to_a_word)
    await runs.waits(refusing)
    await runs.signal(refusing, "go", {"word": "ant"})
    status, error = await runs.ended(refusing)
    assert (status, error["code"]) == ("failed", "signal_invalid")


async def test_a_signal_with_a_time_without_a_zone_fits_a_wait_for_it(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.meets)
    await runs.waits(run)
    with pytest.raises(Invalid, match="does not fit at its root"):
        await runs.signal(run, "at", "2026-13-28T10:30:00")
    await runs.signal(run, "at", "2026-11-28T10:30:00")
    assert await runs.ended(run) == ("succeeded", "2026-11-28T10:30:00")


@MEMORY
async def test_a_cancel_is_raised_in_a_workflow_that_runs_and_its_cleanup_may_call(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    shop.ran.clear()
    shop.released.clear()
    run = await runs.submit(shop.cleans_up)
    async with asyncio.timeout(SECONDS):
        while ("slow", None) not in shop.ran:
            await asyncio.sleep(0.01)
    await runs.cancel(run)
    shop.released.set()  # a call of two seconds ended before a cancel that stood still for longer
    assert (await runs.ended(run))[0] == "cancelled"
    assert ("drawn", None) in shop.ran


async def test_a_cancel_ends_a_workflow_that_waits_with_its_steps(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.approved)
    await runs.waits(run)
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"


@MEMORY
async def test_a_wait_without_a_time_limit_outlives_what_comes_for_another(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.two_approvals)
    await runs.waits(run)
    await runs.signal(run, "first", "a")
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.state = 'done')")
    await runs.waits(run)
    await runs.signal(run, "second", "b")
    assert await runs.ended(run) == ("succeeded", ["a", "b"])


@MEMORY
async def test_a_workflow_that_waits_for_a_run_is_claimed_only_when_something_has_come(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.slow_child)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'result')")
    await asyncio.sleep(0.5)  # it could be claimed hundreds of times
    child = await runs.connection.fetchval("SELECT child_id FROM journal WHERE job_id = $1 AND kind = 'result'", run)
    await runs.signal(child, "go", "gone")
    assert await runs.ended(run) == ("succeeded", "gone")
    claims = await runs.connection.fetchval(
        "SELECT count(*) FROM history e JOIN task t ON t.id = e.task_id AND NOT t.contained"
        " WHERE e.job_id = $1 AND e.task_status = 'running'",
        run,
    )
    assert claims <= 5


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (str(2**64 - 1), None),
        (str(2**64), "an integer has at most 64 bits"),
        (r"{'a': 'b\x00'}", "/a: a text with a NUL character"),
    ],
)
async def test_a_value_that_would_change_when_it_is_stored_is_refused_where_it_is_returned(
    runs: Runs, worker_of: Start, value: str, reason: str | None
) -> None:
    await worker_of()
    status, result = await runs.ended(await runs.submit(shop.odd_values, value))
    if reason is None:
        assert (status, result) == ("succeeded", value)
    else:
        assert (status, result["code"]) == ("failed", "result_not_serialisable")
        assert reason in result["message"]
