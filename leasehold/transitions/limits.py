"""Finds the concurrency limits of a new job, and lets operators declare and withdraw limits.

Limits count jobs of every kind that a tenant submits: runs, pictures, conversions, generations. The platform's own jobs
(webhook deliveries, cancels at a provider) have no limits, because they would wait behind the jobs that caused them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, lock_name
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.domain.json_digest import LENGTH, json_digest
from leasehold.domain.json_pointer import value_at
from leasehold.domain.pipeline import Pipeline, PipelineLimit
from leasehold.transitions import jobs
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.jobs import NewJob


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submitted job. After the commit, the caller must publish `hints` (messages that tell workers of due tasks), and
    call `concurrency.admit` with `limits`.
    """

    hints: Sequence[Announcement]
    limits: Sequence[ConcurrencyLimitName]


@dataclass(frozen=True, slots=True)
class TenantRules:
    """The rules for a tenant's new jobs. `limits`: the declared limits (rows of `gate`) of the tenant, and those of
    EVERYBODY, which apply to all tenants. `watched`: the tenant has a webhook.
    """

    limits: Sequence[Any]
    watched: bool


#: The key of a limit for one value of the payload ends with `=` and the value's digest (`payload:T:/pointer=3f2a...`).
#: This ending has _SUFFIX_LENGTH characters.
_SUFFIX_LENGTH = 1 + LENGTH

# $1 tenants, $2 EVERYBODY.
_TENANT_RULES = """
-- run_surroundings
SELECT tenant.id AS tenant_id,
       EXISTS (SELECT 1 FROM webhook w WHERE w.tenant_id = tenant.id AND w.enabled) AS watched,
       (SELECT coalesce(jsonb_agg(g), '[]')
        FROM (SELECT tenant_id, key, at_most, per_minute FROM gate
              WHERE declared AND tenant_id IN (tenant.id, $2)) AS g) AS limits
FROM unnest($1::text[]) AS tenant(id)
"""


async def tenant_rules(connection: Connection, tenants: Collection[str]) -> dict[str, TenantRules]:
    """The rules of each tenant."""
    rows = await connection.fetch(_TENANT_RULES, list(tenants), EVERYBODY)
    return {row["tenant_id"]: TenantRules(row["limits"], row["watched"]) for row in rows}


async def submit(connection: Connection, job: NewJob) -> Submitted:
    """Write a new job that is not a run. The job waits at its own limits, and at the declared limits that apply to it.
    Call this in a transaction.
    """
    rules = (await tenant_rules(connection, {job.tenant_id}))[job.tenant_id]
    limits = [*job.limits, *applicable_limits(rules.limits, job.tenant_id, job.pipeline, job.params)]
    notify = rules.watched and not job.pipeline.terms.unlimited  # `unlimited`: the platform's own work
    hints = await jobs.submit(connection, [replace(job, limits=limits, notify=notify)])
    return Submitted(hints, [(limit.tenant_id, limit.key) for limit in limits])


def applicable_limits(
    rows: Sequence[Any], tenant_id: str, pipeline: Pipeline, params: Mapping[str, Any]
) -> list[ConcurrencyLimit]:
    """The limits of a job of this pipeline with these parameters: the pipeline's own limits, and the declared limits
    among `rows` that apply to the job.

    A declared limit has the key `queue:Q`, `template:T`, `tenant`, or `payload:T:/pointer`. In these forms, Q is a
    queue and T a template. A limit of the last form counts the jobs separately for each value at the pointer.
    """
    own_limits = [_pipeline_limit(tenant_id, pipeline.name, limit, params) for limit in pipeline.limits]
    if not rows or pipeline.terms.unlimited:
        return own_limits
    # `plain_keys`: the keys without a pointer that apply to the job.
    plain_keys = {"tenant", f"template:{pipeline.name}", *(f"queue:{step.queue}" for step in pipeline.steps)}
    payload_prefix = f"payload:{pipeline.name}:"
    by_name: dict[ConcurrencyLimitName, ConcurrencyLimit] = {}
    # EVERYBODY's rows come first. So if the tenant has a row of its own with the key `tenant`, this row replaces
    # EVERYBODY's row in `by_name`.
    for row in sorted(rows, key=lambda row: row["tenant_id"] != EVERYBODY):
        key, owner = row["key"], row["tenant_id"]
        if key.startswith(payload_prefix):
            key = f"{key}={json_digest(value_at(params, key.removeprefix(payload_prefix)))}"
        elif key not in plain_keys:
            continue
        if key == "tenant":
            owner = tenant_id  # the limit of EVERYBODY counts each tenant separately
        # `declared_as`: the declared limit that gives this limit its bounds.
        by_name[owner, key] = ConcurrencyLimit(
            owner, key, row["at_most"], row["per_minute"], declared_as=(row["tenant_id"], row["key"])
        )
    return [*own_limits, *by_name.values()]


# A limit that the pipeline's code declares. If it has a pointer, it counts the jobs separately for each value there.
def _pipeline_limit(tenant_id: str, pipeline: str, limit: PipelineLimit, params: Mapping[str, Any]) -> ConcurrencyLimit:
    value = "" if limit.pointer is None else f":{limit.pointer}:={json_digest(value_at(params, limit.pointer))}"
    return ConcurrencyLimit(tenant_id, f"code:{pipeline}{value}", limit.at_most, limit.per_minute)


async def is_declared(connection: Connection, tenant_id: str, key: str) -> bool:
    return bool(
        await connection.fetchval(
            "SELECT true FROM gate WHERE tenant_id = $1 AND key = $2 AND declared", tenant_id, key
        )
    )


async def declare(
    connection: Connection, pipelines: Iterable[Pipeline], limit: ConcurrencyLimit
) -> list[ConcurrencyLimitName]:
    """Declare a limit, or change its bounds. A new limit applies to jobs that are submitted from now on. Changed bounds
    also apply immediately to jobs that wait at the limit already. Returns the limits that may have room now.

    Raises Invalid `limit_without_effect` for a key that no job can have.
    """
    await _check_effect(connection, pipelines, limit)
    async with connection.transaction():
        await _lock_changes(connection)
        await connection.execute(
            "INSERT INTO gate (tenant_id, key, at_most, per_minute, declared) VALUES ($1, $2, $3, $4, true)"
            " ON CONFLICT (tenant_id, key) DO UPDATE SET at_most = excluded.at_most, per_minute = excluded.per_minute,"
            " declared = true",
            limit.tenant_id,
            limit.key,
            limit.at_most,
            limit.per_minute,
        )
        return [(limit.tenant_id, limit.key), *await _follow(connection, limit)]


async def _lock_changes(connection: Connection) -> None:
    """Make other changes of declared limits wait until the caller's transaction ends. Otherwise a change of EVERYBODY's
    limit `tenant` would not reach a tenant's row whose own declaration is withdrawn at the same time.
    """
    await lock_name(connection, "declared limits")


# A follower is a row that nobody declared. It has the bounds of a declared limit, and counts the jobs of one tenant, or
# of one value of the payload. Two sorts of declared limits have followers: `tenant` of EVERYBODY, and `payload:...`.
# Jobs wait at the followers, and not at the declared limit. The follower's key for a value of the payload is the
# declared key and `=DIGEST`. To find the declared key, the statement cuts off a fixed length, because the declared key
# itself may contain `=`. $1 and $2: the tenant and the key of the declared limit. $3 and $4: its bounds.
_FOLLOW = f"""
-- limits_follow
UPDATE gate SET at_most = $3, per_minute = $4
FROM (SELECT tenant_id, key FROM gate
      WHERE NOT declared AND CASE WHEN $1 = '{EVERYBODY}' AND $2 = 'tenant' THEN key = 'tenant'
                                  ELSE tenant_id = $1 AND left(key, -{_SUFFIX_LENGTH}) = $2 END
      ORDER BY tenant_id COLLATE "C", key COLLATE "C" FOR NO KEY UPDATE) AS follower
WHERE gate.tenant_id = follower.tenant_id AND gate.key = follower.key
RETURNING gate.tenant_id, gate.key
"""


async def _follow(connection: Connection, limit: ConcurrencyLimit) -> list[ConcurrencyLimitName]:
    """Give the bounds of the declared limit to its followers. Returns their names."""
    rows = await connection.fetch(_FOLLOW, limit.tenant_id, limit.key, limit.at_most, limit.per_minute)
    return [(row["tenant_id"], row["key"]) for row in rows]


async def _check_effect(connection: Connection, pipelines: Iterable[Pipeline], limit: ConcurrencyLimit) -> None:
    """Raises Invalid `limit_without_effect` if no pipeline in code and no template can have jobs with this key."""
    kind, _, name = limit.key.partition(":")
    name = name.partition(":")[0]
    if kind == "tenant":
        return
    # `in_code`: the pipelines in code whose jobs may have the key. `in_template`: SQL, the same for templates.
    if kind == "queue":
        in_code = [pipeline for pipeline in pipelines if any(step.queue == name for step in pipeline.steps)]
        in_template = "declaration->'steps' @> jsonb_build_array(jsonb_build_object('queue', $2::text))"
        missing = f"No step of a pipeline or template has the queue {name}: write the template first."
    else:
        in_code = [pipeline for pipeline in pipelines if pipeline.name == name]
        in_template = "type = $2"
        missing = f"There is no template or pipeline {name}: write it first."
    if any(not pipeline.terms.unlimited for pipeline in in_code):
        return
    if await connection.fetchval(
        f"SELECT EXISTS (SELECT 1 FROM template WHERE ($1 = '{EVERYBODY}' OR tenant_id = $1) AND {in_template})",
        limit.tenant_id,
        name,
    ):
        return
    if in_code:
        missing = f"No limit applies to {name}, because it is the platform's own work."
    raise Invalid("limit_without_effect", missing)


# If a tenant's own limit `tenant` is withdrawn, its row stays, because jobs may wait at the limit. The row gets the
# bounds of EVERYBODY's limit `tenant`. If EVERYBODY has no such limit, the row gets NULL bounds, because `max` over no
# rows gives NULL. Any other row gets NULL bounds, too. NULL bounds hold no job back. $1 and $2: the tenant and the key
# of the limit.
_WITHDRAW = f"""
-- limits_withdraw
UPDATE gate SET declared = false, at_most = general.at_most, per_minute = general.per_minute
FROM (SELECT max(at_most) AS at_most, max(per_minute) AS per_minute FROM gate
      WHERE tenant_id = '{EVERYBODY}' AND key = 'tenant' AND declared
        AND $1 <> '{EVERYBODY}' AND $2 = 'tenant') AS general
WHERE gate.tenant_id = $1 AND gate.key = $2 AND gate.declared
RETURNING true
"""


async def withdraw(connection: Connection, tenant_id: str, key: str) -> list[ConcurrencyLimitName]:
    """Withdraw a declared limit. It does not hold back jobs any more, even those that wait at it already. Returns the
    limits that may have room now; if there is no such limit, an empty list.
    """
    async with connection.transaction():
        await _lock_changes(connection)
        if not await connection.fetchval(_WITHDRAW, tenant_id, key):
            return []
        without_bounds = ConcurrencyLimit(tenant_id, key)
        return [(tenant_id, key), *await _follow(connection, without_bounds)]
