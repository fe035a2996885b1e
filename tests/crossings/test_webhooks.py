"""How a run ends meets what its tenant's webhooks were while it ran."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.pipelines.webhooks.pipeline import webhooks as deliveries
from leasehold.transitions import webhooks
from tests.crossings.expectations import TOLD, table
from tests.crossings.pair import Two, surprises
from tests.crossings.world import VERBS, Case, put_into, retry

#: How a run ends so, from where.
ENDS = {
    "succeeded": ("running", "complete"), "failed": ("running", "die"), "cancelled": ("pending", "cancel"),
    "acknowledged": ("stopping", "ack"), "forced": ("stopping", "grace"), "expired": ("running", "expire"),
    "withdrawn": ("held", "cancel"), "overdue": ("held", "expire"),
}  # fmt: skip
ALL = ["run.succeeded", "run.failed", "run.cancelled", "run.expired"]
KEEP = 3600
Deed = Callable[[Connection, Case], Awaitable[object]]


async def subscribe(c: Connection, case: Case, events: list[str] | None = None) -> UUID:
    """As the API's POST does."""
    hook = new_id()
    await c.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events) VALUES ($1, $2, 'http://x', '{}', $3)",
        hook,
        case.tenant,
        events or ALL,
    )
    await webhooks.watch(c, case.tenant)
    return hook


async def enable(c: Connection, case: Case, *, enabled: bool) -> None:
    """As the API's PATCH does."""
    await c.execute("UPDATE webhook SET enabled = $2 WHERE tenant_id = $1", case.tenant, enabled)
    if enabled:
        await webhooks.watch(c, case.tenant)


async def dispatch(c: Connection) -> None:
    async with c.transaction():
        await webhooks.dispatch(c, deliveries, KEEP)


async def told(c: Connection, case: Case) -> str:
    """What the deliveries say of the run, in their order."""
    rows = await c.fetch(
        "SELECT params->'event'->>'type' AS what FROM job WHERE pipeline = 'webhook' AND tenant_id = $1"
        " AND params->'event'->'data'->>'id' = $2 ORDER BY id",
        case.tenant,
        str(case.run),
    )
    return "+".join(row["what"].removeprefix("run.") for row in rows) or "-"


async def _nothing(_c: Connection, _case: Case) -> None:
    return None


async def _off(c: Connection, case: Case) -> None:
    await enable(c, case, enabled=False)


async def _on(c: Connection, case: Case) -> None:
    await enable(c, case, enabled=True)


async def _twice(c: Connection, case: Case) -> None:
    await subscribe(c, case)
    await subscribe(c, case)


async def _failures(c: Connection, case: Case) -> None:
    await subscribe(c, case, ["run.failed"])


async def _made_off(c: Connection, case: Case) -> None:
    await subscribe(c, case)
    await enable(c, case, enabled=False)


async def _deleted(c: Connection, case: Case) -> None:
    await c.execute("DELETE FROM webhook WHERE tenant_id = $1", case.tenant)


async def _of_another(c: Connection, _case: Case) -> None:
    await subscribe(c, Case())


#: What happens before the run is made, while it is unfinished, and between its end and the dispatch.
HISTORIES: dict[str, tuple[Deed, Deed, Deed]] = {
    "there": (subscribe, _nothing, _nothing),
    "two": (_twice, _nothing, _nothing),
    "failures": (_failures, _nothing, _nothing),
    "anothers": (_of_another, _nothing, _nothing),
    "late": (_nothing, subscribe, _nothing),
    "too_late": (_nothing, _nothing, subscribe),
    "off": (_made_off, _nothing, _nothing),
    "turned_off": (subscribe, _off, _nothing),
    "turned_on": (_made_off, _on, _nothing),
    "off_at_end": (subscribe, _off, _on),
    "deleted": (subscribe, _deleted, _nothing),
}


async def test_who_watches_is_told_once_how_a_run_ended(batchers: list[Two]) -> None:
    async def judge(two: Two, of: tuple[str, str, str]) -> object | None:
        history, end, cell = of
        before, during, after = HISTORIES[history]
        state, verb = ENDS[end]
        case, c = Case(), two.first
        await before(c, case)
        await put_into(c, case, state)
        await during(c, case)
        assert await VERBS[verb](c, case)
        await after(c, case)
        await dispatch(c)
        await dispatch(c)
        return None if (came := await told(c, case)) == cell else (history, end, came, cell)

    cases = [(history, end, cell) for history, row in table(TOLD).items() for end, cell in row.items()]
    assert await surprises(batchers, cases, judge) == []


async def test_a_run_that_goes_on_is_told_of_again_however_long_the_dispatch_takes(batchers: list[Two]) -> None:
    """Retried before or after anybody heard of its first end, by a webhook that came first or in between."""

    async def judge(two: Two, of: tuple[str, bool]) -> object | None:
        when, at_once = of
        case, c = Case(), two.first
        if when == "before":
            await subscribe(c, case)
        await put_into(c, case, "failed")
        if at_once:
            await dispatch(c)
        if when == "between":
            await subscribe(c, case)
        if not at_once:
            async with c.transaction():  # as leasehold.api.runs.replays.revive does
                await webhooks.dispatch(c, deliveries, KEEP, job_id=case.run)
        assert await retry(c, case)
        if when == "after":
            await subscribe(c, case)
        assert await VERBS["cancel"](c, case)
        await dispatch(c)
        wanted = "failed+cancelled" if when == "before" else "cancelled"
        return None if (came := await told(c, case)) == wanted else (of, came)

    cases = [(when, at_once) for when in ("before", "between", "after") for at_once in (True, False)]
    assert await surprises(batchers, cases, judge) == []
