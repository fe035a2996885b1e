"""Making runs: a job of a template, with its scope, its place among others of the same scope, and its gates."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import orjson

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, unindexed
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.errors import Conflict
from leasehold.domain.ids import new_id
from leasehold.evaluation.templates import Known
from leasehold.runtime.pacing import paced
from leasehold.transitions import gates, jobs, limits
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.jobs import NewJob, Place, RunOf


@dataclass(frozen=True, slots=True)
class NewRun:
    """What is asked for. `params`: already fit for the template (Known.params)."""

    known: Known
    tenant_id: str
    params: Mapping[str, Any]
    scope: str = "tenant"
    scope_id: str = ""
    priority: int = 1
    scheduled_at: datetime | None = None
    schedule_id: UUID | None = None
    tick: datetime | None = None
    rerun_of: UUID | None = None
    trace: Mapping[str, str] | None = None
    keep_seconds: int | None = None
    dedupe_key: str | None = None  # at most one unfinished run of the template has it
    start_within: timedelta | None = None  # in place of the template's
    id: UUID = field(default_factory=new_id)


class Duplicate(Conflict):
    """An unfinished run of the template has the dedupe key. Roll back: that run is the answer, if it still lives."""

    def __init__(self, other: object = None) -> None:
        which = "one that has just started" if other is None else other
        super().__init__("same_key_running", f"A run with the same dedupe key is unfinished: {which}.")


@dataclass(frozen=True, slots=True)
class MadeTogether:
    """As `Made`, for all of a batch."""

    hints: Sequence[Announcement]
    gates: Sequence[gates.ConcurrencyLimitName]


@dataclass(frozen=True, slots=True)
class Made:
    """Publish `hints` after the commit, and then ask `gates` to let the run in. `left`: runs that made room for it;
    `ended`: those of them that ended there and then.
    """

    id: UUID
    hints: Sequence[Announcement]
    gates: Sequence[gates.ConcurrencyLimitName]
    left: Sequence[UUID] = ()
    ended: Sequence[JobEnded] = ()


async def create_together(connection: Connection, new: Sequence[NewRun]) -> MadeTogether:
    """- -> pending for runs that leave each other alone, all of them or none, in a statement for each
    hundred and one more. Where limits are declared, in two more and in the caller's transaction, which this then needs.

    Raises Duplicate where somebody has just started a run with the dedupe key of one of them.
    """
    assert all(one.known.independent for one in new)
    try:
        return await _together(connection, new, await _surroundings(connection, {one.tenant_id for one in new}))
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != _DEDUPE:
            raise
        raise Duplicate from None


async def create_unlimited(connection: Connection, new: Sequence[NewRun]) -> tuple[list[bool], Sequence[Announcement]]:
    """As `create_together`, and without a transaction, for those that no declared limit is for: whether each is one of
    them, and their hints. Nothing is written of the others.
    """
    around = await _surroundings(connection, {one.tenant_id for one in new})
    free = [not _declared_gates(around[one.tenant_id], one) for one in new]
    if not any(free):
        return free, []
    made = await _together(connection, [one for one, is_free in zip(new, free, strict=True) if is_free], around)
    return free, made.hints


async def _together(connection: Connection, new: Sequence[NewRun], around: Mapping[str, _Surroundings]) -> MadeTogether:
    made = []
    async for one in paced(new):
        its = around[one.tenant_id]
        made.append(_job(one, _declared_gates(its, one), notify=its.watched))
    hints = await jobs.submit(connection, made)
    return MadeTogether(hints, sorted({(gate.tenant_id, gate.key) for job in made for gate in job.gates}))


def _job(new: NewRun, its_gates: Sequence[ConcurrencyLimit], *, notify: bool, exclusive: str | None = None) -> NewJob:
    template = new.known.template
    return NewJob(
        pipeline=new.known.pipeline,
        tenant_id=new.tenant_id,
        params=new.params,
        priority=new.priority,
        trace=new.trace,
        keep_seconds=new.keep_seconds,
        id=new.id,
        not_before=new.scheduled_at,
        gates=its_gates,
        exclusive_key=exclusive,
        dedupe_key=new.dedupe_key,
        start_within=new.start_within,
        notify=notify,
        run=RunOf(template.type, template.version, new.scope, new.scope_id, new.schedule_id, new.tick, new.rerun_of),
    )


async def create(connection: Connection, new: NewRun) -> Made:
    """- -> pending, in the caller's transaction, which this needs.

    Raises Conflict `same_scope_running` (reject_same_scope) with the other run's id in its message, and Duplicate; a
    tick that made its run already raises asyncpg.UniqueViolationError.
    """
    around = (await _surroundings(connection, {new.tenant_id}))[new.tenant_id]
    placed = await _placed(connection, new, around)
    job = _job(new, placed.place.gates, notify=around.watched, exclusive=placed.place.exclusive_key)
    async with _alone(connection, new, placed.place):
        hints = await jobs.submit(connection, [job])
    return placed.made(new.id, hints)


async def revive(
    connection: Connection, new: NewRun, params: Mapping[str, Any] | None, from_step: str | None
) -> Made | None:
    """failed -> pending for the run `new.id`, in the caller's transaction, which this needs: it waits at its scope and
    limits as a new one does. None: it has not failed, or there is none. `new.params`: what it runs with from now on;
    `params`: the same where they are not its own.

    Raises Conflict `same_scope_running`, Duplicate, and Invalid `unknown_step`.
    """
    failed = await connection.fetchrow(
        "SELECT dedupe_key FROM job WHERE id = $1 AND tenant_id = $2 AND status = 'failed' FOR UPDATE",
        new.id,
        new.tenant_id,
    )
    if failed is None:
        return None
    new = replace(new, dedupe_key=failed["dedupe_key"])
    placed = await _placed(connection, new, (await _surroundings(connection, {new.tenant_id}))[new.tenant_id])
    async with _alone(connection, new, placed.place):
        hints = await jobs.replay(connection, new.id, new.tenant_id, params, from_step, placed.place)
    return None if hints is None else placed.made(new.id, hints)


@dataclass(frozen=True, slots=True)
class _Placed:
    place: Place
    replaced: Sequence[UUID] = ()
    ended: Sequence[JobEnded] = ()

    def made(self, run_id: UUID, hints: Sequence[Announcement]) -> Made:
        names = [(gate.tenant_id, gate.key) for gate in self.place.gates]
        return Made(run_id, hints, names, self.replaced, self.ended)


async def _placed(connection: Connection, new: NewRun, around: _Surroundings) -> _Placed:
    """Its place among others, which by its template's rule may have to make room."""
    concurrency = new.known.pipeline.terms.concurrency
    same = _same_scope(new)
    its_gates = _declared_gates(around, new)
    if concurrency == "reject_same_scope":
        return _Placed(Place(its_gates, same))
    if concurrency == "allow":
        return _Placed(Place(its_gates))
    scope = ConcurrencyLimit(new.tenant_id, f"scope:{new.known.template.type}:{same}", at_most=1)
    place = Place([*its_gates, scope])
    return (
        _Placed(place, *await _replace(connection, new, scope))
        if concurrency == "replace_same_scope"
        else _Placed(place)
    )


#: The indexes that let one unfinished run of a template have a place, and a dedupe key.
_EXCLUSIVE, _DEDUPE = "job_exclusive", "job_dedupe"

_LIVING = """
-- run_living
SELECT dedupe_key, id, status, pipeline_version AS version FROM job
WHERE tenant_id = $1 AND pipeline = $2 AND dedupe_key = ANY($3::text[]) AND dedupe_key IS NOT NULL
  AND finished_at IS NULL
"""


async def living(connection: Connection, tenant_id: str, template: str, keys: Collection[str]) -> dict[str, Any]:
    """The unfinished runs of the template that have these dedupe keys, by their keys: `id`, `status`, `version`."""
    rows = await connection.fetch(_LIVING, tenant_id, template, sorted(keys))
    return {row["dedupe_key"]: row for row in rows}


async def _refuse_duplicate(connection: Connection, new: NewRun) -> None:
    """Raises Duplicate."""
    if new.dedupe_key is not None:
        for other in (await living(connection, new.tenant_id, new.known.pipeline.name, [new.dedupe_key])).values():
            raise Duplicate(other["id"])


@asynccontextmanager
async def _alone(connection: Connection, new: NewRun, place: Place) -> AsyncIterator[None]:
    """Raises Conflict or Duplicate where the block finds the place or the dedupe key of the run taken; what the caller
    did before survives that.
    """
    if place.exclusive_key is None and new.dedupe_key is None:
        yield
        return
    try:
        async with connection.transaction():  # a savepoint
            yield
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name not in (_EXCLUSIVE, _DEDUPE):
            raise
        await _refuse_duplicate(connection, new)  # it may have the place, too
        if error.constraint_name == _DEDUPE:  # it has just ended
            raise Duplicate from None
        other = await connection.fetchval(
            "SELECT id FROM job WHERE tenant_id = $1 AND pipeline = $2 AND exclusive_key = $3 AND finished_at IS NULL",
            new.tenant_id,
            new.known.pipeline.name,
            place.exclusive_key,
        )
        raise Conflict("same_scope_running", f"A run of the same scope is unfinished: {other}.") from None


def _same_scope(new: NewRun) -> str:
    """Equal for runs of one scope. Fixed length, so that no payload makes a key too long for an index."""
    said = [new.scope, new.scope_id, [[key, new.params.get(key)] for key in new.known.pipeline.terms.dedupe_keys]]
    return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()[:40]


async def _replace(connection: Connection, new: NewRun, gate: ConcurrencyLimit) -> tuple[list[UUID], list[JobEnded]]:
    """Ask those before it to stop: they, and those that ended at once. It waits at their gate until they have.

    Raises Duplicate: a run is not replaced by who asks for it again.
    """
    await connection.execute(
        "INSERT INTO gate (tenant_id, key, at_most) VALUES ($1, $2, 1)"
        " ON CONFLICT (tenant_id, key) DO UPDATE SET at_most = 1",  # its lock puts replacements in a row
        gate.tenant_id,
        gate.key,
    )
    await _refuse_duplicate(connection, new)
    rows = await connection.fetch(
        "SELECT g.job_id FROM gate_job g JOIN job j ON j.id = g.job_id"
        f" WHERE g.tenant_id = $1 AND g.key = $2 AND {unindexed('j.finished_at IS NULL')}",
        gate.tenant_id,
        gate.key,
    )
    older = [row["job_id"] for row in rows]
    cancels = await jobs.request_cancel(
        connection, older, new.tenant_id, reason=f"replaced by run {new.id}", by="replace_same_scope", forced=True
    )
    return older, cancels.ended


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Of a tenant. `limits`: rows of gates that operators and the tenant have declared; `watched`: a webhook wants to
    know how its runs end.
    """

    limits: Sequence[Any]
    watched: bool


_SURROUNDINGS = """
-- run_surroundings
SELECT asked.tenant_id,
       EXISTS (SELECT 1 FROM webhook w WHERE w.tenant_id = asked.tenant_id AND w.enabled) AS watched,
       (SELECT coalesce(jsonb_agg(g), '[]')
        FROM (SELECT tenant_id, key, at_most, per_minute FROM gate
              WHERE declared AND tenant_id IN (asked.tenant_id, $2)) AS g) AS limits
FROM unnest($1::text[]) AS asked(tenant_id)
"""


async def _surroundings(connection: Connection, tenants: Collection[str]) -> dict[str, _Surroundings]:
    rows = await connection.fetch(_SURROUNDINGS, list(tenants), EVERYBODY)
    return {row["tenant_id"]: _Surroundings(row["limits"], row["watched"]) for row in rows}


def _declared_gates(around: _Surroundings, new: NewRun) -> list[ConcurrencyLimit]:
    return limits.gates_of(around.limits, new.tenant_id, new.known.pipeline, new.params)
