"""Finds what needs a person's attention. Overview shows each finding as a sentence with a link, the worst first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from fastapi import Request

from leasehold.api.auth.security import JOBS_READ, OPERATE, RUNS_READ, WEBHOOKS_WRITE
from leasehold.api.console.rendering import span
from leasehold.api.fleet.health import readiness_of
from leasehold.api.jobs.dead_letters import readable
from leasehold.api.jobs.explain import Depth, explain
from leasehold.api.jobs.unsettled import What, settled_by_people
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.db import job_reads, overview_reads, run_reads, unsettled
from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.transitions.jobs import EXTERNAL

#: Tasks of a queue, of all queues together, and dead letters are counted up to these numbers.
MAX_TASKS, _MAX_OF_ALL, _MAX_LETTERS = 500, 1000, 100
#: The most items of each sort that only a person can settle, and the newest orders among which they are searched.
_MAX_UNSETTLED, _MAX_SEARCHED = overview_reads.MAX_SILENT, 300
#: How much the explanation of the oldest waiting job reads. It is little, because only the first reason is shown.
_DEPTH = Depth(entries=0, steps=5, ahead=100)
#: A longer wait is a finding.
_LONG_WAIT = timedelta(minutes=1)
#: Reasons to wait that somebody chose: they are no findings.
_CHOSEN_REASONS = frozenset(
    {"waiting_until", "waiting_for_external_worker", "waiting_for_signal", "waiting_for_steps", "running"}
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`link`: a path of the console; empty: there is none."""

    level: Literal["bad", "warn"]
    sentence: str
    link: str = ""
    link_text: str = ""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers beside the findings. None: the caller may not see them. `queues` and `workers` are of all tenants."""

    live: Row | None
    queues: list[Row] | None
    workers: int | None


async def numbers_of(connection: Connection, caller: Caller) -> Numbers:
    live = await overview_reads.unfinished_counts(connection, caller.tenant_id) if JOBS_READ in caller.scopes else None
    if OPERATE not in caller.scopes:
        return Numbers(live, None, None)
    queues = list(await run_reads.queues(connection, MAX_TASKS, _MAX_OF_ALL))
    return Numbers(live, queues, await overview_reads.worker_count(connection))


async def findings_of(request: Request, services: Services, caller: Caller) -> tuple[list[Finding], Numbers]:
    """All findings, the worst first, and the numbers. Only an operator gets findings about other tenants."""
    findings = await _findings_about_parts(request, caller)
    async with services.pool.acquire() as connection, connection.transaction(readonly=True):
        numbers = await numbers_of(connection, caller)
        if OPERATE in caller.scopes:
            findings += await _findings_about_fleet(connection, numbers)
        if JOBS_READ in caller.scopes:
            findings += await _findings_about_dead_letters(services, connection, caller)
            findings += await _findings_about_unsettled(services, connection, caller)
        if RUNS_READ in caller.scopes:
            findings += [_paused(row) for row in await overview_reads.paused_schedules(connection, caller.tenant_id)]
        if WEBHOOKS_WRITE in caller.scopes:
            findings += [_disabled(row) for row in await overview_reads.disabled_webhooks(connection, caller.tenant_id)]
    if numbers.live is not None and numbers.live["oldest_waiting"] is not None:
        findings += await _findings_about_oldest(services, caller, numbers.live)
    return sorted(findings, key=lambda finding: finding.level != "bad"), numbers


async def _findings_about_parts(request: Request, caller: Caller) -> list[Finding]:
    """One finding for each part that does not answer. For an operator it also has the meaning, from the self-check."""
    readiness = readiness_of(request)
    failed = [check for check in await readiness.checks() if not check.ok]
    wrong = [result for result in await readiness.findings() if not result.ok] if OPERATE in caller.scopes else []
    meanings = {result.part: f" {_capitalized(result.meaning)}." for result in reversed(wrong)}
    findings = [
        Finding("bad" if check.required else "warn", f"The {check.name}: {check.detail}.{meanings.get(check.name, '')}")
        for check in failed
    ]
    reported = {check.name for check in failed}
    return findings + [
        Finding("warn", f"The {result.part}: {result.found}. {_capitalized(result.meaning)}.")
        for result in wrong
        if result.part not in reported
    ]


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


async def _findings_about_fleet(connection: Connection, numbers: Numbers) -> list[Finding]:
    findings = []
    if not numbers.workers:
        findings.append(Finding("bad", "No worker is registered: nothing runs.", "/workers", "Workers"))
    for row in numbers.queues or ():
        findings += _findings_about_queue(row, any_worker=bool(numbers.workers))
    for row in await overview_reads.quarantined(connection):
        findings.append(
            Finding("warn", f"The duty {row['duty']} leaves {row['n']} things alone for now: {row['code']}.")
        )
    return findings


def _count(n: int, at_most: int) -> str:
    """`n` for a sentence, where nothing beyond `at_most` was counted."""
    return _counted(n, has_more=n >= at_most)


def _counted(n: int, *, has_more: bool) -> str:
    return f"at least {n:,}" if has_more else f"{n:,}"


def _findings_about_queue(row: Row, *, any_worker: bool) -> list[Finding]:
    queue, n = row["queue"], row["runnable"]
    link = ("/queues", "Queues")
    if row["paused_because"] is not None:
        return [Finding("warn", f"The queue {queue} is paused: {row['paused_because']}", *link)]
    if not n or queue.startswith(EXTERNAL):
        return []
    count = _counted(n, has_more=row["has_more"])
    if not row["workers"]:
        sentence = f"No worker serves the queue {queue}, in which {count} tasks wait."
        return [Finding("bad", sentence, *link)] if any_worker else []

    waited = datetime.now(UTC) - row["oldest"]
    if waited > _LONG_WAIT:
        sentence = f"The queue {queue} is behind: {count} tasks wait, one of them for {span(waited.total_seconds())}."
        return [Finding("warn", sentence, *link)]
    return []


async def _findings_about_dead_letters(services: Services, connection: Connection, caller: Caller) -> list[Finding]:
    since = datetime.now(UTC) - timedelta(hours=1)
    lately = await job_reads.dead_letters(
        connection, caller.tenant_id, readable(services, caller, None, None, None), since=since, limit=_MAX_LETTERS
    )
    if not lately:
        return []
    count = _capitalized(_count(len(lately), _MAX_LETTERS))
    codes = [row["code"] for row in lately]
    code = max(codes, key=codes.count)
    noun = "step has" if count == "1" else "steps have"
    sentence = f"{count} {noun} failed for good in the last hour, mostly with {code}."
    return [Finding("warn", sentence, "/dead-letters", "Dead letters")]


async def _findings_about_unsettled(services: Services, connection: Connection, caller: Caller) -> list[Finding]:
    """One sentence for all orders, and one for all external steps, that wait for a person. Paused schedules and
    disabled webhooks have findings of their own.
    """
    findings = []
    by_people = settled_by_people(services, caller, caller.tenant_id)
    if by_people:
        orders, _ = await unsettled.orders(
            connection, caller.tenant_id, by_people, None, _MAX_UNSETTLED, searched=_MAX_SEARCHED
        )
        one = "The outcome of one order is unknown."
        findings += _unsettled("orders", len(orders), one, "orders have an unknown outcome.")
    if RUNS_READ in caller.scopes:
        seconds = services.settings.external_silent_seconds
        steps = await overview_reads.silent_steps(connection, caller.tenant_id, seconds)
        one = "No external worker works on one step that is due."
        findings += _unsettled("external", steps, one, "steps that are due have no external worker.")
    return findings


def _unsettled(what: What, n: int, one: str, many: str) -> list[Finding]:
    if not n:
        return []
    sentence = one if n == 1 else f"{_capitalized(_count(n, _MAX_UNSETTLED))} {many}"
    return [Finding("warn", sentence, f"/to-settle?what={what}", "To settle")]


def _paused(row: Row) -> Finding:
    sentence = f"A schedule of {row['template']} paused itself: {row['paused_because']}"
    return Finding("warn", sentence, f"/schedules/{row['id']}", "The schedule")


def _disabled(row: Row) -> Finding:
    sentence = f"The webhook to {row['url']} is disabled: {row['disabled_because']}"
    return Finding("warn", sentence, f"/webhooks/{row['id']}", "The webhook")


async def _findings_about_oldest(services: Services, caller: Caller, live: Row) -> list[Finding]:
    """Why the tenant's oldest waiting job waits, unless somebody chose the reason."""
    async with services.pool.acquire() as connection:
        rows = await job_reads.find_listed(connection, caller.tenant_id, [live["oldest_waiting"]])
    waited = timedelta() if not rows else datetime.now(UTC) - rows[0]["created_at"]
    if waited < _LONG_WAIT or rows[0]["started_at"] is not None:
        return []
    (job,) = rows
    kind = services.job_kinds.of(job["pipeline"], is_run=job["is_run"])
    if kind.scopes is None or kind.scopes.read not in caller.scopes:
        return []
    explanation = await explain(services, caller.tenant_id, job, _DEPTH)
    reasons = [reason for reason in explanation["reasons"] if reason["code"] not in _CHOSEN_REASONS]
    if not reasons:
        return []
    sentence = f"The oldest waiting job has waited {span(waited.total_seconds())}: {reasons[0]['message']}"
    return [Finding("warn", sentence, f"/jobs/{job['id']}", "The job")]
