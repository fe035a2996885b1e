"""Finds what needs a person's attention. The Overview (a page of the console) shows each finding as a sentence with a
link, the worst first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

from fastapi import Request

from leasehold.api.auth.security import JOBS_READ, OPERATE, RUNS_READ, WEBHOOKS_WRITE
from leasehold.api.console.rendering import span
from leasehold.api.fleet.health import readiness_of
from leasehold.api.jobs.dead_letters import dead_letter_filter
from leasehold.api.jobs.explain import Depth, explain
from leasehold.api.jobs.unsettled import What, count_unknown_orders
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.db import job_reads, overview_reads, run_reads
from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.domain.sentences import counted
from leasehold.transitions.jobs import EXTERNAL

#: Counting stops at MAX_TASKS tasks in a queue, and at _MAX_LETTERS dead letters (steps that failed for good). If there
#: are many queues, counting stops earlier in each queue, at _MAX_OF_ALL divided by the number of queues, but never
#: below 20 tasks.
MAX_TASKS, _MAX_OF_ALL, _MAX_LETTERS = 500, 1000, 100
#: An order is the request of a step to a provider. An order is unsettled if a person must decide its outcome. The
#: search for unsettled orders reads only the newest jobs: this many jobs with an error for each pipeline that orders,
#: this many for each error code of unsettled orders, and ten times as many cancelled jobs. No finding reports that the
#: search has left out older jobs, because in a tenant with many such jobs this finding would never go away.
_MAX_SEARCHED = 300
#: How much the explanation of a late job reads: entries of its ledger (what its workers did), waiting steps, and tasks
#: ahead of the job. The numbers are small, because the page shows only one reason.
_DEPTH = Depth(entries=0, steps=5, ahead=100)
#: At most this many late jobs are explained.
_MAX_EXPLAINED = 5
#: A wait that is longer than this is a finding.
_LONG_WAIT = timedelta(minutes=1)
#: A snapshot that a transaction holds for longer than this is a finding, because VACUUM cannot remove rows that died
#: since then. The alert `LeaseholdSnapshotHeld` has the same limit, and fires five minutes later.
_LONG_SNAPSHOT = timedelta(minutes=1)
#: These reasons are not findings, because the job waits on purpose, or it runs.
_HARMLESS_REASONS = frozenset(
    {"waiting_until", "waiting_for_external_worker", "waiting_for_signal", "waiting_for_steps", "running"}
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about something that needs a person's attention. `link`: a path of the console; empty: no link."""

    level: Literal["bad", "warn"]
    sentence: str
    link: str = ""
    link_text: str = ""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that the Overview shows with the findings. None: the caller may not see this number. `live`: counts
    of the tenant's unfinished jobs, and the ids of its late jobs (`late`). `queues` and `workers` are of all tenants.
    """

    live: Row | None
    queues: list[Row] | None
    workers: int | None


async def numbers_of(connection: Connection, caller: Caller, silent_seconds: float) -> Numbers:
    """Read the numbers that the caller may see. `silent_seconds`: a worker without a heartbeat for this many seconds
    does not count.
    """
    live = None
    if JOBS_READ in caller.scopes:
        live = await overview_reads.unfinished_counts(connection, caller.tenant_id, _LONG_WAIT)
    if OPERATE not in caller.scopes:
        return Numbers(live, None, None)
    queues = list(await run_reads.queues(connection, silent_seconds, MAX_TASKS, _MAX_OF_ALL))
    return Numbers(live, queues, await overview_reads.worker_count(connection, silent_seconds))


async def findings_of(request: Request, services: Services, caller: Caller) -> tuple[list[Finding], Numbers]:
    """All findings, the worst first, and the numbers. Only an operator gets findings about other tenants."""
    findings = await _findings_about_parts(request, caller)
    async with services.pool.acquire() as connection, connection.transaction(readonly=True):
        numbers = await numbers_of(connection, caller, services.settings.silent_seconds_of_reads)
        if OPERATE in caller.scopes:
            findings += await _findings_about_fleet(connection, numbers)
        if JOBS_READ in caller.scopes:
            findings += await _findings_about_dead_letters(services, connection, caller)
            findings += await _findings_about_unsettled(services, connection, caller)
        if RUNS_READ in caller.scopes:
            findings += [_paused(row) for row in await overview_reads.paused_schedules(connection, caller.tenant_id)]
        if WEBHOOKS_WRITE in caller.scopes:
            findings += [_disabled(row) for row in await overview_reads.disabled_webhooks(connection, caller.tenant_id)]
    if numbers.live is not None and numbers.live["late"]:
        findings += await _findings_about_oldest(services, caller, numbers.live["late"])
    return sorted(findings, key=lambda finding: finding.level != "bad"), numbers


async def _findings_about_parts(request: Request, caller: Caller) -> list[Finding]:
    """One finding for each part of the installation, such as the broker, that fails a check of `/readyz`.

    An operator also gets what the self-check (`leasehold doctor`) found. If a part failed both its check and the
    self-check, it has only one finding, with the detail of the check and then the meaning of the self-check's result.
    """
    readiness = readiness_of(request)
    failed_checks = [check for check in await readiness.checks() if not check.ok]
    results = [result for result in await readiness.findings() if not result.ok] if OPERATE in caller.scopes else []
    # If a part has several results, the first counts. A dict keeps the last value of a key, so the order is reversed.
    meanings = {result.part: f" {_capitalized(result.meaning)}." for result in reversed(results)}
    findings = [
        Finding("bad" if check.required else "warn", f"The {check.name}: {check.detail}.{meanings.get(check.name, '')}")
        for check in failed_checks
    ]
    reported_parts = {check.name for check in failed_checks}
    return findings + [
        Finding("warn", f"The {result.part}: {result.found}. {_capitalized(result.meaning)}.")
        for result in results
        if result.part not in reported_parts
    ]


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


async def _findings_about_fleet(connection: Connection, numbers: Numbers) -> list[Finding]:
    findings = []
    if not numbers.workers:
        findings.append(Finding("bad", "No worker has a heartbeat: nothing runs.", "/workers", "Workers"))
    for row in numbers.queues or ():
        findings += _findings_about_queue(row, has_workers=bool(numbers.workers))
    for row in await overview_reads.quarantined(connection):  # units that a duty (a maintenance loop) set aside
        findings.append(
            Finding(
                "warn",
                f"The duty {row['duty']} leaves {counted(row['n'], 'thing', 'things')} alone for now: {row['code']}.",
            )
        )
    snapshot = await overview_reads.held_snapshot(connection, _LONG_SNAPSHOT)
    if snapshot is not None:
        session = f"The session {snapshot['pid']} of PostgreSQL ({snapshot['application']})"
        held_for = span(snapshot["age"].total_seconds())
        effect = "since then VACUUM removes no dead rows, and claims become slower."
        findings.append(Finding("warn", f"{session} has held a snapshot for {held_for}: {effect}"))
    return findings


def _at_least(number: str, *, has_more: bool) -> str:
    """The number for a sentence. `has_more`: the count ended at its bound, so there may be more."""
    return f"at least {number}" if has_more else number


def _tasks_that_wait(n: int, *, has_more: bool) -> str:
    return f"{_at_least(counted(n, 'task', 'tasks'), has_more=has_more)} {'waits' if n == 1 else 'wait'}"


def _findings_about_queue(row: Row, *, has_workers: bool) -> list[Finding]:
    """At most one finding: the queue is paused, no worker serves it, or it is behind. `has_workers`: the installation
    has a worker, for this queue or for another queue. If the installation has none, this function reports only a paused
    queue, because `_findings_about_fleet` reports the missing workers once for all queues.
    """
    queue, runnable_tasks = row["queue"], row["runnable"]
    link = ("/queues", "Queues")
    if row["paused_because"] is not None:
        return [Finding("warn", f"The queue {queue} is paused: {row['paused_because']}", *link)]
    if not runnable_tasks or queue.startswith(EXTERNAL):  # no registered worker serves a queue of external workers
        return []
    tasks = _tasks_that_wait(runnable_tasks, has_more=row["has_more"])
    if not row["workers"]:
        sentence = f"No worker serves the queue {queue}, in which {tasks}."
        return [Finding("bad", sentence, *link)] if has_workers else []

    waited = datetime.now(UTC) - row["oldest"]
    if waited > _LONG_WAIT:
        sentence = f"The queue {queue} is behind: {tasks}, for up to {span(waited.total_seconds())}."
        return [Finding("warn", sentence, *link)]
    return []


async def _findings_about_dead_letters(services: Services, connection: Connection, caller: Caller) -> list[Finding]:
    since = datetime.now(UTC) - timedelta(hours=1)
    letters = await job_reads.dead_letters(
        connection,
        caller.tenant_id,
        dead_letter_filter(services, caller, None, None, None),
        since=since,
        limit=_MAX_LETTERS,
    )
    if not letters:
        return []
    steps = _capitalized(_at_least(counted(len(letters), "step", "steps"), has_more=len(letters) >= _MAX_LETTERS))
    codes = [row["code"] for row in letters]
    commonest_code = max(codes, key=codes.count)
    have = "has" if len(letters) == 1 else "have"
    sentence = f"{steps} {have} failed for good in the last hour, mostly with {commonest_code}."
    return [Finding("warn", sentence, "/dead-letters", "Dead letters")]


async def _findings_about_unsettled(services: Services, connection: Connection, caller: Caller) -> list[Finding]:
    """At most two findings: one about all orders whose outcome a person must decide, because the provider does not
    report the outcome; and one about all due steps that no external worker claims. (The page "To settle" also lists
    paused schedules and disabled webhooks. They have findings of their own.)
    """
    findings = []
    orders, has_more = await count_unknown_orders(connection, services, caller, _MAX_SEARCHED)
    if_one = f"The outcome of {_at_least('one order', has_more=has_more)} is unknown."
    if_many = "orders have an unknown outcome."
    findings += _unsettled("orders", orders, if_one, if_many, has_more=has_more)
    if RUNS_READ in caller.scopes:
        seconds = services.settings.external_silent_seconds
        steps = await overview_reads.silent_steps(connection, caller.tenant_id, seconds)
        if_one, if_many = (
            "One due step has no external worker.",
            "due steps have no external worker.",
        )
        findings += _unsettled("external", steps, if_one, if_many, has_more=steps >= overview_reads.MAX_SILENT)
    return findings


def _unsettled(what: What, n: int, if_one: str, if_many: str, *, has_more: bool) -> list[Finding]:
    """`what`: the part of the page "To settle" that lists the cases. `if_one`: the whole sentence for one case.
    `if_many`: the sentence for several cases, after their number.
    """
    if not n:
        return []
    count = _capitalized(_at_least(f"{n:,}", has_more=has_more))
    sentence = if_one if n == 1 else f"{count} {if_many}"
    return [Finding("warn", sentence, f"/to-settle?what={what}", "To settle")]


def _paused(row: Row) -> Finding:
    sentence = f"A schedule of {row['template']} paused itself: {row['paused_because']}"
    return Finding("warn", sentence, f"/schedules/{row['id']}", "The schedule")


def _disabled(row: Row) -> Finding:
    sentence = f"The webhook to {row['url']} is disabled: {row['disabled_because']}"
    return Finding("warn", sentence, f"/webhooks/{row['id']}", "The webhook")


async def _findings_about_oldest(services: Services, caller: Caller, late_ids: Sequence[UUID]) -> list[Finding]:
    """At most one finding: why the oldest late job waits. This function skips jobs that wait on purpose. `late_ids`:
    the oldest first.
    """
    async with services.pool.acquire() as connection:
        # `beyond_tenant`: also find bulk operations on jobs of other tenants.
        found = await job_reads.find_listed(
            connection, caller.tenant_id, late_ids, beyond_tenant=OPERATE in caller.scopes
        )
    rows = {row["id"]: row for row in found}
    jobs = [rows[job_id] for job_id in late_ids if job_id in rows and _may_read(services, caller, rows[job_id])]
    for job in jobs[:_MAX_EXPLAINED]:
        explanation = await explain(services, caller.tenant_id, job, _DEPTH)
        reasons = [reason for reason in explanation["reasons"] if reason["code"] not in _HARMLESS_REASONS]
        if reasons:
            due_at = max(job["created_at"], job["scheduled_at"] or job["created_at"])
            waited = datetime.now(UTC) - due_at
            sentence = f"The oldest waiting job has waited {span(waited.total_seconds())}: {reasons[0]['message']}"
            return [Finding("warn", sentence, f"/jobs/{job['id']}", "The job")]
    return []


def _may_read(services: Services, caller: Caller, job: Row) -> bool:
    scopes = services.job_kinds.of(job["pipeline"], is_run=job["is_run"]).scopes
    return scopes is not None and scopes.read in caller.scopes
