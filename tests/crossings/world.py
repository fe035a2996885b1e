"""Runs of one step in every state, and every verb, on real rows. Each case has a tenant of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID, uuid4

from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Conflict
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Concurrency, Pipeline, RunTerms, Step
from leasehold.domain.template import template_of_pipeline
from leasehold.evaluation.templates import TemplateVersion
from leasehold.transitions import claims, concurrency, jobs, limits, runs, settlements, sweeps
from leasehold.transitions.claims import LeaseTerms
from leasehold.transitions.runs import NewRun
from leasehold.transitions.settlements import Completion, Failure, Settled, Snoozing, Verdict
from leasehold.transitions.wakes import wake

#: Leases and graces of other cases last as well: they must not pass while the cases of a test come one by one.
HOUR = 3600.0
_PAST = "clock_timestamp() - interval '1 s'"
_TENANTS = count()
_STATES = {
    ("pending", "waiting"): "scheduled", ("pending", "pending"): "pending", ("queued", "pending"): "pending",
    ("running", "pending"): "pending", ("running", "running"): "running", ("running", "retry"): "retry",
    ("running", "waiting"): "waiting", ("cancel_requested", "running"): "stopping",
}  # fmt: skip


def known(concurrency: Concurrency = "allow") -> TemplateVersion:
    pipeline = Pipeline(
        f"crossed_{concurrency}",
        module="",
        steps=[Step("only", max_attempts=9)],
        terms=RunTerms(concurrency=concurrency, timeout=timedelta(hours=9), grace=timedelta(hours=1)),
    )
    return TemplateVersion(template_of_pipeline(pipeline), pipeline, enabled=True, in_code=True)


ALLOW = known()


@dataclass
class Case:
    """A tenant with one run, a worker that may have it, and another worker."""

    tenant: str = field(default_factory=lambda: f"tenant-{next(_TENANTS)}")
    template: TemplateVersion = ALLOW
    run: UUID = field(default_factory=new_id)
    ours: LeaseTerms = field(default_factory=lambda: LeaseTerms(uuid4(), HOUR, 5.0, 5))
    theirs: LeaseTerms = field(default_factory=lambda: LeaseTerms(uuid4(), HOUR, 5.0, 5))
    lease: Lease | None = None

    def new(self, **more: Any) -> NewRun:
        terms: dict[str, Any] = {"id": self.run, "keep_seconds": 3600}
        return NewRun(self.template, self.tenant, {}, **(terms | more))

    @property
    def limit(self) -> ConcurrencyLimit:
        return ConcurrencyLimit(self.tenant, f"template:{self.template.template.type}", at_most=0)

    async def task(self, c: Connection) -> UUID:
        found: UUID = await c.fetchval("SELECT id FROM task WHERE job_id = $1", self.run)
        return found

    async def state(self, c: Connection, run: UUID | None = None) -> str:
        row = await c.fetchrow(
            "SELECT j.status, j.held, t.status AS step, t.lease_owner, t.available_at <= clock_timestamp() AS due"
            " FROM job j JOIN task t ON t.job_id = j.id WHERE j.id = $1",
            run or self.run,
        )
        if row is None:
            return "forgotten"
        if row["held"] and row["status"] == "pending":
            assert (row["status"], row["step"]) == ("pending", "blocked")
            return "held"
        name: str = _STATES.get((row["status"], row["step"]), row["status"])
        if name == "waiting" and row["due"]:
            return "due"
        if row["lease_owner"] == self.theirs.owner:
            return {"running": "taken", "stopping": "leaving"}[name]
        return name


async def make(c: Connection, case: Case, **more: Any) -> None:
    async with c.transaction():
        made = await runs.create(c, case.new(**more))
    await concurrency.admit(c, made.limits, made.departed)


async def put_into(c: Connection, case: Case, state: str) -> None:
    """Make the case's run, and bring it to `state` by the verbs themselves."""
    if state == "held":
        await limits.declare(c, [case.template.pipeline], case.limit)
        return await make(c, case)
    if state == "scheduled":
        soon = await c.fetchval("SELECT clock_timestamp() + interval '1 hour'")
        return await make(c, case, scheduled_at=soon)
    await make(c, case)
    if state in ("pending", "cancelled", "expired"):
        steps = {"pending": (), "cancelled": ("cancel",), "expired": ("expire",)}[state]
    else:
        mine = case.theirs if state in ("taken", "leaving") else case.ours
        (claimed,) = await claims.claim(c, mine, [await case.task(c)])
        case.lease = claimed.lease if mine is case.ours else None
        steps = {
            "running": (), "taken": (), "retry": ("fail",), "waiting": ("snooze",), "due": ("snooze", "signal"),
            "stopping": ("cancel",), "leaving": ("cancel",), "succeeded": ("complete",), "failed": ("die",),
            "forgotten": ("complete", "forget"),
        }[state]  # fmt: skip
    for verb in steps:
        assert await VERBS[verb](c, case), (state, verb)
    return None


async def _cancel(c: Connection, case: Case) -> bool:
    names = await concurrency.limits_of(c, [case.run])
    cancels = await jobs.request_cancel(c, [case.run], case.tenant, reason="", by="test")
    await concurrency.admit(c, names, [case.run])
    return case.run in cancels.states


async def retry(c: Connection, case: Case) -> bool:
    try:
        async with c.transaction():
            made = await runs.revive(c, case.new())
    except Conflict:
        return False
    if made is not None:
        await concurrency.admit(c, made.limits, made.departed)
    return made is not None


async def _rerun(c: Connection, case: Case) -> bool:
    async with c.transaction():
        await runs.create(c, case.new(id=new_id(), rerun_of=case.run))
    return True


async def _lift(c: Connection, case: Case) -> bool:
    freed = await limits.withdraw(c, case.tenant, case.limit.key)
    return bool(await concurrency.admit(c, freed or [(case.tenant, case.limit.key)]))


async def _claim(c: Connection, case: Case) -> bool:
    task = await c.fetchval("SELECT id FROM task WHERE job_id = $1", case.run)
    return bool(await claims.claim(c, case.theirs, [task])) if task is not None else False


def _settled(outcome: Settled) -> bool:
    return Verdict.SETTLED in outcome.verdicts.values()


def _by_lease(settle: Callable[[Connection, Lease], Awaitable[Settled]]) -> Callable[[Connection, Case], Any]:
    async def verb(c: Connection, case: Case) -> bool:
        """A worker that never had the run has a lease of nothing."""
        lease = case.lease or Lease(await _some_task(c, case), case.ours.owner, 1, 1, 0.0)
        return _settled(await settle(c, lease))

    return verb


async def _some_task(c: Connection, case: Case) -> UUID:
    return await c.fetchval("SELECT id FROM task WHERE job_id = $1", case.run) or uuid4()


async def _renew(c: Connection, case: Case) -> bool:
    lease = case.lease or Lease(await _some_task(c, case), case.ours.owner, 1, 1, 0.0)
    return any(renewal.is_valid for renewal in await claims.renew(c, case.ours.owner, [lease], HOUR))


async def _signal(c: Connection, case: Case) -> bool:
    return bool(await wake(c, case.run, case.tenant, "only"))


async def _lose(c: Connection, case: Case) -> bool:
    """The worker is lost with its lease, and the sweeper finds out."""
    gone = [case.ours.owner, case.theirs.owner]
    await c.execute(f"UPDATE task SET lease_until = {_PAST} WHERE job_id = $1 AND lease_until IS NOT NULL", case.run)
    ended, _, _ = await sweeps.expire_leases(c, gone, 5)
    stopped = await sweeps.end_cancels(c, gone, 5)
    return bool(ended or stopped)


async def _grace(c: Connection, case: Case) -> bool:
    asked = "cancel_by IS NOT NULL AND finished_at IS NULL"
    await c.execute(f"UPDATE job SET cancel_by = {_PAST} WHERE id = $1 AND {asked}", case.run)
    return bool(await sweeps.end_cancels(c, [], 5))


async def _expire(c: Connection, case: Case) -> bool:
    await c.execute(f"UPDATE job SET deadline_at = {_PAST} WHERE id = $1 AND finished_at IS NULL", case.run)
    return bool(await sweeps.expire_jobs(c))


async def _forget(c: Connection, case: Case) -> bool:
    passed = await c.fetchval(
        f"UPDATE job SET expires_at = {_PAST} WHERE id = $1 AND finished_at IS NOT NULL RETURNING true",
        case.run,
    )
    await sweeps.forget_jobs(c, [case.run])
    return bool(passed) and await case.state(c) == "forgotten"


VERBS: dict[str, Callable[[Connection, Case], Awaitable[bool]]] = {
    "cancel": _cancel,
    "retry": retry,
    "rerun": _rerun,
    "lift": _lift,
    "claim": _claim,
    "complete": _by_lease(lambda c, lease: settlements.complete(c, [Completion(lease)])),
    "fail": _by_lease(lambda c, lease: settlements.fail(c, [Failure(lease, "error", "e", "m", True, HOUR)])),
    "die": _by_lease(lambda c, lease: settlements.fail(c, [Failure(lease, "error", "e", "m", False, 0.0)])),
    "snooze": _by_lease(lambda c, lease: settlements.snooze(c, [Snoozing(lease, HOUR)])),
    "release": _by_lease(lambda c, lease: settlements.release(c, [lease])),
    "ack": _by_lease(lambda c, lease: settlements.acknowledge_cancel(c, [lease])),
    "renew": _renew,
    "signal": _signal,
    "lose": _lose,
    "grace": _grace,
    "expire": _expire,
    "forget": _forget,
}
