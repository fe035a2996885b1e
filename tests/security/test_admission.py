"""What a submission is checked for, and charged: each limit by itself, without an API around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any

import pytest

from leasehold.db.database import Connection, Pool, connect, make_pool
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid, TooMany
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, SkipIf, Step
from leasehold.limits import usage as usages
from leasehold.limits.admission import Admission, Payer, queues_of, queues_of_jobs
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.jobs import NewJob
from tests.factories import ONE, THREE, Rows
from tests.support.lock_waits import until_waiting

PAYER = Payer("acme", "key")
QUEUE = {"default": 1}
UNBOUNDED = {"unfinished_per_tenant": 0, "stored_bytes_per_tenant": 0}


@pytest.fixture
async def other(settings: Settings) -> AsyncIterator[Connection]:
    connection = await connect(settings, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    pool = await make_pool(settings, "test", 1)
    yield pool
    pool.terminate()


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process counts a tenant's bytes once. It then remembers what it admits, however slow the machine is."""
    monkeypatch.setattr(usages, "_LEAST_PAUSE", usages._LONGEST_PAUSE)


def admission(settings: Settings, **limits: Any) -> Admission:
    return Admission(settings.model_copy(update={**UNBOUNDED, **limits}), [])


async def submit(admission: Admission, connection: Connection, queues: Mapping[str, int] = QUEUE, **more: Any) -> None:
    async with connection.transaction(), admission.submitting(connection, PAYER, queues, **more):
        await jobs.submit(connection, [NewJob(ONE, "acme")])


def test_a_new_job_waits_in_the_queues_of_the_steps_that_need_no_other() -> None:
    pipeline = Pipeline(
        "fan",
        module="tests.factories",
        steps=[
            Step("split", queue="a"),
            Step("check", queue="b"),
            Step("count", queue="a"),
            Step("each", queue="c", part=True),
            Step("join", needs=("split",), queue="d"),
        ],
    )
    assert queues_of("acme", pipeline) == {"a": 2, "b": 1}
    assert queues_of_jobs("acme", pipeline, [{}] * 3) == {"a": 6, "b": 3}
    assert queues_of("acme", THREE) == QUEUE


def test_a_new_job_waits_in_no_queue_of_a_step_that_its_parameters_skip() -> None:
    """The step after the skipped one is then the first, unless it waits for another."""
    steps = [
        Step("sort", queue="a", skip_if=SkipIf("/quick")),
        Step("check", queue="b", needs=("sort",)),
        Step("count", queue="c"),
        Step("join", queue="d", needs=("sort", "count")),
    ]
    pipeline = Pipeline("skipping", module="tests.factories", steps=steps)
    assert queues_of("acme", pipeline, params={"quick": False}) == {"a": 1, "c": 1}
    assert queues_of("acme", pipeline, params={"quick": True}) == {"b": 1, "c": 1}
    assert queues_of_jobs("acme", pipeline, [{"quick": True}, {}]) == {"a": 1, "b": 1, "c": 2}


def test_jobs_whose_parameters_may_skip_each_step_wait_only_in_the_queues_of_the_steps_that_they_keep() -> None:
    steps = [Step("sort", queue="a", skip_if=SkipIf("/quick")), Step("count", queue="b", skip_if=SkipIf("/rough"))]
    pipeline = Pipeline("skipping", module="tests.factories", steps=steps)
    assert queues_of_jobs("acme", pipeline, [{"quick": True}, {"quick": True}, {"rough": True}, {}]) == {"a": 2, "b": 3}


async def test_a_full_queue_says_its_bound_and_when_to_come_again(settings: Settings, rows: Connection) -> None:
    limited = admission(settings, queue_depth_limit=1)
    await submit(limited, rows)
    with pytest.raises(TooMany) as refused:
        await submit(limited, rows)
    assert (refused.value.code, refused.value.retry_after) == ("queue_full", 5.0)
    assert refused.value.message == "At most 1 tasks may wait in the queue: try again later."
    assert refused.value.headers == {"RateLimit-Policy": '"queue";q=1', "RateLimit": '"queue";r=0;t=5'}
    with pytest.raises(Invalid) as refused_for_ever:
        await submit(limited, rows, {"default": 2}, count=2)
    assert refused_for_ever.value.code == "batch_too_large"


async def test_without_a_bound_on_the_depth_of_queues_no_request_has_too_many_tasks(
    settings: Settings, rows: Connection
) -> None:
    unlimited = admission(settings)
    async with rows.transaction(), unlimited.submitting(rows, PAYER, {"default": 1000}, 2) as paid:
        unlimited.check_added(paid)


@pytest.mark.parametrize(
    ("limit", "code"),
    [({"queue_depth_limit": 1}, "queue_full"), ({"unfinished_per_tenant": 1}, "too_many_unfinished")],
)
async def test_of_two_submissions_that_both_saw_room_the_second_to_commit_is_refused(
    settings: Settings, rows: Connection, other: Connection, limit: dict[str, int], code: str
) -> None:
    limited = admission(settings, **limit)

    async def submit_around_another() -> None:
        async with other.transaction(), limited.submitting(other, PAYER, QUEUE):
            await submit(limited, rows)
            await jobs.submit(other, [NewJob(ONE, "acme")])

    with pytest.raises(TooMany) as refused:
        await submit_around_another()
    assert refused.value.code == code
    assert await rows.fetchval("SELECT count(*) FROM job") == 1


async def test_a_submission_waits_for_another_one_to_the_same_queue_and_counts_its_tasks(
    settings: Settings, rows: Connection, other: Connection
) -> None:
    limited = admission(settings, queue_depth_limit=1)
    async with rows.transaction():
        await submit(limited, rows)
        second = asyncio.create_task(submit(limited, other))
        await until_waiting(rows, kind="advisory")
    with pytest.raises(TooMany) as refused:
        await second
    assert refused.value.code == "queue_full"
    assert await rows.fetchval("SELECT count(*) FROM job") == 1


@pytest.mark.usefixtures("remembered")
async def test_submissions_without_bytes_take_none(settings: Settings, rows: Connection) -> None:
    """The store of this tenant has room for one byte."""
    limited = admission(settings, stored_bytes_per_tenant=1)
    for _ in range(3):
        await submit(limited, rows)
    await submit(limited, rows, size=1)
    with pytest.raises(TooMany) as refused:
        await submit(limited, rows)
    assert refused.value.code == "storage_full"


@pytest.mark.usefixtures("remembered")
async def test_an_upload_takes_the_bytes_that_it_brings_and_no_place_of_a_job(
    settings: Settings, connection: Connection
) -> None:
    limited = admission(settings, unfinished_per_tenant=1, stored_bytes_per_tenant=10)
    await Rows(connection).submit(tenant="acme")
    await limited.charge_upload(connection, PAYER)  # its bytes come later
    await limited.charge_upload(connection, PAYER, 4)
    await limited.check_stored_bytes(connection, "acme", 6)
    with pytest.raises(TooMany) as refused:
        await limited.charge_upload(connection, PAYER, 1)
    with pytest.raises(TooMany) as refused_check:
        await limited.check_stored_bytes(connection, "acme", 1)
    assert refused.value.code == refused_check.value.code == "storage_full"


async def test_a_single_run_takes_the_last_place_and_no_other(
    settings: Settings, connection: Connection, pool: Pool
) -> None:
    limited = admission(settings, unfinished_per_tenant=2)
    await Rows(connection).submit(tenant="acme")
    assert await limited.reserve_single_run(pool, "acme") is False  # near the bound: it is counted exactly
    await Rows(connection).submit(tenant="acme")
    with pytest.raises(TooMany) as refused:
        await limited.reserve_single_run(pool, "acme")
    assert refused.value.code == "too_many_unfinished"


@pytest.mark.parametrize(
    "limit", [{"queue_depth_limit": 5}, {"submissions_per_key": 5}, {"submissions_per_tenant": 5}], ids=str
)
async def test_a_single_run_is_no_way_around_the_other_limits(
    settings: Settings, pool: Pool, limit: dict[str, int]
) -> None:
    assert await admission(settings, **limit).reserve_single_run(pool, "acme") is False
    assert await admission(settings).reserve_single_run(pool, "acme") is True


# --- the rates of a minute


@pytest.mark.parametrize(("of_key", "of_tenant"), [(5, 3), (3, 5)])
async def test_an_answer_says_how_much_is_left_of_the_rate_that_ends_first(
    settings: Settings, rows: Connection, of_key: int, of_tenant: int
) -> None:
    limited = admission(settings, submissions_per_key=of_key, submissions_per_tenant=of_tenant)
    assert await limited.charge(rows, PAYER) == {
        "RateLimit-Policy": '"submissions";q=3;w=60',
        "RateLimit": '"submissions";r=2;t=60',
    }


async def test_a_refund_gives_back_one_submission(settings: Settings, rows: Connection) -> None:
    """At three submissions a minute, a submission costs 20 seconds."""
    limited = admission(settings, submissions_per_key=3)
    full_at = "SELECT full_at FROM rate_bucket WHERE key = 'submit:key:key'"
    for _ in range(3):
        await limited.charge(rows, PAYER)
    charged = await rows.fetchval(full_at)
    await limited.refund(rows, PAYER)
    assert charged - await rows.fetchval(full_at) == timedelta(seconds=20)


# --- a check before a long body arrives


async def test_a_check_refuses_what_the_rate_would_refuse_and_takes_nothing_of_it(
    settings: Settings, rows: Connection
) -> None:
    limited = admission(settings, submissions_per_key=1)
    for _ in range(3):
        await limited.check(rows, PAYER, QUEUE)
    await submit(limited, rows)
    with pytest.raises(TooMany) as refused:
        await limited.check(rows, PAYER, QUEUE)
    assert refused.value.code == "rate_limited"
    assert refused.value.headers["RateLimit-Policy"] == '"submissions";q=1;w=60'
    await limited.check(rows, PAYER, QUEUE, "uploads")  # another rate


async def test_a_check_passes_while_one_task_has_room_in_each_queue(settings: Settings, rows: Connection) -> None:
    limited = admission(settings, queue_depth_limit=2)
    await submit(limited, rows)
    await limited.check(rows, PAYER, QUEUE)
    await submit(limited, rows)
    with pytest.raises(TooMany) as refused:
        await limited.check(rows, PAYER, QUEUE)
    assert refused.value.code == "queue_full"


async def test_a_check_lets_a_job_with_more_tasks_than_may_wait_pass_while_no_other_task_waits(
    settings: Settings, rows: Connection
) -> None:
    limited = admission(settings, queue_depth_limit=1)
    await limited.check(rows, PAYER, {"default": 3})
    await submit(limited, rows)
    with pytest.raises(TooMany) as refused:
        await limited.check(rows, PAYER, {"default": 3})
    assert "has 3 tasks there, so it is accepted while no other task waits there" in refused.value.message


async def test_a_check_passes_at_the_bound_on_unfinished_jobs_because_the_job_may_be_there_already(
    settings: Settings, connection: Connection
) -> None:
    limited = admission(settings, unfinished_per_tenant=1)
    await Rows(connection).submit(tenant="acme")
    await limited.check(connection, PAYER, QUEUE)
    await Rows(connection).submit(tenant="acme")  # over the bound, as after an operator has lowered it
    with pytest.raises(TooMany) as refused:
        await limited.check(connection, PAYER, QUEUE)
    assert refused.value.code == "too_many_unfinished"


# --- a job that is not new


async def test_a_job_that_is_tried_again_counts_in_the_queues_in_which_it_waits_now(
    settings: Settings, connection: Connection
) -> None:
    rows = Rows(connection)
    limited = admission(settings, queue_depth_limit=1)
    (hint,) = await rows.submit(THREE, tenant="acme")
    job_id = (await rows.task(hint.hint.task_id))["job_id"]
    await rows.submit(THREE, tenant="acme")
    for step, queue, status in (("a", "q1", "retry"), ("b", "q2", "waiting"), ("c", "q3", "succeeded")):
        await connection.execute(
            "UPDATE task SET queue = $1, status = $2, finished_at = CASE WHEN $2 = 'succeeded' THEN now() END"
            " WHERE job_id = $3 AND step = $4",
            queue, status, job_id, step,
        )  # fmt: skip
    async with limited.submitting(connection, PAYER, {}) as paid:
        await limited.add_queues_of(connection, paid, job_id)
        assert paid.queues == {"q1": 1, "q2": 1}


@pytest.mark.parametrize("depth", [4, 5])
async def test_a_job_that_is_tried_again_at_a_concurrency_limit_counts_where_it_waits_once_it_is_admitted(
    settings: Settings, connection: Connection, depth: int
) -> None:
    """Its first steps count, and no step that needs another. So do several jobs of one submission together."""
    rows = Rows(connection)
    limited = admission(settings, queue_depth_limit=depth)
    steps = [Step("a", queue="q"), Step("b", queue="q"), Step("c", queue="q", needs=("a",))]
    pipeline = Pipeline("p", module="tests", steps=steps)
    limits = [ConcurrencyLimit("acme", "k", at_most=1)]
    job_ids = [new_id(), new_id()]
    for job_id in job_ids:
        await rows.submit(pipeline, tenant="acme", id=job_id, limits=limits)
    await rows.submit(Pipeline("other", module="tests", steps=[Step("a", queue="q")]), tenant="acme")

    async def write() -> None:
        async with connection.transaction(), limited.submitting(connection, PAYER, {}, 2) as paid:
            for job_id in job_ids:
                await limited.add_queues_of(connection, paid, job_id)

    if depth == 5:  # the four first steps of the two jobs, and the step of another job
        await write()
    else:
        with pytest.raises(TooMany) as refused:
            await write()
        assert refused.value.code == "queue_full"
