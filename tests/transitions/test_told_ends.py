"""The ends of jobs are told to the webhooks and callbacks that asked for them, and to nobody else, in full."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, PipelineLimit, Step
from leasehold.pipelines.webhooks.pipeline import webhooks as deliveries
from leasehold.transitions import callbacks, concurrency, settlements, webhooks, workers
from leasehold.transitions.jobs import RunOf
from leasehold.transitions.settlements import Completion, Failure
from leasehold.transitions.webhooks import ReportedJobs
from tests.factories import ONE, Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

ENDS = ["job.failed", "job.succeeded", "run.failed", "run.succeeded"]
#: `one` makes pictures, and webhooks do not report the jobs of `own`.
REPORTED = ReportedJobs({"one": "picture"}, frozenset({"webhook", "own"}))


def pipeline(name: str, on_failure: Pipeline | None = None) -> Pipeline:
    made = Pipeline(name, module="tests.factories", steps=[Step("only")])
    made.on_failure = on_failure
    return made


async def subscribed(rows: Rows, tenant: str = "t", url: str = "http://a.example") -> UUID:
    hook = new_id()
    await rows.connection.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events) VALUES ($1, $2, $3, '{}', $4)",
        hook, tenant, url, ENDS,
    )  # fmt: skip
    return hook


async def ended(rows: Rows, of: Pipeline = ONE, *, failed: bool = True, **columns: Any) -> UUID:
    """A job that has ended and whose end nobody has told yet."""
    claimed = await rows.leased(of, notify=True, keep_seconds=3600, **columns)
    if failed:
        await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "broken", "It broke.", False, 0.0)])
    else:
        await settlements.complete(rows.connection, [Completion(claimed.lease)])
    return claimed.job_id


async def expired(rows: Rows, job_id: UUID, hours: float) -> UUID:
    await rows.connection.execute(
        "UPDATE job SET expires_at = clock_timestamp() - make_interval(secs => $2) WHERE id = $1", job_id, hours * 3600
    )
    return job_id


async def sent(rows: Rows, name: str = "webhook") -> list[dict[str, Any]]:
    found = await rows.connection.fetch("SELECT params FROM job WHERE pipeline = $1 ORDER BY id", name)
    return [row["params"] for row in found]


async def untold(rows: Rows) -> set[UUID]:
    return {row["id"] for row in await rows.connection.fetch("SELECT id FROM job WHERE notify")}


async def test_a_message_has_what_its_job_was_and_nothing_of_another_job(rows: Rows) -> None:
    hook, theirs = await subscribed(rows), await subscribed(rows, "rival")
    run = await ended(rows, pipeline("own"), run=RunOf("tmpl", 3, "user", "u7"), tags={"a": "1", "b": "2"})
    picture = await ended(rows, failed=False, tags={"c": "3"}, callback_url="http://c.example/1")
    other = await ended(rows, pipeline("other"), callback_url="http://c.example/2")
    await ended(rows, pipeline("own"))
    foreign = await ended(rows, tenant="rival", tags={"d": "4"})
    unfinished = (await rows.leased(callback_url="http://c.example/3", tags={"e": "5"})).job_id

    hints, is_full = await webhooks.dispatch(rows.connection, deliveries, 60, REPORTED)

    error = {"code": "broken", "message": "It broke.", "step": "only", "retryable": False}
    of_run = {"template": "tmpl", "version": 3, "scope": "user", "scope_id": "u7"}
    of_run |= {"id": str(run), "status": "failed", "error": error}
    of_picture = {"id": str(picture), "status": "succeeded", "error": None, "kind": "picture", "template": "one",
                  "tags": {"c": "3"}}  # fmt: skip
    of_other = {"id": str(other), "status": "failed", "error": error, "kind": "run", "template": "other", "tags": {}}
    of_foreign = of_other | {"id": str(foreign), "kind": "picture", "template": "one", "tags": {"d": "4"}}
    told = [
        (str(hook), "job.failed", of_run | {"kind": "run", "tags": {"a": "1", "b": "2"}}),
        (str(hook), "run.failed", of_run),
        (str(hook), "job.succeeded", of_picture), (str(hook), "job.failed", of_other),
        (str(theirs), "job.failed", of_foreign),
        ("http://c.example/1", "job.succeeded", of_picture), ("http://c.example/2", "job.failed", of_other),
    ]  # fmt: skip
    found = await sent(rows)
    assert [
        (params.get("webhook_id") or params["url"], params["event"]["type"], params["event"]["data"])
        for params in found
    ] == told  # fmt: skip
    at = await rows.connection.fetchval("SELECT finished_at FROM job WHERE id = $1", run)
    assert {params["event"]["timestamp"] for params in found[:2]} == {at.isoformat()}
    assert (len(hints), is_full) == (len(told), False)

    called = await rows.connection.fetch(
        "SELECT c.job_id, d.params ->> 'url' AS url FROM job_callback c LEFT JOIN job d ON d.id = c.delivery_id"
    )
    assert {row["job_id"]: row["url"] for row in called} == {
        picture: "http://c.example/1", other: "http://c.example/2", unfinished: None,
    }  # fmt: skip
    assert await untold(rows) == {unfinished}
    assert await webhooks.dispatch(rows.connection, deliveries, 60, REPORTED) == ([], False)
    assert await sent(rows) == found


async def test_the_failure_of_an_app_is_left_to_who_has_its_code_as_long_as_somebody_may(rows: Rows) -> None:
    """Until its retention ends if nobody has or had the code, and else half a day longer."""
    bank, shop, mall, fair = [pipeline(f"{name}.pay") for name in ("bank", "shop", "mall", "fair")]
    c, worker = rows.connection, uuid4()
    await c.execute("INSERT INTO known_handler (name, seen_at) VALUES ('mall.pay.only', clock_timestamp())")
    await c.execute("INSERT INTO known_handler (name, seen_at) VALUES ('shop.payment.only', clock_timestamp())")
    handlers = ["shop.payment.only", "fair.pay.only"]
    await workers.register(c, worker, host="h", pid=1, version="v", queues=["default"], handlers=handlers)
    for of, hours in ((shop, 0.01), (mall, 13)):
        await expired(rows, await ended(rows, of), hours)
    for of in (pipeline("platform"), bank):
        await ended(rows, of)
    await ended(rows, shop, failed=False)
    kept = await ended(rows, shop)
    of_mall, of_fair = [await expired(rows, await ended(rows, of), 0.01) for of in (mall, fair)]

    async def dispatched(**how: Any) -> set[UUID]:
        await webhooks.dispatch(c, deliveries, 60, pipelines=[bank], **how)
        return await untold(rows)

    assert await dispatched() == {kept, of_mall, of_fair}
    # A worker that does not say what it can may have the code.
    unknown, later = uuid4(), await expired(rows, await ended(rows, shop), 0.01)
    await workers.register(c, unknown, host="h", pid=1, version="v", queues=["default"])
    assert await dispatched() == {kept, of_mall, of_fair, later}
    await workers.unregister(c, unknown)
    assert await dispatched() == {kept, of_mall, of_fair}
    # Who deletes a job leaves it, too, if somebody may have the code.
    for job_id in (of_mall, of_fair):
        assert await dispatched(job_id=job_id, deletes=True) == {kept, of_mall, of_fair}
    assert await dispatched(job_id=kept, deletes=True) == {of_mall, of_fair}
    # Who changes it cannot leave it, and tells of no other job.
    assert await dispatched(job_id=of_mall) == {of_fair}
    # Where nothing can follow, nothing is left.
    await ended(rows, shop)
    await webhooks.dispatch(c, deliveries, 60)
    assert await untold(rows) == set()


async def test_a_job_that_cannot_be_told_of_delays_no_other_and_a_full_batch_says_so(rows: Rows) -> None:
    report = pipeline("shop.report")
    shop = pipeline("shop.pay", on_failure=report)
    bad, good = await ended(rows, shop, params={"n": 1}), await ended(rows, shop, params={"n": 2})
    await ended(rows, shop, failed=False, params={"n": 3})
    await rows.connection.execute("""UPDATE job SET error = '{"message": "old"}' WHERE id = $1""", bad)

    async def dispatched(limit: int) -> bool:
        _, is_full = await webhooks.dispatch(rows.connection, deliveries, 60, limit=limit, pipelines=[shop])
        return is_full

    assert await dispatched(3), "the batch was full, though each of its jobs was then taken by itself"
    assert await untold(rows) == {bad}
    (follower,) = await sent(rows, "shop.report")
    assert follower == {
        "run_id": str(good), "task": "shop.pay", "code": "broken", "message": "It broke.", "arguments": {"n": 2},
    }  # fmt: skip
    assert not await dispatched(3)
    assert await rows.connection.fetchval("SELECT unit FROM quarantine WHERE duty = 'webhooks'") == str(bad)
    for _ in range(2):
        await ended(rows, shop)
    assert [await dispatched(1) for _ in range(3)] == [True, True, False]
    assert len(await sent(rows, "shop.report")) == 3


async def test_a_run_that_follows_a_failure_waits_at_its_limits_and_its_own_end_is_told(rows: Rows) -> None:
    alarm = pipeline("shop.alarm")
    report, plain = pipeline("shop.report", on_failure=alarm), pipeline("shop.plain")
    report.limits = (PipelineLimit(at_most=1, per_minute=None, pointer=None),)
    shop, bank = pipeline("shop.pay", on_failure=report), pipeline("shop.bank", on_failure=plain)
    for of in (shop, shop, bank):
        await ended(rows, of)
    hints, _ = await webhooks.dispatch(rows.connection, deliveries, 60, pipelines=[shop, bank])
    assert len(hints) == 1, "only the run without a limit is due at once"

    async def followers() -> list[tuple[str, str, bool]]:
        found = await rows.connection.fetch("SELECT pipeline, status, notify FROM job WHERE pipeline = ANY($1)",
                                            ["shop.report", "shop.plain"])  # fmt: skip
        return sorted((row["pipeline"], row["status"], row["notify"]) for row in found)

    assert await followers() == [
        ("shop.plain", "queued", False), ("shop.report", "pending", True), ("shop.report", "pending", True),
    ]  # fmt: skip
    assert len(await concurrency.admit(rows.connection, [("t", "code:shop.report")])) == 1
    assert [status for name, status, _ in await followers() if name == "shop.report"] == ["pending", "queued"]

    await subscribed(rows)
    await ended(rows, bank)
    await webhooks.dispatch(rows.connection, deliveries, 60, pipelines=[bank])
    assert [notify for name, _, notify in await followers() if name == "shop.plain"] == [False, True]


async def test_who_changes_a_job_whose_end_cannot_be_told_learns_it_and_who_deletes_it_leaves_it(rows: Rows) -> None:
    """A retry resets the error that the message would show."""
    report = pipeline("shop.report")
    shop = pipeline("shop.pay", on_failure=report)
    bad = await ended(rows, shop)
    await rows.connection.execute("""UPDATE job SET error = '{"message": "old"}' WHERE id = $1""", bad)
    with pytest.raises(KeyError):
        await webhooks.dispatch(rows.connection, deliveries, 60, pipelines=[shop], job_id=bad)
    await webhooks.dispatch(rows.connection, deliveries, 60, pipelines=[shop], job_id=bad, deletes=True)
    assert await untold(rows) == {bad}


async def test_a_new_webhook_watches_unfinished_jobs_but_for_the_platforms_own(rows: Rows, another: Open) -> None:
    own = pipeline("own")
    watched = {(await rows.leased()).job_id, (await rows.leased(own, run=RunOf("own", 1, "tenant", ""))).job_id}
    await rows.leased(own)
    await rows.leased(tenant="rival")
    ending = await rows.leased()
    other = await another()
    async with other.connection.transaction():
        await settlements.complete(other.connection, [Completion(ending.lease)])
        watching = asyncio.create_task(webhooks.watch(rows.connection, "t", REPORTED))
        await until_waiting(other.connection)
    await watching
    assert await untold(other) == watched, "a job that has ended meanwhile had no webhook that watched it"


@pytest.mark.parametrize(
    "other",
    [
        {"webhook_id": uuid4()},
        {"tenant_id": "rival"},
        {"url": "http://new.example"},
        {"disabled_at": datetime(2026, 1, 1, tzinfo=UTC)},
    ],
)
async def test_only_the_webhook_as_it_was_read_is_disabled(rows: Rows, other: dict[str, Any]) -> None:
    hook, beside = await subscribed(rows), await subscribed(rows)
    of_hook = "SELECT * FROM webhook ORDER BY id"
    before = await rows.connection.fetch(of_hook)
    names: dict[str, Any] = {"webhook_id": hook, "tenant_id": "t", "url": "http://a.example", "disabled_at": None}
    assert not await webhooks.disable(rows.connection, **(names | other), reason="it is gone")
    assert await rows.connection.fetch(of_hook) == before
    assert await webhooks.disable(rows.connection, **names, reason="it is gone")
    assert not await webhooks.disable(rows.connection, **names, reason="it is gone again")
    found = [await webhooks.find(rows.connection, one, "t") for one in (hook, beside)]
    assert [(row["id"], row["enabled"], row["disabled_because"]) for row in found] == [
        (hook, False, "it is gone"), (beside, True, None),
    ]  # fmt: skip
    assert await webhooks.find(rows.connection, hook, "rival") is None


async def test_callbacks_that_need_a_tenants_first_secret_at_once_are_signed_with_the_same_one(
    rows: Rows, another: Open
) -> None:
    """A secret that a delivery has used and nobody keeps would sign a message that its receiver cannot verify."""
    other = (await another()).connection
    async with other.transaction():
        assert await callbacks.secrets(other, "t", lambda: b"first") == [b"first"]
        reading = asyncio.create_task(callbacks.secrets(rows.connection, "t", lambda: b"second"))
        await until_waiting(other)
    assert await reading == [b"first"]
    assert await callbacks.secrets(rows.connection, "rival", lambda: b"theirs") == [b"theirs"]
    assert await callbacks.secrets(rows.connection, "t", lambda: b"third") == [b"first"]
