"""Creates runs, and revives (retries) failed runs. A run is a job of a template. Each run has a scope, for example one
user. The template's concurrency policy decides whether a run excludes, replaces or waits for other runs of its scope. A
run also waits at the concurrency limits that apply to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, unindexed
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Conflict, Invalid
from leasehold.domain.ids import new_id
from leasehold.domain.json_digest import json_digest
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.states import JobState
from leasehold.evaluation.templates import TemplateVersion
from leasehold.runtime.pacing import paced
from leasehold.transitions import concurrency, debounce, jobs, limits
from leasehold.transitions.debounce import Debounced
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.jobs import AdmissionTerms, NewJob, RunOf
from leasehold.transitions.limits import TenantRules

#: The names of two unique indexes. Because of them, no two unfinished runs of a template have the same exclusive key,
#: or the same dedupe key. An exclusive key is a digest of the scope. A dedupe key is a text that a client chose.
_EXCLUSIVE, _DEDUPE = "job_exclusive", "job_dedupe"
KEYS = (_EXCLUSIVE, _DEDUPE)


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be written. The caller has checked `params` against the template (Templates.params)."""

    template_version: TemplateVersion
    tenant_id: str
    params: Mapping[str, Any]
    scope: str = "tenant"
    scope_id: str = ""
    priority: int = 1
    scheduled_at: datetime | None = None
    schedule_id: UUID | None = None
    tick: datetime | None = None  # the time for which the schedule creates the run
    #: The run that this run repeats.
    rerun_of: UUID | None = None
    trace: Mapping[str, str] | None = None
    #: How long the ended run and its objects stay; None: for ever.
    keep_seconds: int | None = None
    dedupe_key: str | None = None  # at most one unfinished run of the template has it
    start_within: timedelta | None = None  # replaces the template's `start_within`
    tags: Mapping[str, str] = field(default_factory=dict)
    callback_url: str | None = None
    #: The run does the work of a step of a workflow (`ctx.run` of a limited task). It waits only at the limits that its
    #: task declares. It does not wait at an operator's limits, because the workflow already has a place there, and
    #: would wait for itself. No webhook and no `on_failure` run follows the end of this run, because the workflow
    #: handles the end, as for any other step.
    is_step: bool = False
    id: UUID = field(default_factory=new_id)


class Duplicate(Conflict):
    """Another unfinished run of the template has the dedupe key. The caller must roll back. After that, the caller may
    answer with the other run, if that run is still unfinished.
    """

    def __init__(self, other: object = None) -> None:
        other_run = "one that has just started" if other is None else other
        super().__init__("same_key_running", f"A run with the same dedupe key is unfinished: {other_run}.")


@dataclass(frozen=True, slots=True)
class CreatedRuns:
    """A batch of new runs. After the commit, the caller must publish `hints` (messages that tell workers of due tasks),
    and call `concurrency.admit` with `limits`.
    """

    hints: Sequence[Announcement]
    limits: Sequence[concurrency.ConcurrencyLimitName]


@dataclass(frozen=True, slots=True)
class CreatedRun:
    """A new or revived run. After the commit, the caller must publish `hints`, and call `concurrency.admit` with
    `limits` and `departed`. `departed`: the runs that the new run replaced; `ended`: the replaced runs that ended
    immediately.
    """

    id: UUID
    hints: Sequence[Announcement]
    limits: Sequence[concurrency.ConcurrencyLimitName]
    departed: Sequence[UUID] = ()
    ended: Sequence[JobEnded] = ()


async def create_together(
    connection: Connection, new: Sequence[NewRun], by_tenant: Mapping[str, TenantRules] | None = None
) -> CreatedRuns:
    """(new) -> pending, for runs that do not exclude each other. Writes all of them, or none. If a concurrency limit
    applies to one of the runs, call this in a transaction, because `jobs.submit` then sends more than one statement.
    `by_tenant`: the rules of each tenant, if the caller has read them in this transaction (`write_limits`).

    Raises Duplicate when another client has just started a run with one of the dedupe keys.
    """
    # `independent`: the template's concurrency policy is `allow`.
    assert all(run.template_version.independent for run in new)
    try:
        if by_tenant is None:
            by_tenant = await limits.tenant_rules(connection, {run.tenant_id for run in new})
        return await _create_independent(connection, new, by_tenant)
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != _DEDUPE:
            raise
        raise Duplicate from None


async def create_unlimited(connection: Connection, new: Sequence[NewRun]) -> tuple[list[bool], Sequence[Announcement]]:
    """Writes those of the runs to which no concurrency limit applies, and leaves out the others. Otherwise it does the
    same as `create_together`, but needs no transaction. Returns for each run whether it was written, and the hints.
    Raises asyncpg.UniqueViolationError, not Duplicate, if an unfinished run has one of the dedupe keys.
    """
    by_tenant = await limits.tenant_rules(connection, {run.tenant_id for run in new})
    unlimited = [not _declared_limits(by_tenant[run.tenant_id], run) for run in new]
    if not any(unlimited):
        return unlimited, []
    to_write = [run for run, is_unlimited in zip(new, unlimited, strict=True) if is_unlimited]
    created = await _create_independent(connection, to_write, by_tenant)
    return unlimited, created.hints


async def _create_independent(
    connection: Connection, new: Sequence[NewRun], by_tenant: Mapping[str, TenantRules]
) -> CreatedRuns:
    new_jobs = []
    async for run in paced(new):  # between pieces of the list, the event loop serves other coroutines
        rules = by_tenant[run.tenant_id]
        # `watched`: the tenant has a webhook, which may report the end of the run.
        new_jobs.append(_job(run, _declared_limits(rules, run), notify=rules.watched))
    hints = await jobs.submit(connection, new_jobs)
    return CreatedRuns(hints, sorted({(limit.tenant_id, limit.key) for job in new_jobs for limit in job.limits}))


# The limits at which the unfinished runs with the dedupe keys of the submissions wait, or were admitted, so far. The
# table `gate_job` has them. $1: the tenant. $2: the submissions as `debounce.lock_keys` returns them. `unindexed` keeps
# PostgreSQL from using a partial index for the condition.
_LIMITS_UNTIL_NOW = f"""
-- runs_limits_until_now
SELECT DISTINCT g.tenant_id, g.key
FROM jsonb_to_recordset($2::jsonb) AS a(pipeline text, key text)
JOIN job j ON j.tenant_id = $1 AND j.pipeline = a.pipeline AND j.dedupe_key = a.key
JOIN gate_job g ON g.job_id = j.id
WHERE {unindexed("j.finished_at IS NULL")}
"""

# Those of the runs $1 that are held, which means that they wait at their concurrency limits.
_HELD = """
-- runs_held
SELECT j.id, j.priority, max(t.available_at) AS starts_at FROM job j JOIN task t ON t.job_id = j.id
WHERE j.id = ANY($1::uuid[]) AND j.held GROUP BY j.id, j.priority
"""


async def merge(
    connection: Connection, tenant_id: str, new: Sequence[NewRun], submissions: Sequence[Debounced]
) -> list[UUID | None]:
    """Debounce: give the arguments of each submission to the run with the submission's key, if that run has not
    started. The run then waits at the concurrency limits of its new arguments. `new`: for each submission, the run that
    the submission would create.

    Returns for each submission the run that took its arguments, now or earlier, or None if there is no such run.
    """
    # `nth`: the number of a submission in `submissions`, from 1.
    records = await debounce.lock_keys(connection, tenant_id, submissions)
    run_of_nth = await debounce.written_earlier(connection, tenant_id, records)
    records = [record for record in records if record["nth"] not in run_of_nth]
    if records:
        new_of_nth = {record["nth"]: new[record["nth"] - 1] for record in records}
        run_of_nth |= await _merge(connection, tenant_id, new_of_nth, records)
    return [run_of_nth.get(nth) for nth in range(1, len(submissions) + 1)]


async def _merge(
    connection: Connection, tenant_id: str, new: Mapping[int, NewRun], records: Sequence[Mapping[str, Any]]
) -> dict[int, UUID]:
    """Do the work of `debounce.merge`, with the same `records` and the same result. In addition, let held runs wait at
    the limits of their new arguments. `new`: `nth` of a submission -> the run that the submission would create.
    """
    rules = (await limits.tenant_rules(connection, {tenant_id}))[tenant_id]
    limits_of_new = {nth: _declared_limits(rules, run) for nth, run in new.items()}
    if not any(limits_of_new.values()):
        return await debounce.merge(connection, tenant_id, records)
    # Lock the keys first, then the limits, and then the jobs. Besides the new limits, lock the limits at which the jobs
    # have waited so far. Otherwise an admission at those limits would not see that a job now waits at other limits.
    earlier_limits = [ConcurrencyLimit(*row) for row in await connection.fetch(_LIMITS_UNTIL_NOW, tenant_id, records)]
    new_limits = [limit for own_limits in limits_of_new.values() for limit in own_limits]
    await concurrency.lock_limits(connection, [*earlier_limits, *new_limits])
    run_of_nth = await debounce.merge(connection, tenant_id, records)
    held = {row["id"]: row for row in await connection.fetch(_HELD, list(run_of_nth.values()))}
    again = []
    for nth, merged in run_of_nth.items():
        if merged in held and (own_limits := limits_of_new[nth]):
            run = new[nth]
            # `queue_up_again` reads only the id, the tenant, the priority, the start and the limits of this record.
            job = _job(replace(run, id=merged, scheduled_at=held[merged]["starts_at"]), own_limits, notify=False)
            again.append(replace(job, priority=held[merged]["priority"]))
    if again:
        await concurrency.queue_up_again(connection, again)
    return run_of_nth


def _job(new: NewRun, own_limits: Sequence[ConcurrencyLimit], *, notify: bool, exclusive: str | None = None) -> NewJob:
    template = new.template_version.template
    return NewJob(
        pipeline=new.template_version.pipeline,
        tenant_id=new.tenant_id,
        params=new.params,
        priority=new.priority,
        trace=new.trace,
        keep_seconds=new.keep_seconds,
        id=new.id,
        not_before=new.scheduled_at,
        limits=own_limits,
        exclusive_key=exclusive,
        dedupe_key=new.dedupe_key,
        start_within=new.start_within,
        # The duty that reports `notify` jobs to webhooks also starts the runs of `on_failure`.
        notify=not new.is_step and (notify or bool(_followed(new.template_version.pipeline))),
        tags=new.tags,
        callback_url=new.callback_url,
        run=RunOf(template.type, template.version, new.scope, new.scope_id, new.schedule_id, new.tick, new.rerun_of),
    )


async def create(connection: Connection, new: NewRun) -> CreatedRun:
    """(new) -> pending, for one run with any concurrency policy. Call this in a transaction.

    Raises Duplicate. Raises Conflict `same_scope_running`, with the other run's id in its message, if the policy is
    `reject_same_scope` and another run of the scope is unfinished. Raises asyncpg.UniqueViolationError if the
    schedule's tick has a run already.
    """
    rules = (await limits.tenant_rules(connection, {new.tenant_id}))[new.tenant_id]
    admission = await _admission_of(connection, new, rules)
    job = _job(new, admission.terms.limits, notify=rules.watched, exclusive=admission.terms.exclusive_key)
    async with _translate_conflicts(connection, new, admission.terms):
        hints = await jobs.submit(connection, [job])
    return admission.created(new.id, hints)


def first_state(new: NewRun, *, is_limited: bool = False) -> JobState:
    """The state in which the run is written. `is_limited`: the run first waits at its limits."""
    return JobState.PENDING if is_limited else jobs.first_state(_job(new, (), notify=False))


# Whether the job $1 is a workflow that has made a call.
_HAS_JOURNAL = "SELECT EXISTS (SELECT 1 FROM journal e WHERE e.job_id = $1)"


async def revive(
    connection: Connection,
    new: NewRun,
    from_step: str | None = None,
    cause: Mapping[str, str] | None = None,
    *,
    replaces_params: bool = False,
) -> CreatedRun | None:
    """failed -> pending, queued or waiting_worker, for the run `new.id`. As a new run does, the run waits at its limits
    and, if the policy says so, for other runs of its scope. Returns None if there is no such failed run. Call this in a
    transaction.

    `new.params`: the parameters of the run from now on. `replaces_params`: whether they replace the stored parameters;
    if False, `new.params` are the stored parameters. `from_step`: the first step to run again; None: the failed step.
    `cause`: who retries the run, for its history.

    Raises Conflict `same_scope_running`, Duplicate, and Invalid `unknown_step`. Raises Invalid `skips_other_steps` if
    the run would skip other steps with the new parameters than with the old ones. The reason: the skipped steps decide
    which tasks wait for each other. Raises Invalid `workflow_has_begun` if the parameters change and the run is a
    workflow that has made calls. The journal has these calls with the arguments that follow from the old parameters.
    """
    await debounce.lock_keys_of_jobs(connection, new.tenant_id, [new.id])
    failed_job = await connection.fetchrow(
        "SELECT dedupe_key, params FROM job WHERE id = $1 AND tenant_id = $2 AND status = 'failed' FOR UPDATE",
        new.id,
        new.tenant_id,
    )
    if failed_job is None:
        return None
    pipeline = new.template_version.pipeline
    if pipeline.skipped(failed_job["params"]) != pipeline.skipped(new.params):
        raise Invalid(
            "skips_other_steps", "With this payload the run would skip other steps (`skip_if`): start a new run."
        )
    if new.params != failed_job["params"] and await connection.fetchval(_HAS_JOURNAL, new.id):
        raise Invalid(
            "workflow_has_begun",
            "The run's workflow has made calls with its payload, which a retry does not make again: start a new run.",
        )
    new = replace(new, dedupe_key=failed_job["dedupe_key"])
    admission = await _admission_of(
        connection, new, (await limits.tenant_rules(connection, {new.tenant_id}))[new.tenant_id]
    )
    async with _translate_conflicts(connection, new, admission.terms):
        hints = await jobs.replay(
            connection,
            new.id,
            new.tenant_id,
            new.params if replaces_params else None,
            from_step,
            admission.terms,
            followed=() if new.is_step else _followed(new.template_version.pipeline),
            cause=cause,
        )
    return None if hints is None else admission.created(new.id, hints)


def _followed(pipeline: Pipeline) -> list[str]:
    """The `followed` of `jobs.replay`: the pipeline's name if it has an `on_failure` pipeline, else no name."""
    return [pipeline.name] if pipeline.on_failure is not None else []


@dataclass(frozen=True, slots=True)
class _Admission:
    """The admission terms of a new run, and the runs that it replaces. `ended`: the replaced runs that have ended
    immediately.
    """

    terms: AdmissionTerms
    replaced: Sequence[UUID] = ()
    ended: Sequence[JobEnded] = ()

    def created(self, run_id: UUID, hints: Sequence[Announcement]) -> CreatedRun:
        names = [(limit.tenant_id, limit.key) for limit in self.terms.limits]
        return CreatedRun(run_id, hints, names, self.replaced, self.ended)


async def write_limits(connection: Connection, new: NewRun) -> dict[str, TenantRules]:
    """Write the rows of the limits at which the run will wait. Call this before a statement that locks another job,
    because an admission locks limits before jobs, and the opposite order could deadlock. Returns the argument
    `by_tenant` of `create_together`.
    """
    by_tenant = await limits.tenant_rules(connection, {new.tenant_id})
    if own_limits := limits_of(new, by_tenant[new.tenant_id]):
        await concurrency.write_limits(connection, own_limits)
    return by_tenant


async def lock_limits(connection: Connection, new: NewRun) -> None:
    """Lock the limits at which the run will wait, until the caller's transaction ends. Call this before a statement
    that locks other jobs, because an admission also locks limits before jobs, and the opposite order could deadlock.
    """
    rules = (await limits.tenant_rules(connection, {new.tenant_id}))[new.tenant_id]
    await concurrency.lock_limits(connection, limits_of(new, rules))


def limits_of(new: NewRun, rules: TenantRules) -> Sequence[ConcurrencyLimit]:
    """The limits at which the run will wait."""
    return _terms_of(new, rules).limits


def _terms_of(new: NewRun, rules: TenantRules) -> AdmissionTerms:
    """The admission terms of a run (its limits and its exclusive key), by its template's concurrency policy."""
    policy = new.template_version.pipeline.terms.concurrency
    declared_limits = _declared_limits(rules, new)
    if policy == "allow":
        return AdmissionTerms(declared_limits)
    scope_digest = _scope_digest(new)
    if policy == "reject_same_scope":
        return AdmissionTerms(declared_limits, scope_digest)
    # At this limit the run waits until the earlier runs of its scope have ended. `_admission_of` expects this limit as
    # the last of the list.
    scope = ConcurrencyLimit(new.tenant_id, f"scope:{new.template_version.template.type}:{scope_digest}", at_most=1)
    return AdmissionTerms([*declared_limits, scope])


async def _admission_of(connection: Connection, new: NewRun, rules: TenantRules) -> _Admission:
    """The admission of a run. The policy `replace_same_scope` cancels older runs."""
    terms = _terms_of(new, rules)
    if new.template_version.pipeline.terms.concurrency != "replace_same_scope":
        return _Admission(terms)
    # Lock the limits before the older runs, as an admission does. With the lock of the scope's limit, only one
    # transaction at a time replaces runs of the scope.
    await concurrency.lock_limits(connection, terms.limits)
    older, ended = await _replace(connection, new, terms.limits[-1])
    return _Admission(terms, older, ended)


# $1: the tenant. $2: the template. $3: the dedupe keys.
_UNFINISHED_BY_KEY = """
-- run_living
SELECT dedupe_key, id, status, pipeline_version AS version FROM job
WHERE tenant_id = $1 AND pipeline = $2 AND dedupe_key = ANY($3::text[]) AND dedupe_key IS NOT NULL
  AND finished_at IS NULL
"""


async def unfinished_by_key(
    connection: Connection, tenant_id: str, template: str, keys: Collection[str]
) -> dict[str, Any]:
    """The unfinished runs of the template with these dedupe keys, by key: `id`, `status`, `version`."""
    rows = await connection.fetch(_UNFINISHED_BY_KEY, tenant_id, template, sorted(keys))
    return {row["dedupe_key"]: row for row in rows}


async def _refuse_duplicate(connection: Connection, new: NewRun) -> None:
    """Raises Duplicate if an unfinished run has the dedupe key."""
    if new.dedupe_key is None:
        return
    template = new.template_version.pipeline.name
    unfinished = await unfinished_by_key(connection, new.tenant_id, template, [new.dedupe_key])
    if new.dedupe_key in unfinished:
        raise Duplicate(unfinished[new.dedupe_key]["id"])


@asynccontextmanager
async def _translate_conflicts(connection: Connection, new: NewRun, terms: AdmissionTerms) -> AsyncIterator[None]:
    """Raise Conflict or Duplicate when the block violates the exclusive or the dedupe key. The block runs in a
    savepoint, so the earlier writes of the caller's transaction are kept.
    """
    if terms.exclusive_key is None and new.dedupe_key is None:
        yield
        return
    try:
        async with connection.transaction():  # a savepoint
            yield
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name not in (_EXCLUSIVE, _DEDUPE):
            raise
        # Check the dedupe key first. The other run may have both keys, and PostgreSQL names only one violated index.
        await _refuse_duplicate(connection, new)
        if error.constraint_name == _DEDUPE:  # the other run has just ended
            raise Duplicate from None
        other = await connection.fetchval(
            "SELECT id FROM job WHERE tenant_id = $1 AND pipeline = $2 AND exclusive_key = $3 AND finished_at IS NULL",
            new.tenant_id,
            new.template_version.pipeline.name,
            terms.exclusive_key,
        )
        raise Conflict("same_scope_running", f"A run of the same scope is unfinished: {other}.") from None


def _scope_digest(new: NewRun) -> str:
    """A digest that is equal for all runs of a scope. The template's `dedupe_keys` name parameters that belong to the
    scope. (They have nothing to do with the dedupe key of a run.)
    """
    dedupe_keys = new.template_version.pipeline.terms.dedupe_keys
    return json_digest([new.scope, new.scope_id, [[key, new.params.get(key)] for key in dedupe_keys]])


async def _replace(connection: Connection, new: NewRun, limit: ConcurrencyLimit) -> tuple[list[UUID], list[JobEnded]]:
    """Cancel the older runs of the same scope. Returns these runs, and the jobs among them that have ended immediately.
    The new run waits at `limit`, the limit of the scope, until the older runs have ended. The caller has locked this
    limit.

    Raises Duplicate if an unfinished run has the dedupe key, because a repeated submission must not replace its own
    run.
    """
    await _refuse_duplicate(connection, new)
    rows = await connection.fetch(
        "SELECT g.job_id FROM gate_job g JOIN job j ON j.id = g.job_id"
        f" WHERE g.tenant_id = $1 AND g.key = $2 AND {unindexed('j.finished_at IS NULL')}",
        limit.tenant_id,
        limit.key,
    )
    older_runs = [row["job_id"] for row in rows]
    cancellation = await jobs.request_cancel(
        connection, older_runs, new.tenant_id, reason=f"replaced by run {new.id}", by="replace_same_scope", forced=True
    )
    return older_runs, cancellation.ended


def _declared_limits(rules: TenantRules, new: NewRun) -> list[ConcurrencyLimit]:
    # The limits of the run's own pipeline apply to each run. Those of operators (`rules.limits`) do not apply to a
    # step.
    declared = () if new.is_step else rules.limits
    return limits.applicable_limits(declared, new.tenant_id, new.template_version.pipeline, new.params)
