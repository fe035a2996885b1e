"""Pages that stay open read few rows, however many jobs, queues, workers and steps there are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest

from leasehold.api.console import dead_letters, findings, job, overview, queues, webhooks
from leasehold.db import job_reads, overview_reads, run_reads, unsettled
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.pipelines.webhooks.pipeline import webhooks as delivery_pipeline
from leasehold.transitions import concurrency, notes, settlements, sweeps
from leasehold.transitions.jobs import NewJob, request_cancel, submit
from tests.api.conftest import Running
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker
from tests.jobs.test_job_logs import write

_TASK = (
    "INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts, lease_owner,"
    " lease_until, available_at) SELECT gen_random_uuid(), $1, 'acme', 's' || n, 9, $2, 1, $3, 1, $4,"
    " CASE WHEN $4::uuid IS NOT NULL THEN clock_timestamp() END, clock_timestamp() - interval '1 hour'"
    " FROM generate_series(1, $5::int) AS n"
)


async def add_tasks(
    rows: Connection, job_id: UUID, queue: str, n: int, status: str = "pending", owner: UUID | None = None
) -> None:
    await rows.execute(_TASK, job_id, queue, status, owner, n)


@asynccontextmanager
async def without_scans(rows: Connection) -> AsyncIterator[None]:
    """PostgreSQL scans a small table even where an index would serve a large one."""
    await rows.execute("SET enable_seqscan = off")
    yield
    await rows.execute("RESET enable_seqscan")


async def test_the_steps_of_a_job_share_what_is_read_of_their_queue(maker: Maker, rows: Connection) -> None:
    job_id, other = await maker.make("media"), await maker.make("media")
    await add_tasks(rows, other, "crowded", 60)
    await rows.execute("DELETE FROM task WHERE job_id = $1", job_id)
    await add_tasks(rows, job_id, "crowded", 3)
    steps = await job_reads.why_waiting(rows, "acme", job_id, max_ahead=60)
    assert [(step["ahead"], step["ahead_bound"]) for step in steps] == [(20, 20)] * 3
    steps = await job_reads.why_waiting(rows, "acme", job_id, at_most=2, max_ahead=12)
    assert [(step["ahead"], step["ahead_bound"]) for step in steps] == [(10, 10)] * 2
    whole = (await maker.client.get(f"/v1/jobs/{job_id}/explain")).json()
    assert [reason["code"] for reason in whole["reasons"]] == ["no_worker"] * 3
    await rows.execute(
        "INSERT INTO worker (id, present, host, pid, version, queues) VALUES ($1, false, 'h', 1, '0', '{crowded}')",
        new_id(),
    )
    whole = (await maker.client.get(f"/v1/jobs/{job_id}/explain")).json()
    assert "s3 is runnable, behind 62 others." in [reason["message"] for reason in whole["reasons"]]


async def test_queues_share_what_is_counted_of_them(maker: Maker, rows: Connection) -> None:
    job_id = await maker.make("media")
    for number in range(4):
        await add_tasks(rows, job_id, f"q{number}", 30)
        await rows.execute("UPDATE task SET step = queue || step WHERE job_id = $1 AND step ~ '^s[0-9]'", job_id)
    few = {row["queue"]: row for row in await run_reads.queues(rows, 30.0, 100, 40)}
    assert (few["q0"]["runnable"], few["q0"]["has_more"]) == (20, True)
    assert (few["media"]["runnable"], few["media"]["has_more"]) == (1, False)
    many = {row["queue"]: row for row in await run_reads.queues(rows, 30.0)}
    assert (many["q0"]["runnable"], many["q0"]["has_more"]) == (30, False)
    (alone,) = await run_reads.queues(rows, 30.0, 100, 31, after="media", limit=1)
    assert (alone["queue"], alone["runnable"], alone["has_more"]) == ("q0", 30, False)


async def test_a_queue_whose_tasks_have_all_ended_is_not_listed(maker: Maker, rows: Connection) -> None:
    job_id = await maker.make("media")
    for queue, status in (("a", "pending"), ("m", "pending"), ("n", "retry"), ("o", "waiting"), ("z", "pending")):
        await add_tasks(rows, job_id, queue, 1, status)
        await rows.execute("UPDATE task SET step = queue || step WHERE job_id = $1 AND step = 's1'", job_id)
    await rows.execute(
        "UPDATE task SET status = 'succeeded', finished_at = clock_timestamp() WHERE queue IN ('a', 'z')"
    )
    assert [row["queue"] for row in await run_reads.queues(rows, 30.0)] == ["m", "media", "n", "o"]


async def test_each_worker_has_its_own_leases(maker: Maker, rows: Connection) -> None:
    job_id, workers = await maker.make("media"), [new_id(), new_id()]
    for worker_id in workers:
        await rows.execute(
            "INSERT INTO worker (id, present, host, pid, version, queues) VALUES ($1, false, 'h', 1, '0', '{media}')",
            worker_id,
        )
    await add_tasks(rows, job_id, "media", 3, "running", workers[1])
    assert {row["id"]: row["leases"] for row in await run_reads.workers(rows, 30.0)} == {workers[0]: 0, workers[1]: 3}
    async with without_scans(rows):
        plan = await rows.fetch("EXPLAIN " + run_reads.WORKERS, 30.0, None, None, 1000)
    assert sum(" on task t" in line[0] for line in plan) == 1  # and not one for each worker
    assert not any("SubPlan" in line[0] for line in plan)


async def test_overview_finds_silent_steps_beside_any_number_of_live_jobs(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    silent = await maker.make("run")
    await rows.execute("UPDATE task SET available_at = now() - interval '1 day' WHERE job_id = $1", silent)
    await rows.execute(
        "INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq, params, inputs,"
        " output_prefix) SELECT gen_random_uuid(), 'acme', 'noop', 1, 'running', 1, 1, '{}', '{}', ''"
        " FROM generate_series(1, $1::int)",
        overview_reads.MAX_UNFINISHED + 1,
    )
    somebody = await person(ROLES["viewer"])
    page = await somebody.see("/")
    assert f"{overview_reads.MAX_UNFINISHED:,}+" in page
    assert "One due step has no external worker." in page
    async with without_scans(rows):
        for statement in (overview_reads.SILENT_STEPS, unsettled.SILENT_STEPS):
            plan = "\n".join(row[0] for row in await rows.fetch(f"EXPLAIN {_with_values(statement)}"))
            assert "job_external" in plan, plan


def _with_values(statement: str) -> str:
    return statement.replace("$2::uuid", "NULL::uuid").replace("id = $2", "id = NULL").replace(
        "$1", "'acme'").replace("$2", "60").replace("$3", "60").replace("$4", "50").replace("$5", "50")  # fmt: skip


async def test_overview_reads_the_newest_orders_and_finds_those_that_wait(
    person: MakePerson, maker: Maker, rows: Connection, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await maker.lose_order(await maker.make("generation"))
    ((pipeline, step),) = await rows.fetch(
        "SELECT j.pipeline, t.step FROM job j JOIN task t ON t.job_id = j.id AND t.status = 'failed' LIMIT 1"
    )
    by_people = [(pipeline, step, "asked_at"), ("another", step, "asked_at")]
    found, following = await unsettled.orders(rows, "acme", by_people, None, 10)
    assert len(found) == 3
    assert following is None
    async with without_scans(rows):
        plan = "\n".join(
            row[0]
            for row in await rows.fetch(
                f"EXPLAIN {unsettled._ORDERS}", "acme", None, [pipeline], [step], ["asked_at"], 10, 300
            )
        )
        count_plan = "\n".join(
            row[0]
            for row in await rows.fetch(
                f"EXPLAIN {unsettled._COUNT}", "acme", ["some_code"], [pipeline], [step], ["asked_at"], 300
            )
        )
    assert all(index in count_plan for index in ("job_failed_of", "job_cancelled", "job_code")), count_plan
    assert "job_failed_of" in plan, plan  # of the one pipeline, and not all jobs with an error
    assert "job_cancelled" in plan, plan
    newest, following = await unsettled.orders(rows, "acme", by_people, None, 10, max_searched=2)
    assert [row["job_id"] for row in newest] == [row["job_id"] for row in found[:2]]
    assert following == newest[-1]["job_id"]
    monkeypatch.setattr(overview, "REFRESH_SECONDS", 0)
    assert "3 orders have an unknown outcome." in await (await person()).see("/")
    for searched, sentence in (
        (2, "At least 2 orders have an unknown outcome."),
        (1, "The outcome of at least one order is unknown."),
    ):
        monkeypatch.setattr(findings, "_MAX_SEARCHED", searched)
        assert sentence in await (await person()).see("/")


@pytest.mark.parametrize("end", ["submit_outcome_unknown", "worker_lost", "step_timeout", "expired", "cancelled"])
async def test_overview_names_an_order_although_newer_jobs_have_failed_and_were_cancelled(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Jobs of each sort are searched for themselves: the newest two by an error of a pipeline or by a code, and the
    newest twenty that were cancelled. A job that has expired is found by the error alone.
    """
    monkeypatch.setattr(findings, "_MAX_SEARCHED", 2)
    monkeypatch.setattr(overview, "REFRESH_SECONDS", 0)
    order = await maker.make("generation")
    claimed = await maker.claim(order)
    await notes.remember(rows, claimed.lease, {"asked_at": "2026-11-22T10:00:00+00:00"})
    if end in ("expired", "cancelled"):
        await settlements.release(rows, [claimed.lease])
    if end == "expired":
        await rows.execute("UPDATE job SET deadline_at = clock_timestamp() WHERE id = $1", order)
        await sweeps.expire_jobs(rows)
    elif end == "cancelled":
        await request_cancel(rows, [order], "acme", reason="r", by="b")
    else:
        failure = settlements.Failure(claimed.lease, "error", end, "It did not work.", False, 0.0)
        await settlements.fail(rows, [failure])
    for number in range(1 if end == "expired" else 3):
        await maker.fail(await maker.make("generation", server_id=f"s{number}"), "content_refused")
    cancelled = [await maker.make("run") for _ in range(19)]
    await request_cancel(rows, cancelled, "acme", reason="r", by="b")
    sentence = "The outcome of at least one order is unknown."
    assert sentence in await (await person()).see("/")
    await request_cancel(rows, [await maker.make("run")], "acme", reason="r", by="b")
    assert (sentence in await (await person()).see("/")) == (end != "cancelled")


async def test_the_search_for_orders_says_whether_it_left_jobs_out(maker: Maker, rows: Connection) -> None:
    """It has left none out if each sort has fewer jobs than are searched. An order that two searches find counts
    once.
    """
    orders = [await maker.make("generation", server_id=f"s{number}") for number in range(2)]
    for order in orders:
        await maker.lose_order(order)
    for code in ("refused", "other"):
        await maker.fail(await maker.make("media"), code)
    by_people = [("generation", "submit", "asked_at"), ("media", "submit", "asked_at")]

    async def count(max_searched: int, *codes: str) -> tuple[int, bool]:
        return await unsettled.count_orders(rows, "acme", by_people, codes, max_searched)

    assert await count(3, "submit_outcome_unknown") == (2, False)
    assert await count(2) == (2, True)
    assert await unsettled.count_orders(rows, "acme", by_people[:1], ["refused"], 1) == (1, True)
    assert await unsettled.count_orders(rows, "rival", by_people, ["submit_outcome_unknown"], 1) == (0, False)
    no_errors = [("another", "submit", "asked_at")]
    assert await unsettled.count_orders(rows, "acme", no_errors, ["submit_outcome_unknown"], 3) == (0, False)
    assert await unsettled.count_orders(rows, "acme", no_errors, ["submit_outcome_unknown"], 2) == (0, True)
    cancelled = [await maker.make("run") for _ in range(10)]
    await request_cancel(rows, cancelled[1:], "acme", reason="r", by="b")
    assert await unsettled.count_orders(rows, "acme", no_errors, [], 1) == (0, False)
    await request_cancel(rows, cancelled, "acme", reason="r", by="b")
    assert await unsettled.count_orders(rows, "acme", no_errors, [], 1) == (0, True)
    assert await unsettled.count_orders(rows, "rival", no_errors, [], 1) == (0, False)


class _DeletesOneMeanwhile:
    """A connection. After its first statement the job is deleted."""

    def __init__(self, rows: Connection, job_id: UUID) -> None:
        self._rows, self._job_id = rows, job_id

    async def fetch(self, *statement: Any) -> Any:
        answer = await self._rows.fetch(*statement)
        await self._rows.execute("DELETE FROM job WHERE id = $1", self._job_id)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


async def test_the_pages_of_waiting_runs_find_each_one_although_runs_go_meanwhile(
    maker: Maker, rows: Connection
) -> None:
    waiting, newest = [await maker.make("run") for _ in range(2)]
    await rows.execute(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, epoch)"
        " VALUES ($1, '', 1, 'signal', 'approve', 'open', 1)",
        waiting,
    )
    connection: Any = _DeletesOneMeanwhile(rows, newest)
    page, before = await unsettled.waiting_runs(connection, "acme", None, 10, max_searched=1)
    assert ([*page], before) == ([], newest)
    (found,), before = await unsettled.waiting_runs(rows, "acme", before, 10, max_searched=1)
    assert (found["job_id"], found["signals"], before) == (waiting, ["approve"], waiting)
    assert await unsettled.waiting_runs(rows, "acme", before, 10, max_searched=1) == ([], None)


async def test_the_pages_of_silent_steps_find_each_one_however_few_jobs_a_page_searches(
    maker: Maker, rows: Connection
) -> None:
    jobs = [await maker.make("run") for _ in range(3)]
    await rows.execute("UPDATE task SET status = 'pending' WHERE status = 'blocked'")  # two steps of each are due
    await rows.execute("UPDATE task SET available_at = now() - interval '1 day' WHERE job_id <> $1", jobs[1])
    for limit in (1, 2, 10):
        listed: list[UUID] = []
        page, after = await unsettled.silent_steps(rows, "acme", 60, None, limit, max_searched=1)
        for _ in range(10):
            listed += [row["job_id"] for row in page]
            if after is None:
                break
            page, after = await unsettled.silent_steps(rows, "acme", 60, after, limit, max_searched=1)
        assert (listed, after) == ([jobs[2], jobs[2], jobs[0], jobs[0]], None)


async def test_the_pages_of_silent_steps_find_each_one_however_many_newer_jobs_are_not_silent(
    maker: Maker, rows: Connection
) -> None:
    silent = [await maker.make("run") for _ in range(2)]
    await rows.execute("UPDATE task SET available_at = now() - interval '1 day'")
    await rows.execute(
        "INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, external, event_seq, params,"
        " inputs, output_prefix) SELECT ('ff' || substr(md5(n::text), 3))::uuid, 'acme', 'noop', 1, 'running', 1, 1,"
        " 1, '{}', '{}', '' FROM generate_series(1, $1::int) AS n",
        unsettled.MAX_SEARCHED,
    )
    listed: list[str] = []
    query: dict[str, Any] = {"what": "external", "limit": 1}
    while "cursor" not in query or query["cursor"] is not None:
        page = (await maker.client.get("/v1/unsettled", params=query)).json()
        listed += [item["job_id"] for item in page["items"]]
        query["cursor"] = page["next_cursor"]
    assert listed == [str(job_id) for job_id in reversed(silent)]


async def test_the_pages_of_orders_find_each_one_however_few_jobs_a_page_searches(
    maker: Maker, rows: Connection
) -> None:
    """A page searches one failed or expired job and one cancelled job. One of four has been settled, and one has
    ordered nothing. So two pages find nothing.
    """
    jobs: list[UUID] = []
    for end in ("failed", "cancelled", "failed", "expired", "nothing ordered"):
        jobs.append(job_id := await maker.make("generation", server_id=f"s{len(jobs)}"))
        if end == "failed":
            await maker.lose_order(job_id)
            continue
        if end != "nothing ordered":
            claimed = await maker.claim(job_id)
            await notes.remember(rows, claimed.lease, {"asked_at": "2026-11-22T10:00:00+00:00"})
            await settlements.release(rows, [claimed.lease])
        if end == "expired":
            await rows.execute("UPDATE job SET deadline_at = clock_timestamp() WHERE id = $1", job_id)
            await sweeps.expire_jobs(rows)
        else:
            await request_cancel(rows, [job_id], "acme", reason="r", by="b")
    ((pipeline, step),) = await rows.fetch(
        "SELECT j.pipeline, t.step FROM job j JOIN task t ON t.job_id = j.id AND t.status = 'failed' LIMIT 1"
    )
    await rows.execute(
        "INSERT INTO settlement (task_id, epoch, job_id, tenant_id, action, system, ref, actor)"
        " SELECT id, epoch, job_id, tenant_id, 'give_up', NULL, NULL, 'tests' FROM task"
        " WHERE status = 'failed' AND job_id = $1",
        jobs[2],
    )
    by_people = [(pipeline, step, "asked_at")]
    pages: list[list[UUID]] = []
    before = None
    while not pages or before is not None:
        page, before = await unsettled.orders(rows, "acme", by_people, before, 10, max_searched=1)
        pages.append([row["job_id"] for row in page])
        assert len(pages) < 10
    assert pages == [[], [jobs[3]], [], [jobs[1]], [jobs[0]], []]
    (all_at_once, before) = await unsettled.orders(rows, "acme", by_people, None, 10)
    assert ([row["job_id"] for row in all_at_once], before) == ([jobs[3], jobs[1], jobs[0]], None)


async def test_dead_letters_of_the_last_hour_alone_are_read(person: MakePerson, maker: Maker, rows: Connection) -> None:
    old, new = await maker.make("run"), await maker.make("media")
    await maker.fail(old, "old_code")
    await maker.fail(new, "new_code")
    await rows.execute(
        "UPDATE task SET finished_at = now() - interval '2 hours' WHERE job_id = $1 AND status = 'failed'", old
    )
    page = await (await person()).see("/")
    assert "1 step has failed for good in the last hour, mostly with new_code." in page


async def test_a_page_says_that_its_list_is_cut_only_when_it_is(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is exactly as long as the page allows is whole."""
    for module, name in ((queues, "_MAX_JOBS"), (webhooks, "_MAX_DELIVERIES"), (job, "_MAX_LOG_LINES")):
        monkeypatch.setattr(module, name, 2)
    monkeypatch.setattr(dead_letters, "_MAX_SHOWN", 2)
    somebody = await person()
    await maker.make("run")  # before the limit: it writes the template
    await somebody.do("/limits/set", tenant="acme", key="template:outside", at_most="2")
    runs = [await maker.make("run", scope="user", scope_id=str(number)) for number in range(4)]  # 2 of them wait
    claimed = await maker.claim(runs[0])
    await write(rows, claimed, 1, "line 1", "line 2")
    webhook = (await maker.client.post("/v1/webhooks", json={"url": "http://127.0.0.1/hook"})).json()["id"]

    async def deliver() -> None:
        event = {"type": "run.failed", "data": {"id": str(new_id())}}
        await submit(rows, [NewJob(delivery_pipeline, "acme", params={"webhook_id": webhook, "event": event})])

    async def fail(code: str) -> None:
        await maker.fail(await maker.make("media"), code)

    for number in range(2):
        await deliver()
        await fail(f"code_{number}")
    pages = {
        "/limits/jobs?tenant=acme&key=template:outside": ("the first 2<", "<tr data-href"),
        f"/webhooks/{webhook}": ("the latest 2<", '<td class="w">run.failed'),
        f"/jobs/{runs[0]}": ("the last 2 lines", '<span class="info">'),
        "/dead-letters": ("The largest groups", "<tr data-href"),
    }
    for path, (words, row) in pages.items():
        page = await somebody.see(path)
        assert (words in page, page.count(row)) == (False, 4 if "limits" in path else 2), path
    await deliver()
    await fail("code_2")
    await write(rows, claimed, 3, "line 3")
    await maker.make("run", scope="user", scope_id="4")
    for path, (words, row) in pages.items():
        page = await somebody.see(path)
        assert (page.count(words), page.count(row)) == (1, 4 if "limits" in path else 2), path
    page = await somebody.see(f"/jobs/{runs[0]}")
    assert ("line 1" in page, "line 3" in page) == (False, True)
    limit = next(iter(pages))
    assert "Waiting <small>the first 2<" in await somebody.see(limit)
    await somebody.do("/limits/set", tenant="acme", key="template:outside", at_most="5")
    await concurrency.admit(rows, [("acme", "template:outside")])
    page = await somebody.see(limit)
    assert ("Inside <small>the first 2<" in page, page.count("the first 2<"), page.count("None.")) == (True, 1, 1)
