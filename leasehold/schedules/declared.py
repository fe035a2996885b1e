"""Writes the schedules that the code of an app (a client's Python program) declares, and pauses those that the code no
longer declares. A worker calls `reconcile_apps` after its start.

Workers with different releases of the code may run at once. The worker that started last writes the schedules of its
code, and then leads the app's role (a row of the table `leadership`). When this worker ends, its release may be on its
way out of use. So another worker with the app's code then writes the schedules of its own code again
(`apps_to_take_over`), and leads the role.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from uuid import UUID

import structlog

from leasehold.db.clock import database_time
from leasehold.db.database import Connection, lock_name
from leasehold.domain import cron
from leasehold.domain.ids import new_id
from leasehold.domain.registry import DeclaredSchedule
from leasehold.telemetry.duties import counted
from leasehold.transitions import workers
from leasehold.transitions.quarantine import not_in, run_unit

log = structlog.get_logger(__name__)

#: The name of this duty (maintenance work of a worker) in the table `quarantine`. The table has the apps whose
#: schedules could not be written, until a worker tries them again.
DUTY = counted("declared_schedules")

#: The worker that wrote the schedules of an app leads the app's role for this many seconds. Each call of
#: `apps_to_take_over` begins this time again. An outage of some minutes must not give the schedules to an older
#: release, because that release would pause the schedules that only the newer release declares.
_LEADS_FOR_SECONDS = 600.0

#: The reason for pausing a schedule that the code no longer declares. When the code declares it again, the schedule is
#: enabled again. Exception: a schedule that was paused for another reason, for example by a person, stays paused.
UNDECLARED = "the code does not declare it any more"

# $10: the schedule's next tick, the time at which it fires. If an enabled schedule keeps its cron and its time zone, it
# also keeps its next tick, which may be due already. A schedule that stays paused has no next tick. A buffered tick (a
# tick that waits for the end of the previous run) stays only if the overlap policy is still `buffer_one`.
_WRITE = f"""
-- schedule_declare
INSERT INTO schedule AS s (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id, priority,
                           overlap, catch_up, catch_up_seconds, next_run_at, declared_by)
VALUES ($1, $2, $3, $4, $5, $6, 'tenant', '', 1, $7, $8, $9, $10, $11)
ON CONFLICT (tenant_id, declared_by, template) WHERE declared_by IS NOT NULL DO UPDATE
SET cron = excluded.cron, timezone = excluded.timezone, payload_template = excluded.payload_template,
    overlap = excluded.overlap, catch_up = excluded.catch_up, catch_up_seconds = excluded.catch_up_seconds,
    buffered_at = CASE WHEN excluded.overlap = 'buffer_one' THEN s.buffered_at END,
    enabled = s.enabled OR s.paused_because = '{UNDECLARED}',
    next_run_at = CASE WHEN NOT s.enabled AND s.paused_because IS DISTINCT FROM '{UNDECLARED}' THEN NULL
                       WHEN s.enabled AND (s.cron, s.timezone) = (excluded.cron, excluded.timezone) THEN s.next_run_at
                       ELSE excluded.next_run_at END,
    paused_because = CASE WHEN s.paused_because = '{UNDECLARED}' THEN NULL ELSE s.paused_because END,
    updated_at = CASE WHEN (s.cron, s.timezone) = (excluded.cron, excluded.timezone) THEN s.updated_at
                      ELSE clock_timestamp() END
"""

# Pauses the enabled schedules of the app $2 whose templates are not among $3. $1: the tenant. $3: the templates of the
# schedules that the app's code declares.
_PAUSE_OTHERS = f"""
-- schedules_undeclared
UPDATE schedule SET enabled = false, next_run_at = NULL, buffered_at = NULL, paused_because = '{UNDECLARED}',
    updated_at = clock_timestamp()
WHERE tenant_id = $1 AND declared_by = $2 AND NOT (template = ANY($3::text[])) AND enabled
RETURNING template
"""


# The apps among $1 that are not in quarantine.
_TRY_NOW = f"""
-- schedule_apps
SELECT app FROM unnest($1::text[]) AS app WHERE {not_in(DUTY, "app", "text")}
"""


async def apps_to_take_over(connection: Connection, tenant_id: str, apps: Collection[str], writer: UUID) -> list[str]:
    """Keep the worker `writer` the writer of those of the `apps` whose schedules it wrote last. Returns the apps whose
    writer has ended, drains, or has not called this for ten minutes. Give these apps to `reconcile_apps` with
    `only_without_writer`. A worker that drains does not call this.
    """
    without_writer = []
    for app in apps:
        role = _role(tenant_id, app)
        if not await workers.keep_lead(connection, role, writer, _LEADS_FOR_SECONDS) and not await workers.has_leader(
            connection, role
        ):
            without_writer.append(app)
    return without_writer


def _role(tenant_id: str, app: str) -> str:
    return f"{_role_prefix(tenant_id)}{app}"


def _role_prefix(tenant_id: str) -> str:
    return f"schedules of {tenant_id} "  # a tenant's name has no space


# The apps that have a writer (a worker that leads the app's role and does not drain). $1: the text with which the roles
# of all apps of the tenant begin.
_WRITTEN_APPS = """
-- schedule_writers
SELECT substr(l.role, length($1) + 1) AS app, l.until FROM leadership l
WHERE starts_with(l.role, $1) AND l.until >= clock_timestamp()
  AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = l.owner AND w.draining)
ORDER BY 1
"""


async def apps_with_writer(connection: Connection, tenant_id: str) -> dict[str, datetime]:
    """The apps whose schedules a worker of this installation writes for the tenant. Returns, for each app, the time
    until which this worker counts as the app's writer, even if the worker is dead.
    """
    rows = await connection.fetch(_WRITTEN_APPS, _role_prefix(tenant_id))
    return {row["app"]: row["until"] for row in rows}


async def reconcile_apps(
    connection: Connection,
    tenant_id: str,
    declared_by_app: Mapping[str, Sequence[DeclaredSchedule]],
    writer: UUID | None = None,
    *,
    only_without_writer: bool = False,
) -> list[str]:
    """Call `reconcile` for each app that is not in quarantine. Returns the apps whose schedules were written. If the
    schedules of one app cannot be written, all other schedules of the installation still fire. `only_without_writer`:
    leave out the apps that have a writer by now.
    """
    done = []
    for row in await connection.fetch(_TRY_NOW, list(declared_by_app)):
        app: str = row["app"]
        write = partial(
            reconcile, connection, tenant_id, app, declared_by_app[app], writer, only_without_writer=only_without_writer
        )
        # The result is None if nothing was written. If an error was the reason, the app is in quarantine now.
        if await run_unit(connection, DUTY, app, write) is not None:
            done.append(app)
    return done


async def reconcile(
    connection: Connection,
    tenant_id: str,
    app: str,
    declared: Sequence[DeclaredSchedule],
    writer: UUID | None = None,
    *,
    only_without_writer: bool = False,
) -> list[str] | None:
    """Write the schedules that the app's code declares, and pause the app's other schedules. Returns the templates of
    the schedules that were paused. `writer`: the worker that writes, and from now on leads the app's role.
    `only_without_writer`: write nothing, and return None, if the app has a writer by now.

    If several workers start at once, a lock makes them write one after another, with the same outcome if their code is
    the same.
    """
    async with connection.transaction():
        await lock_name(connection, _role(tenant_id, app))
        if only_without_writer and await workers.has_leader(connection, _role(tenant_id, app)):
            return None
        now = await database_time(connection)
        for schedule in declared:
            next_tick = cron.next_after(schedule.cron, schedule.timezone, now)
            await connection.execute(
                _WRITE, new_id(), tenant_id, schedule.template, schedule.cron, schedule.timezone,
                dict(schedule.payload), schedule.overlap, schedule.catch_up, schedule.catch_up_seconds, next_tick, app,
            )  # fmt: skip
        rows = await connection.fetch(_PAUSE_OTHERS, tenant_id, app, [schedule.template for schedule in declared])
        if writer is not None:
            await workers.take_lead(connection, _role(tenant_id, app), writer, _LEADS_FOR_SECONDS)
    paused_templates = [row["template"] for row in rows]
    if paused_templates:
        log.warning("schedules are paused", app=app, templates=paused_templates, reason=UNDECLARED)
    return paused_templates
