"""Submits the runs of schedules. A tick is a time at which a schedule is due by its cron expression. Each worker's
maintenance calls `fire_due`. The API calls `submit_now` to backfill (to submit the runs of past ticks), and to run a
schedule now.

Several workers may fire at once, and each may die at any time. So the row of a schedule is locked while it fires. The
runs and the next tick of a schedule commit together. No two runs have the same schedule and tick.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache, partial
from time import monotonic
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import structlog

from leasehold.db.database import Connection, unindexed
from leasehold.domain import cron
from leasehold.domain.errors import Invalid, RequestError, TooMany, Unavailable
from leasehold.evaluation.templates import Templates, TemplateVersion, template_not_found
from leasehold.limits.admission import Admission, Payer, queues_of
from leasehold.telemetry.duties import SCHEDULES_PAUSED, counted
from leasehold.transitions import jobs, runs
from leasehold.transitions.concurrency import ConcurrencyLimitName, limits_of
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.quarantine import STUCK_AFTER, error_record, not_in, run_unit
from leasehold.transitions.runs import CreatedRun, NewRun

log = structlog.get_logger(__name__)

#: A tick older than this is a missed tick. The schedule's catch-up policy decides whether a missed tick becomes a run.
ON_TIME = timedelta(seconds=60)
#: The smallest difference between two instants.
_INSTANT = timedelta(microseconds=1)
#: One backfill submits at most this many ticks. One firing submits the schedule's next tick, and at most this many
#: later ticks.
MAX_TICKS = 100
#: After this many runs, or after this many seconds, one call of `fire_due` fires no further due schedule. The next call
#: searches again, so that a tick that has become due meanwhile comes before the missed ticks of other schedules.
_RUNS_AT_ONCE, _SECONDS_AT_ONCE = 100, 5.0
#: There are two groups of due schedules: with missed ticks to catch up (a backlog), and without. Each call of
#: `fire_due` reads at most this many schedules of each group, those that are due for longest. Among these the tenants
#: take turns. The number is bounded, because a call reads all of them, even if it fires only a hundred. It is many
#: times the number of schedules that a tenant may have by default.
_MAX_IN_TURN = 10_000

#: A schedule that pauses after failed runs (`pause_after_failures`) must be able to count them. For this purpose a run
#: is kept at most this long. The setting `retention_days` has the same maximum.
_LONGEST_COUNT = timedelta(days=3650)

#: Either a template with the parameters for the schedule's runs, or an error because of which it can have no run.
Prepared: TypeAlias = tuple[TemplateVersion, dict[str, Any]] | RequestError

#: The name of this duty (a maintenance loop) in the table `quarantine`. If a schedule could not be fired, a row of this
#: table sets it aside until its next try. The condition `not_in` leaves such schedules out.
DUTY = counted("schedules")

# SQL: the pipeline of the handler `h.name`. A handler is the code of a step, named `pipeline.step`.
_PIPELINE = "regexp_replace(h.name, '\\.[^.]*$', '')"

# SQL: the pipelines for which some worker has the code, and does not drain.
_SERVED = f"""(
    SELECT DISTINCT {_PIPELINE} FROM worker w CROSS JOIN unnest(w.handlers) AS h(name) WHERE NOT w.draining)"""

# SQL condition: there is a worker that may have any code, because its row names no handlers.
_ANY_MAY_BE_SERVED = "EXISTS (SELECT 1 FROM worker w WHERE w.handlers IS NULL AND NOT w.draining)"

#: SQL condition: a worker has the code of the template of the schedule `s`, or may have it.
MAY_BE_SERVED = f"(s.template IN {_SERVED} OR {_ANY_MAY_BE_SERVED})"

# SQL: the pipelines whose code a worker has, or had in the last months (`known_handler`).
_KNOWN = f"""(
    SELECT {_PIPELINE}
    FROM (SELECT unnest(w.handlers) FROM worker w UNION ALL SELECT k.name FROM known_handler k) AS h(name))"""

# SQL condition: another worker may have the code of the template of the schedule `s`, now or after a restart. The
# condition has three parts. It is true while a worker has this code. Otherwise it is false if the tenant wrote a
# template of this name, because then any worker may fire the schedule. Otherwise it is true if a worker had this code
# in the last months, or if the row of a worker names no handlers, so that it may have any code.
_MAY_BE_ELSEWHERE = f"""(s.template IN {_SERVED} OR (
    NOT EXISTS (SELECT 1 FROM template t WHERE t.tenant_id = s.tenant_id AND t.type = s.template)
    AND (EXISTS (SELECT 1 FROM worker w WHERE w.handlers IS NULL) OR s.template IN {_KNOWN})))"""

#: SQL condition: this process may fire the schedule `s`. It may do so if it has the code of the schedule's template
#: ($2: the pipelines of this process), or if no other worker can have that code. In the second case, a tenant wrote the
#: template, or the template does not exist. Exception: a schedule that an app declares waits for a process with the
#: app's code.
_CAN_FIRE = f"(s.template = ANY($2::text[]) OR (s.declared_by IS NULL AND NOT {_MAY_BE_ELSEWHERE}))"


def _has_backlog(on_time: str) -> str:
    """SQL condition: the schedule `s` may have many missed ticks to submit. Such schedules come last, because their
    ticks may come late. The tick of any other schedule must not wait, because it could become a missed tick, and be
    dropped. `on_time`: the SQL of ON_TIME.
    """
    return f"(s.catch_up = 'all' AND s.next_run_at < statement_timestamp() - {on_time})"


_HAS_BACKLOG = _has_backlog("$3::interval")
_ON_TIME = f"interval '{ON_TIME.total_seconds():.0f} seconds'"

#: SQL condition: the schedule `s` has missed ticks to submit, and its newest run is no older than ON_TIME. So workers
#: are catching the schedule up, even if its due tick is old.
IS_CATCHING_UP = f"""({_has_backlog(_ON_TIME)} AND EXISTS (
    SELECT FROM (SELECT j.created_at FROM run r JOIN job j ON j.id = r.job_id
                 WHERE r.schedule_id = s.id ORDER BY r.job_id DESC LIMIT 1) AS newest
    WHERE newest.created_at > statement_timestamp() - {_ON_TIME}))"""


def _oldest_due(condition: str) -> str:
    """SQL: the due schedules `s` with this condition that are due for longest, at most _MAX_IN_TURN."""
    return f"""(
    SELECT s.id, s.tenant_id, s.next_run_at, {_HAS_BACKLOG} AS has_backlog FROM schedule s
    WHERE s.next_run_at <= statement_timestamp() AND {condition} AND {not_in(DUTY, "s.id")} AND {_CAN_FIRE}
    ORDER BY s.next_run_at LIMIT {_MAX_IN_TURN})"""


# $1: at most this many schedules are found. $2: the pipelines of this process. $3: ON_TIME. `turn`: the schedule's
# number among the due schedules of its tenant. In this order the tenants take turns, so that no tenant's schedules keep
# the ticks of another tenant waiting.
_FIND_DUE = f"""
-- schedules_due
SELECT id FROM (
    SELECT due.*, row_number() OVER (PARTITION BY tenant_id, has_backlog ORDER BY next_run_at) AS turn
    FROM ({_oldest_due(f"NOT {_HAS_BACKLOG}")} UNION ALL {_oldest_due(_HAS_BACKLOG)}) AS due) AS in_turn
ORDER BY has_backlog, turn, next_run_at LIMIT $1
"""

# Writes the error $3 (the template is not found) into the `last_error` of schedules that no app declares, if their tick
# has waited for $4 and no worker has the template's code. $1: at most this many schedules are changed. $2: the
# pipelines of this process. The tick stays due, so that a worker that gets the code fires the schedule.
_RECORD_WAITING = f"""
-- schedules_without_code
UPDATE schedule SET last_error = $3::jsonb || jsonb_build_object('tick', next_run_at)
WHERE id IN (
    SELECT s.id FROM schedule s
    WHERE s.next_run_at < statement_timestamp() - $4::interval AND s.declared_by IS NULL
      AND s.last_error IS DISTINCT FROM $3::jsonb || jsonb_build_object('tick', s.next_run_at)
      AND s.template <> ALL($2::text[]) AND NOT {MAY_BE_SERVED} AND {_MAY_BE_ELSEWHERE}
    ORDER BY s.next_run_at LIMIT $1 FOR UPDATE SKIP LOCKED)
"""

_LOCK_DUE = """
-- schedules_lock_due
SELECT *, clock_timestamp() AS now FROM schedule
WHERE id = $1 AND next_run_at <= statement_timestamp() FOR UPDATE SKIP LOCKED
"""

# SQL: no run of the schedule `s` is unfinished. Because of `unindexed`, PostgreSQL finds the jobs by their ids, and
# does not read the index of unfinished jobs.
_IS_FREE = f"""NOT EXISTS (SELECT 1 FROM run r JOIN job j ON j.id = r.job_id
                  WHERE r.schedule_id = s.id AND {unindexed("j.finished_at IS NULL")})"""

# Finds the schedules that have a buffered tick (overlap policy `buffer_one`) and no unfinished run.
_FIND_BUFFERED = f"""
-- schedules_buffered
SELECT s.id FROM schedule s
WHERE s.buffered_at IS NOT NULL AND {not_in(DUTY, "s.id")} AND {_CAN_FIRE} AND {_IS_FREE}
LIMIT $1
"""

_LOCK_BUFFERED = f"""
-- schedules_lock_buffered
SELECT s.*, clock_timestamp() AS now FROM schedule s
WHERE s.id = $1 AND s.buffered_at IS NOT NULL AND {_IS_FREE}
FOR UPDATE SKIP LOCKED
"""

_PAUSE = """
-- schedule_pause
UPDATE schedule SET enabled = false, next_run_at = NULL, buffered_at = NULL, paused_because = $2,
    updated_at = clock_timestamp()
WHERE id = $1
"""

# $1: the schedule. $2: the error. $3: whether the refusal counts in `failures`. An error of the firing itself counts,
# and so does a run that is refused as Invalid. Other refusals do not count, because they may end without a change of
# the schedule. $4: `failures` before this firing. One firing adds at most 1 for all its ticks, because they are refused
# for the same reason. If $4 is NULL, the statement adds 1 whenever $3 is true.
_RECORD_REFUSAL = """
-- schedule_refused
UPDATE schedule SET last_error = $2,
    failures = CASE WHEN $3 AND failures <= coalesce($4, failures) THEN failures + 1 ELSE failures END
WHERE id = $1 RETURNING failures
"""

# $1: the schedule. $2: the run's tick (NULL: a client started the run now). `last_run_at`: the newest tick with a run,
# or the time at which a client started a run of the schedule.
_RECORD_SUBMISSION = """
-- schedule_made
UPDATE schedule SET last_error = NULL, failures = 0,
    last_run_at = greatest(last_run_at, coalesce($2::timestamptz, clock_timestamp()))
WHERE id = $1
"""


async def fire_due(
    connection: Connection,
    templates: Templates,
    keep_seconds: int,
    limit: int = 100,
    pause_after: int = STUCK_AFTER,
    admission: Admission | None = None,
) -> tuple[list[CreatedRun], bool]:
    """Submit the runs of due schedules, each schedule in a transaction of its own. Returns the runs, and whether more
    schedules may be due. If so, call this again soon, because a tick that waits for longer than ON_TIME is missed.
    After this function returns, publish the hints (messages that tell workers of new tasks) of each `CreatedRun`.

    `keep_seconds`: how long a run is kept after its end. `limit`: at most this many schedules with a due tick are
    fired, and at most this many with a buffered tick. The schedules with missed ticks to catch up (policy `all`) come
    last, and the tenants take turns.

    If a schedule cannot be fired, its `last_error` has the reason, and the firing is tried again after growing pauses.
    After `pause_after` such failures in a row, the schedule is paused. `admission` charges each run to the tenant;
    None: nothing is charged. If `admission` refuses a tick, the tick stays due, and a later call tries it again. Such
    refusals never pause the schedule. When the tick is older than ON_TIME, it counts as a missed tick.

    If this process lacks the code of a schedule's template, and other workers have or had this code, the tick stays due
    for them. If no worker has the code now, the schedule's `last_error` says so when the tick is older than ON_TIME.
    Exception: while a worker runs whose row names no handlers, nothing is written, because that worker may have the
    code.
    """
    fired: set[UUID] = set()  # the schedules that this call has locked; another worker may fire the others

    async def fire_ticks(schedule_id: UUID, checked: _Checked | None) -> list[CreatedRun] | _ToCheck:
        schedule = await connection.fetchrow(_LOCK_DUE, schedule_id)
        if schedule is None:
            return []
        fired.add(schedule_id)
        return await _fire(connection, templates, schedule, keep_seconds, pause_after, admission, checked)

    async def fire_buffered(schedule_id: UUID, checked: _Checked | None) -> list[CreatedRun] | _ToCheck:
        schedule = await connection.fetchrow(_LOCK_BUFFERED, schedule_id)
        if schedule is None:
            return []
        fired.add(schedule_id)
        prepared = await _prepare(connection, templates, schedule, checked)
        if isinstance(prepared, _ToCheck):
            return prepared
        await connection.execute("UPDATE schedule SET buffered_at = NULL WHERE id = $1", schedule["id"])
        return await _submit_by_overlap(
            connection, prepared, schedule, schedule["buffered_at"], keep_seconds, admission
        )

    created_runs: list[CreatedRun] = []
    # Whether there may be due schedules that this call does not fire.
    is_full = False
    own_pipelines = [pipeline.name for pipeline in templates.pipelines]
    for statement, fire, values in ((_FIND_DUE, fire_ticks, (ON_TIME,)), (_FIND_BUFFERED, fire_buffered, ())):
        rows = await connection.fetch(statement, limit, own_pipelines, *values)
        is_full = is_full or len(rows) == limit
        runs_at_most, ends_at = len(created_runs) + _RUNS_AT_ONCE, monotonic() + _SECONDS_AT_ONCE
        for number, row in enumerate(rows):
            if number > 0 and (len(created_runs) >= runs_at_most or monotonic() > ends_at):
                is_full = True
                break
            schedule_id = row["id"]
            on_failure = partial(_record_failure, connection, schedule_id, pause_after)
            outcome = await _run_checked(connection, templates, schedule_id, partial(fire, schedule_id), on_failure)
            # The outcome is a _ToCheck if the schedule or its template was changed during the check. It is None if the
            # firing failed, and then the schedule is in quarantine now.
            is_full = is_full or isinstance(outcome, _ToCheck)
            created_runs += [] if outcome is None or isinstance(outcome, _ToCheck) else outcome
    await connection.execute(_RECORD_WAITING, limit, own_pipelines, error_record(template_not_found()), ON_TIME)
    # If `fired` is empty, other workers fire the schedules that were found, or have just fired them. Those workers find
    # the rest.
    return created_runs, is_full and bool(fired)


async def _run_checked(
    connection: Connection,
    templates: Templates,
    schedule_id: UUID,
    fire: Callable[[_Checked | None], Awaitable[list[CreatedRun] | _ToCheck]],
    on_failure: Callable[[Exception, int], Awaitable[None]],
) -> list[CreatedRun] | _ToCheck | None:
    """Run `fire` as a unit of this duty, in a transaction. If `fire` returns a _ToCheck, check the payload after this
    transaction, and run `fire` again, with the outcome of the check. Returns the result of the last call; None: the
    last call failed.
    """
    result = await run_unit(connection, DUTY, schedule_id, partial(fire, None), on_failure)
    if isinstance(result, _ToCheck):
        checked = await result.check(templates)
        result = await run_unit(connection, DUTY, schedule_id, partial(fire, checked), on_failure)
    return result


async def _record_failure(
    connection: Connection, schedule_id: UUID, pause_after: int, error: Exception, failures: int
) -> None:
    """Record why the schedule could not be fired. If the schedule itself is at fault, pause it after `pause_after`
    failures. There are two counts of failures, and the smaller count decides. The parameter `failures`: how many
    firings in a row have raised an error, including refusals by `admission`. The column `failures` of the schedule:
    only errors for which the schedule is at fault, and runs that were refused as Invalid.
    """
    is_at_fault = not isinstance(error, (TooMany, Unavailable))
    own_failures = await connection.fetchval(_RECORD_REFUSAL, schedule_id, error_record(error), is_at_fault, None)
    if own_failures is None:  # the schedule was deleted meanwhile
        return
    failures = min(failures, own_failures)
    if is_at_fault and failures >= pause_after:
        await _pause(connection, schedule_id, f"it could not be fired {failures} times in a row", "broken")


async def _pause(connection: Connection, schedule_id: UUID, reason: str, label: str) -> None:
    """Pause the schedule. `reason`: a text for its owner. `label`: the reason as the metric names it."""
    await connection.execute(_PAUSE, schedule_id, reason)
    SCHEDULES_PAUSED.labels(label).inc()
    log.warning("schedule paused", schedule_id=str(schedule_id), reason=reason)


async def _fire(
    connection: Connection,
    templates: Templates,
    schedule: Any,
    keep_seconds: int,
    pause_after: int,
    admission: Admission | None,
    checked: _Checked | None,
) -> list[CreatedRun] | _ToCheck:
    """Submit the runs of the due ticks of one schedule, and set its next tick. If its last runs have failed too often,
    pause the schedule instead. Returns a _ToCheck, and writes nothing, if the payload must be checked first.
    """
    if await _failed_too_often(connection, schedule):
        await _pause(
            connection, schedule["id"], f"the last {schedule['pause_after_failures']} runs failed", "runs_failed"
        )
        return []
    ticks, has_more = _ticks_to_run(schedule)
    created_runs: list[CreatedRun] = []
    refused_tick: datetime | None = None
    if ticks:
        prepared = await _prepare(connection, templates, schedule, checked)
        if isinstance(prepared, _ToCheck):
            return prepared
        created_runs, refused_tick = await _submit_ticks(connection, prepared, schedule, ticks, keep_seconds, admission)
    # If more ticks are due, the next firing begins with the first tick that this firing left.
    continue_after = ticks[-1] if has_more else schedule["now"]
    next_run_at = refused_tick or cron.next_after(schedule["cron"], schedule["timezone"], continue_after)
    failures = await connection.fetchval(
        "UPDATE schedule SET next_run_at = $2 WHERE id = $1 RETURNING failures", schedule["id"], next_run_at
    )
    # `_record_refusal` has raised `failures` if this firing refused a run as Invalid.
    if failures >= pause_after:
        await _pause(connection, schedule["id"], f"{failures} firings in a row were refused", "refused")
    return created_runs


async def _submit_ticks(
    connection: Connection,
    prepared: Prepared,
    schedule: Any,
    ticks: Sequence[datetime],
    keep_seconds: int,
    admission: Admission | None,
) -> tuple[list[CreatedRun], datetime | None]:
    """Submit the runs of these ticks, until `admission` refuses a run. Returns the submitted runs, and the tick of the
    refused run, with which the next firing begins; None: no run was refused. Raises TooMany if `admission` refuses a
    run before any run was submitted.
    """
    created_runs: list[CreatedRun] = []
    # An error in `prepared` refuses every tick in the same way, so record it only once.
    for tick in ticks[-1:] if isinstance(prepared, RequestError) else ticks:
        try:
            async with connection.transaction():  # a savepoint, so that a refused tick undoes no other tick
                created_runs += await _submit_by_overlap(connection, prepared, schedule, tick, keep_seconds, admission)
        except TooMany:
            if not created_runs:
                raise
            return created_runs, tick
    return created_runs, None


async def _failed_too_often(connection: Connection, schedule: Any) -> bool:
    """Whether the last `pause_after_failures` ended runs of the schedule have all failed. Only runs since the
    schedule's last change count.
    """
    bound = schedule["pause_after_failures"]
    if bound is None:
        return False
    states = await connection.fetch(
        "SELECT j.status FROM run r JOIN job j ON j.id = r.job_id"
        " WHERE r.schedule_id = $1 AND j.finished_at IS NOT NULL AND j.created_at > $3 ORDER BY r.job_id DESC LIMIT $2",
        schedule["id"],
        bound,
        schedule["updated_at"],
    )
    return len(states) == bound and all(state["status"] in ("failed", "expired") for state in states)


def _ticks_to_run(schedule: Any) -> tuple[list[datetime], bool]:
    """The due ticks of one firing that become runs: the ticks on time, and the missed ticks that the catch-up policy
    allows. `skip` allows none. `one` allows the latest missed tick, and only if no tick is on time. `all` allows every
    missed tick. But no policy allows a missed tick that is older than `catch_up_seconds`. All other due ticks become no
    runs, and cost nothing, however many they are. The second value: whether further due ticks become runs, which the
    next firing submits.
    """
    now, expression, timezone = schedule["now"], schedule["cron"], schedule["timezone"]
    first_tick, window = schedule["next_run_at"], timedelta(seconds=schedule["catch_up_seconds"])
    # The oldest tick that may become a run: with the policy `all`, the oldest missed tick that may still be caught up.
    oldest = now - (max(window, ON_TIME) if schedule["catch_up"] == "all" else ON_TIME)
    ticks = [first_tick] if first_tick >= oldest else []
    # `between` leaves out the instant after which it searches. One tick more than a firing submits shows whether
    # further ticks are due.
    ticks += cron.between(expression, timezone, max(first_tick, oldest - _INSTANT), now, MAX_TICKS + 2)
    if schedule["catch_up"] == "one" and not ticks:
        latest_tick = cron.latest(expression, timezone, first_tick, now) or first_tick
        ticks = [latest_tick] if latest_tick >= now - window else []
    return ticks[: MAX_TICKS + 1], len(ticks) > MAX_TICKS + 1


async def _submit_by_overlap(
    connection: Connection,
    prepared: Prepared,
    schedule: Any,
    tick: datetime,
    keep_seconds: int,
    admission: Admission | None,
) -> list[CreatedRun]:
    """Submit the run of one tick, if the overlap policy allows the run. The policy only matters while an older run of
    the schedule is unfinished. In this case `skip` drops the tick. `buffer_one` keeps the first such tick for later,
    and drops the others. `cancel_other` cancels the older runs, except if the new run is refused. `allow_all` submits
    the run.

    Raises TooMany and Unavailable. The caller must then roll back.
    """
    if isinstance(prepared, RequestError):
        await _record_refusal(connection, schedule, tick, prepared)
        return []
    unfinished = [] if schedule["overlap"] == "allow_all" else await _unfinished_runs(connection, schedule["id"])
    if unfinished and schedule["overlap"] in ("skip", "buffer_one"):
        if schedule["overlap"] == "buffer_one":
            await connection.execute(
                "UPDATE schedule SET buffered_at = coalesce(buffered_at, $2) WHERE id = $1", schedule["id"], tick
            )
        return []
    to_cancel = unfinished if schedule["overlap"] == "cancel_other" else []
    if to_cancel and not await without_run(connection, schedule["id"], [tick]):
        return []  # a backfill has submitted this tick already, and its run may be among `unfinished`
    try:
        async with connection.transaction():  # a savepoint, so that the older runs go on if the new run is refused
            if to_cancel and admission is not None:
                # Lock the rates before the jobs, as every submission does. A charge of 0 locks the rates and charges
                # nothing.
                await admission.charge(connection, Payer(schedule["tenant_id"]), 0)
            if to_cancel:
                await runs.lock_limits(connection, _new_run(prepared, schedule, tick, keep_seconds))
            limit_names, ended = await _cancel(connection, schedule, to_cancel)
            created = await _submit_charged(connection, prepared, schedule, tick, keep_seconds, admission)
    except (TooMany, Unavailable):  # these are RequestErrors, too, but after them the tick must stay due
        raise
    except RequestError as error:
        await _record_refusal(connection, schedule, tick, error)
        return []
    if created is None:
        return []
    return [
        replace(
            created,
            limits=[*created.limits, *limit_names],
            departed=[*created.departed, *to_cancel],  # if they have ended, their limits have room again
            ended=[*created.ended, *ended],
        )
    ]


async def _cancel(
    connection: Connection, schedule: Any, run_ids: Sequence[UUID]
) -> tuple[Sequence[ConcurrencyLimitName], Sequence[JobEnded]]:
    """Cancel these runs of the schedule, even runs that clients may not cancel (`forced`). Returns their concurrency
    limits, and the runs that have ended immediately.
    """
    if not run_ids:
        return [], []
    limit_names = await limits_of(connection, run_ids)
    # `by`: the history names the overlap policy as the canceller.
    cancellation = await jobs.request_cancel(
        connection, run_ids, schedule["tenant_id"], reason="the schedule fired again", by="cancel_other", forced=True
    )
    return limit_names, cancellation.ended


async def _submit_charged(
    connection: Connection,
    prepared: tuple[TemplateVersion, dict[str, Any]],
    schedule: Any,
    tick: datetime,
    keep_seconds: int,
    admission: Admission | None,
) -> CreatedRun | None:
    """Submit the run and charge the tenant. Returns None if the tick has its run already. Raises RequestError."""
    if admission is None:
        return await _submit(connection, prepared, schedule, tick, keep_seconds)
    payer = Payer(schedule["tenant_id"])
    template_version, params = prepared
    queues = queues_of(schedule["tenant_id"], template_version.pipeline, params=params)
    async with admission.submitting(connection, payer, queues):
        created = await _submit(connection, prepared, schedule, tick, keep_seconds)
        if created is None:
            await admission.refund(connection, payer)
    return created


async def _unfinished_runs(connection: Connection, schedule_id: UUID) -> list[UUID]:
    rows = await connection.fetch(
        "SELECT r.job_id FROM run r JOIN job j ON j.id = r.job_id"
        f" WHERE r.schedule_id = $1 AND {unindexed('j.finished_at IS NULL')}",
        schedule_id,
    )
    return [row["job_id"] for row in rows]


@dataclass(frozen=True, slots=True)
class _ToCheck:
    """A schedule whose payload must be checked against a version of its template before the schedule can fire."""

    schedule: Any
    template_version: TemplateVersion

    async def check(self, templates: Templates) -> _Checked:
        """Check the payload. The check may take as long as the evaluator's limits allow."""
        try:
            params = await templates.params(
                self.schedule["tenant_id"], self.template_version, self.schedule["payload_template"]
            )
            return _Checked(self, params)
        except Exception as error:  # noqa: BLE001 - of any kind: the firing raises it, and its schedule is set aside
            return _Checked(self, error)

    def is_same(self, other: _ToCheck) -> bool:
        """Whether both have the same payload (the schedule was not changed) and the same version of the template. The
        content of a version never changes.
        """
        template, other_template = self.template_version.template, other.template_version.template
        is_unchanged: bool = self.schedule["updated_at"] == other.schedule["updated_at"]
        return is_unchanged and (template.type, template.version) == (other_template.type, other_template.version)


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of the check `of`. `outcome`: the parameters of the schedule's runs, or the error of the check."""

    of: _ToCheck
    outcome: dict[str, Any] | Exception

    def params(self) -> dict[str, Any]:
        """The parameters. Raises the error of the check."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def _prepare(
    connection: Connection, templates: Templates, schedule: Any, checked: _Checked | None
) -> Prepared | _ToCheck:
    """The template and the parameters of the schedule's runs, or an error because of which the schedule can have no
    run.

    Returns a _ToCheck if the evaluator must check the payload, and `checked` is None or about another payload or
    template. Then call `check` of the _ToCheck after the transaction has ended, because a firing must not lock the
    schedule while it waits for the evaluator. Raises TooMany and Unavailable when the payload could not be checked. The
    tick then stays due.
    """
    try:
        template_version = await templates.find_schedulable(
            connection, schedule["tenant_id"], schedule["template"], schedule["version"]
        )
        to_check = _ToCheck(schedule, template_version)
        if templates.asks_evaluator(template_version):
            if checked is None or not checked.of.is_same(to_check):
                return to_check
        else:
            checked = await to_check.check(templates)
        return template_version, checked.params()
    except (TooMany, Unavailable):
        raise
    except RequestError as error:
        return error


async def without_run(connection: Connection, schedule_id: UUID, ticks: Sequence[datetime]) -> list[datetime]:
    """The ticks among `ticks` for which the schedule has no run yet."""
    rows = await connection.fetch(
        "SELECT tick FROM run WHERE schedule_id = $1 AND tick = ANY($2::timestamptz[])", schedule_id, list(ticks)
    )
    with_run = {row["tick"] for row in rows}
    return [tick for tick in ticks if tick not in with_run]


async def submit_now(
    connection: Connection, prepared: Prepared, schedule: Any, tick: datetime | None, keep_seconds: int
) -> CreatedRun | None:
    """Submit a run of the schedule now, for `tick` or for no tick. Returns None if the tick has its run already, or if
    the run was refused. After a refusal, the schedule's `last_error` has the reason.
    """
    try:
        if isinstance(prepared, RequestError):
            raise prepared
        return await _submit(connection, prepared, schedule, tick, keep_seconds)
    except RequestError as error:
        await _record_refusal(connection, schedule, tick, error)
        return None


async def _submit(
    connection: Connection,
    prepared: tuple[TemplateVersion, dict[str, Any]],
    schedule: Any,
    tick: datetime | None,
    keep_seconds: int,
) -> CreatedRun | None:
    """Submit the run. Returns None if the tick has its run already. Raises RequestError."""
    try:
        async with connection.transaction():
            created = await runs.create(connection, _new_run(prepared, schedule, tick, keep_seconds))
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != "run_of_tick":
            raise
        return None
    await connection.execute(_RECORD_SUBMISSION, schedule["id"], tick)
    return created


def _new_run(
    prepared: tuple[TemplateVersion, dict[str, Any]], schedule: Any, tick: datetime | None, keep_seconds: int
) -> NewRun:
    template_version, params = prepared
    pause_after_failures = schedule["pause_after_failures"]
    if pause_after_failures is not None:  # `_failed_too_often` must still find the run
        keep_seconds = max(
            keep_seconds,
            _seconds_to_count(schedule["cron"], schedule["timezone"], schedule["now"], pause_after_failures),
        )
    return NewRun(
        template_version=template_version,
        tenant_id=schedule["tenant_id"],
        params=params,
        scope=schedule["scope"],
        scope_id=schedule["scope_id"],
        priority=schedule["priority"],
        schedule_id=schedule["id"],
        tick=tick,
        keep_seconds=keep_seconds,
        tags=schedule["tags"],
        callback_url=schedule["callback_url"],
    )


@lru_cache(maxsize=16)  # the runs of one firing, or of one backfill, have the same answer
def _seconds_to_count(expression: str, timezone: str, now: datetime, runs_to_count: int) -> int:
    """For how many seconds a run must be kept after its end, so that the schedule can count its last `runs_to_count`
    ended runs. This is the time of `runs_to_count` + 1 ticks (one more, because one tick may start no run while the
    previous run is still under way), and at most _LONGEST_COUNT.

    Returns 0 if the cron expression is not valid any more, because the schedule then does not fire again before
    somebody changes it.
    """
    try:
        ticks = cron.between(expression, timezone, now, now + _LONGEST_COUNT, runs_to_count + 1)
    except Invalid:
        return 0
    until = ticks[-1] if len(ticks) > runs_to_count else now + _LONGEST_COUNT
    return int((until - now).total_seconds())


async def _record_refusal(connection: Connection, schedule: Any, tick: datetime | None, error: RequestError) -> None:
    # Record why a run was refused. Only a refusal as Invalid counts in the schedule's `failures`.
    record = {"code": error.code, "message": error.message, "tick": tick}
    is_at_fault = isinstance(error, Invalid)
    await connection.execute(_RECORD_REFUSAL, schedule["id"], record, is_at_fault, schedule["failures"])
    log.warning("a schedule submitted no run", schedule_id=str(schedule["id"]), code=error.code)
