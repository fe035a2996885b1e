"""Lists the jobs that match a filter, newest first, and counts them. Each page reads a bounded number of rows.

One term of the filter, the driver, chooses an index that has the matching jobs in the order of the list. The statement
walks over this index (it reads the entries in their order), and checks the other terms on each job. It reads at most
MAX_READ rows. So a list never reads a whole table, for any filter, and for any number of jobs of other tenants.

If a walk reaches its limit before the page is full, the page names the job at which the walk ended (`Page.ended_at`).
The API then refuses the filter, and advises the client to narrow the time. Exception: for a search, or for a filter by
queue, the API returns the creation time of that job, and a cursor to continue.

A page of a search in payloads or texts ends after MAX_SEARCHED jobs. A page of a filter by queue ends after
MAX_READ_BY_QUEUE rows. A search for a text walks only over jobs that can contain the text: jobs with an error, a dedupe
key or a scope, and jobs of pipelines whose name contains the text. A UUID in the filter counts as a job's id. If no job
has this id, the UUID is searched as a text, because dedupe keys and scopes may be UUIDs.

Ids are UUIDv7: they sort by the time at which they were made. So the terms on the creation time bound the walk. Such a
term can miss a job whose id has another time than its row. The two times differ if a program makes the id of a run up
to a day before it submits the run, or if the program's clock is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Literal
from uuid import UUID

import orjson

from leasehold.db.database import Connection, in_index_order
from leasehold.db.job_reads import COLUMNS, LIVES, OF_OWN_TENANT, Row
from leasehold.domain.ids import id_of_instant
from leasehold.domain.job_filter import JobFilter, Range
from leasehold.domain.states import JobState

#: The most rows that one page reads, and the most jobs whose payloads or texts one page searches.
MAX_READ, MAX_SEARCHED = 100_000, 10_000
#: The most rows that a page reads if its filter names a queue. No index finds finished jobs by their queue, because
#: every insert of a step would have to maintain the index. So a page checks the steps of the newest jobs, and the next
#: page continues where this page ended.
MAX_READ_BY_QUEUE = 5_000
#: A search for a text narrows its walk (see the head). Exception: the search walks over all jobs if the tenant has more
#: than _MAX_PIPELINES pipelines, or more than _MAX_PIPELINES_WITH_TEXT pipelines whose names contain the text.
_MAX_PIPELINES, _MAX_PIPELINES_WITH_TEXT = 500, 20
#: A count up to this number is exact. A higher count is an estimate.
MAX_COUNTED = 10_000
#: `Listing.max_walked` assumes that a walk reads this many rows for each job. Usually these are three: the index entry,
#: the job and its run. With a filter by queue they are five: the index entry, and the job's steps (most jobs have four
#: or fewer).
_ROWS_PER_JOB, _ROWS_PER_JOB_WITH_STEPS = 3, 5
#: A list assumes that the clock of a process that makes ids differs from PostgreSQL's clock by less than this.
_MAX_CLOCK_SKEW = timedelta(minutes=5)
#: The statuses of jobs that have not ended.
_UNFINISHED_STATUSES = frozenset({"pending", "queued", "running", "waiting_worker", "cancel_requested"})
#: Each job with one of these statuses has an error.
_ERROR_STATUSES = frozenset({"failed", "expired"})


@dataclass(frozen=True, slots=True)
class Scope:
    """The jobs that a caller may see. `tenant_id`: the tenant of the jobs; None: all tenants.

    A pipeline may belong to a kind of work (such as pictures). `pipelines`: the pipelines of the kinds that the caller
    may see. `owned`: the pipelines of all kinds. `others`: the installation's pipelines that belong to no kind. `runs`:
    whether the caller may see runs, and other jobs of pipelines that belong to no kind. `beyond_tenant`: whether the
    caller may see bulk operations that act on jobs of other tenants.
    """

    tenant_id: str | None
    pipelines: Sequence[str]
    runs: bool
    others: Sequence[str]
    owned: Sequence[str]
    beyond_tenant: bool = False

    @property
    def has_everything(self) -> bool:
        # If so, the caller may see every job of `tenant_id`, and a statement needs no condition on pipelines.
        return self.runs and set(self.pipelines) == set(self.owned)


@dataclass(frozen=True, slots=True)
class Bound:
    """The jobs on which a bulk operation may act. `at`: when the operation was submitted. Jobs created after `at` are
    left out, and ages are computed as of `at`. `state`: only jobs that had failed at that time, or only unfinished
    jobs; None: jobs in any state.
    """

    at: datetime
    state: Literal["failed", "unfinished"] | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list. `has_more`: jobs may follow. `ended_at`: the first job that the walk did not check, if the walk
    ended before the page was full; otherwise None.
    """

    rows: Sequence[Row]
    has_more: bool
    ended_at: Row | None = None


@dataclass(slots=True)
class Statement:
    """The text of a statement, and the values of its parameters."""

    text: str
    values: list[object]


@dataclass(slots=True)
class _Parameters:
    """The values of a statement's parameters. `add` returns the SQL that stands for the value, such as `$3::uuid`."""

    values: list[object] = field(default_factory=list)

    def add(self, value: object, sql_type: str) -> str:
        self.values.append(value)
        return f"${len(self.values)}::{sql_type}"


class Listing:
    """Builds the statements of one filter. `before`: the page has only jobs older than this job. `bound`: the jobs on
    which a bulk operation may act; None: no such bound. `max_read`: the most rows that a page reads.
    `pipelines_with_text`: for a search for a text, the pipelines whose names contain it; None: the walk goes over all
    jobs. `ids_are_texts`: a UUID in the filter is searched as a text.
    """

    def __init__(
        self,
        scope: Scope,
        job_filter: JobFilter,
        before: UUID | None = None,
        *,
        bound: Bound | None = None,
        max_read: int | None = None,
        pipelines_with_text: Sequence[str] | None = None,
        ids_are_texts: bool = False,
    ) -> None:
        # Makes the same listing, with other values of the last two parameters.
        self._copy_with = partial(Listing, scope, job_filter, before, bound=bound, max_read=max_read)
        self._ids_are_texts = ids_are_texts
        self._pipelines_with_text = pipelines_with_text
        if bound is not None and bound.state == "failed":
            job_filter = replace(job_filter, status=JobState.FAILED)
        self._scope, self._filter, self._before, self._bound = scope, job_filter, before, bound
        self._max_read = MAX_READ if max_read is None else max_read
        self._parameters = _Parameters()
        # SQL: the parameter with the tenant. None: the listing is of all tenants.
        self._tenant = None if scope.tenant_id is None else self._parameters.add(scope.tenant_id, "text")
        self._queue_condition: str | None = None  # SQL: the task `t` is in the queue of the filter
        self._conditions = self._conditions_of_filter()  # SQL: the job `j` matches
        # The statement of `estimate` uses only the parameters that the conditions have added up to here. The later
        # parameters are not passed to that statement, because PostgreSQL refuses a parameter that a statement does not
        # use.
        self._condition_value_count = len(self._parameters.values)
        self._id_conditions = self._conditions_on_ids()  # the ends of the walk
        #: The text of the filter, if `narrowed_to_pipelines` can narrow the walk to the jobs that can contain this
        #: text. It is None if the filter has no text, or if another term is the driver. `_driver_by_kind` sets this
        #: attribute.
        self.searchable_text: str | None = None
        self._driver = self._driver_of_filter()  # SQL: the ids over which the walk goes

    @property
    def tenant_id(self) -> str | None:
        return self._scope.tenant_id

    def narrowed_to_pipelines(self, pipelines_with_text: Sequence[str]) -> Listing:
        """The same listing, but its walk goes only over jobs that can contain the text `searchable_text`."""
        return self._copy_with(pipelines_with_text=pipelines_with_text, ids_are_texts=self._ids_are_texts)

    @property
    def job_id(self) -> UUID | None:
        """The job id in the filter, or None."""
        return next((job_id for text in self._filter.texts if (job_id := self._id_of(text)) is not None), None)

    def with_ids_as_texts(self) -> Listing:
        """The same listing, but a UUID in the filter is searched as a text."""
        return self._copy_with(ids_are_texts=True)

    def _id_of(self, text: str) -> UUID | None:
        """The text as a job's id. Returns None if the text is no UUID, or if UUIDs are searched as texts."""
        if self._ids_are_texts:
            return None
        try:
            return UUID(text)
        except ValueError:
            return None

    @property
    def max_walked(self) -> int:
        """The most jobs over which a page walks."""
        jobs = self._max_read // (_ROWS_PER_JOB_WITH_STEPS if self._filter.queue is not None else _ROWS_PER_JOB)
        return min(MAX_SEARCHED, jobs) if self._filter.payload or self._filter.texts else jobs

    def page(self, limit: int) -> Statement:
        """At most `limit` + 1 jobs. `walked`: the job's number in the walk. If the walk ended before the page was full,
        the last row has `walked` = max_walked + 1. Its job is the one at which the walk ended, and was not checked.
        """
        return self._select("job_list", COLUMNS, limit)

    def columns(self, statement: str, limit: int, *names: str) -> Statement:
        """The same rows as `page`, but with only the columns `names` of the job, and `walked`. `statement`: the
        statement's name.
        """
        return self._select(statement, ", ".join(f"j.{name}" for name in names), limit)

    def _select(self, statement: str, columns: str, limit: int) -> Statement:
        return Statement(
            f"-- {statement}\nSELECT listed.*, walk.walked FROM {self._walk()}{self._in_queue} CROSS JOIN LATERAL ("
            f"SELECT {columns} FROM job j LEFT JOIN run r ON r.job_id = j.id WHERE j.id = walk.id"
            f" AND ({self._conditions} OR walk.walked > {self.max_walked}) LIMIT 1) AS listed"
            f" ORDER BY walk.id DESC LIMIT {limit + 1}",
            self._parameters.values,
        )

    def count(self) -> Statement:
        """`n`: the matching jobs, counted up to MAX_COUNTED + 1. `ended`: the walk reached its limit, so older jobs
        were not counted.
        """
        return Statement(
            "-- job_count\nSELECT count(*) FILTER (WHERE NOT ended) AS n, coalesce(bool_or(ended), false) AS ended"
            f" FROM (SELECT walk.walked > {self.max_walked} AS ended FROM {self._walk()}{self._in_queue}"
            " CROSS JOIN LATERAL ("
            "SELECT 1 FROM job j LEFT JOIN run r ON r.job_id = j.id WHERE j.id = walk.id"
            f" AND ({self._conditions} OR walk.walked > {self.max_walked}) LIMIT 1) AS matching"
            f" LIMIT {MAX_COUNTED + 1}) AS counted",
            self._parameters.values,
        )

    def estimate(self) -> Statement:
        """A statement to EXPLAIN: PostgreSQL's plan for it estimates how many jobs match."""
        return Statement(
            f"SELECT 1 FROM job j LEFT JOIN run r ON r.job_id = j.id WHERE {self._conditions}",
            self._parameters.values[: self._condition_value_count],
        )

    @property
    def _in_queue(self) -> str:
        """SQL that keeps only the jobs with a step in the filter's queue, so that the statement does not read the rows
        of other jobs. The SQL also keeps the job at which the walk ends, because the page names that job. LIMIT 1 makes
        PostgreSQL probe the index once for each job.
        """
        if self._queue_condition is None:
            return ""
        return (
            f" CROSS JOIN LATERAL ((SELECT 1 FROM task t WHERE t.job_id = walk.id AND {self._queue_condition} LIMIT 1)"
            f" UNION ALL (SELECT 1 WHERE walk.walked > {self.max_walked}) LIMIT 1) AS step_in_queue"
        )

    def _walk(self) -> str:
        """SQL: the ids of the driver, each with its number in the walk (`walked`)."""
        return (
            "(SELECT driver.id, row_number() OVER (ORDER BY driver.id DESC) AS walked"
            f" FROM ({self._driver}) AS driver ORDER BY driver.id DESC LIMIT {self.max_walked + 1}) AS walk"
        )

    def _conditions_on_ids(self) -> list[str]:
        """Conditions that limit the walk to a range of ids, for example `< $3::uuid`. Ids sort by time, so a creation
        time gives a limit for ids.

        The instant of a bulk operation (`Bound.at`) gives no such limit. Few jobs are newer, so the limit would save
        little. And an operation must find every job that existed at that instant. The limit could miss a job whose id
        has a later time than its row, because the clock of the program that made the id was wrong. So `created:>0s`,
        which means created before `Bound.at`, sets no limit, either.
        """
        job_filter, conditions = self._filter, []
        if self._before is not None:
            conditions.append(f"< {self._parameters.add(self._before, 'uuid')}")
        if job_filter.created_after is not None:
            first_id = id_of_instant(max(job_filter.created_after, _EARLIEST) - _MAX_CLOCK_SKEW)
            conditions.append(f">= {self._parameters.add(first_id, 'uuid')}")
        if job_filter.created_before is not None and (
            self._bound is None or job_filter.created_before < self._bound.at
        ):
            end_id = id_of_instant(max(job_filter.created_before, _EARLIEST) + _MAX_CLOCK_SKEW)
            conditions.append(f"< {self._parameters.add(end_id, 'uuid')}")
        return conditions

    def _between_ends(self, column: str) -> str:
        """SQL: the id in the `column` is between the ends of the walk."""
        return "".join(f" AND {column} {condition}" for condition in self._id_conditions)

    def _driver_of_filter(self) -> str:
        """SQL: the ids that the driver finds in its index, in the order of the list (see the module's head). The driver
        is the first of these terms that the filter has: a job's id, a worker, a schedule. If the filter has none of
        them, a listing of one tenant gets its driver from `_driver_of_tenant`, and a listing of all tenants walks over
        all jobs.
        """
        job_filter = self._filter
        if self.job_id is not None:
            return (
                f"SELECT j.id FROM job j WHERE j.id = {self._parameters.add(self.job_id, 'uuid')}{self._in_tenant('j')}"
                + self._between_ends("j.id")
            )
        if job_filter.worker is not None:
            # PostgreSQL may sort these ids, because they are few. A worker runs at most as many steps as it has slots.
            return (
                "SELECT DISTINCT t.job_id AS id FROM task t WHERE t.status = 'running'"
                f" AND t.lease_owner = {self._parameters.add(job_filter.worker, 'uuid')}{self._in_tenant('t')}"
                f"{self._between_ends('t.job_id')}"
            )
        if job_filter.schedule is not None:
            return self._ids("run", "job_id", f"x.schedule_id = {self._parameters.add(job_filter.schedule, 'uuid')}")
        return self._ids("job", "id", "true") if self._tenant is None else self._driver_of_tenant()

    def _driver_of_tenant(self) -> str:
        """SQL: the driver of a filter for one tenant. The driver is the first of these terms that the filter has: a
        tag, an error code, a status with an index of its own. Otherwise the kind is the driver. Each index used here
        begins with the tenant.
        """
        job_filter = self._filter
        if job_filter.tags:
            name, value = job_filter.tags[0]
            condition = (
                f"x.name = {self._parameters.add(name, 'text')} AND x.value = {self._parameters.add(value, 'text')}"
            )
            return self._ids("job_tag", "job_id", condition)
        if job_filter.code is not None:
            condition = f"x.error ->> 'code' = {self._parameters.add(job_filter.code, 'text')} AND x.error IS NOT NULL"
            return self._ids("job", "id", condition)
        return self._driver_by_status() or self._driver_by_kind()

    def _driver_by_status(self) -> str | None:
        """SQL: the jobs of a small partial index that has all jobs with the filter's status. For a bulk operation that
        acts only on unfinished jobs, it is the index of unfinished jobs. Returns None if no such index fits.
        """
        status, pipelines = self._filter.status, self._pipelines()
        if status in _ERROR_STATUSES:
            if pipelines is None:
                return self._ids("job", "id", "x.error IS NOT NULL")
            return self._merge_ids([
                self._ids("job", "id", f"x.pipeline = {self._parameters.add(name, 'text')} AND x.error IS NOT NULL")
                for name in pipelines
            ])  # fmt: skip
        if status in ("cancelled", "cancel_requested"):
            return self._ids("job", "id", "x.cancel IS NOT NULL")
        only_unfinished = self._bound is not None and self._bound.state == "unfinished"
        return (
            self._ids("job", "id", "x.finished_at IS NULL")
            if only_unfinished or status in _UNFINISHED_STATUSES
            else None
        )

    def _pipelines(self) -> Sequence[str] | None:
        """The pipelines whose jobs the filter can find; None: any pipeline. If the filter names a template, its
        pipeline is the only one, because a run's pipeline has the name of the run's template. Otherwise, if the caller
        may not see runs, and the scope has pipelines, the filter finds only jobs of these pipelines.
        """
        if self._filter.template is not None:
            return [self._filter.template]
        return None if self._scope.runs or not self._scope.pipelines else self._scope.pipelines

    def _driver_by_kind(self) -> str:
        """SQL: all jobs of the scope, or of the pipelines that the filter names. The index job_tenant_newest has the
        jobs of each pipeline in the order of the list, and run_newest has all runs. Sets `searchable_text` if the
        filter has a text.
        """
        if self._pipelines_with_text is not None:
            return self._driver_by_text(self._pipelines_with_text)
        if self._filter.template is None:
            self.searchable_text = next(iter(self._filter.texts), None)
        pipelines = self._pipelines()
        if pipelines is not None:
            return self._merge_ids([self._ids_of_pipeline(name) for name in pipelines])
        names = [*self._scope.pipelines, *self._scope.others]
        return self._merge_ids([self._ids("run", "job_id", "true"), *(self._ids_of_pipeline(name) for name in names)])

    def _driver_by_text(self, pipelines_with_text: Sequence[str]) -> str:
        """SQL: the jobs that can contain the text. The conditions decide which of them are on the page."""
        drivers = [
            self._ids("job", "id", "x.error IS NOT NULL"),
            self._ids("job", "id", "x.dedupe_key IS NOT NULL"),
            self._ids("run", "job_id", "x.scope_id <> ''"),
            *(self._ids_of_pipeline(name) for name in pipelines_with_text),
        ]
        return self._merge_ids(drivers)

    def _ids_of_pipeline(self, name: str) -> str:
        return self._ids("job", "id", f"x.pipeline = {self._parameters.add(name, 'text')}")

    def _ids(self, table: str, column: str, condition: str) -> str:
        """SQL: the job ids in the `column` of the table's rows `x` that meet the condition, the newest first."""
        return (
            f"SELECT x.{column} AS id FROM {table} x WHERE {condition}{self._in_tenant('x')}"
            f"{self._between_ends(f'x.{column}')} ORDER BY x.{column} DESC"
        )

    def _merge_ids(self, drivers: Sequence[str]) -> str:
        """SQL: the ids of all drivers, each id once. The ids come sorted, so DISTINCT compares only neighbours."""
        if len(drivers) == 1:
            return drivers[0]
        union = " UNION ALL ".join(f"({driver} LIMIT {self.max_walked + 1})" for driver in drivers)
        return f"SELECT DISTINCT ON (merged.id) merged.id FROM ({union}) AS merged ORDER BY merged.id DESC"

    def _in_tenant(self, alias: str) -> str:
        return "" if self._tenant is None else f" AND {alias}.tenant_id = {self._tenant}"

    def _conditions_of_filter(self) -> str:
        # SQL: the conditions that a job `j` with its run `r` must meet. First come the conditions of the scope (what
        # the caller may see), then the terms of the filter, then the bound of a bulk operation.
        job_filter, add = self._filter, self._parameters.add
        conditions = [LIVES]  # the job is neither deleted nor past its retention
        if self._tenant is not None:
            conditions.append(f"j.tenant_id = {self._tenant}")
        if not self._scope.has_everything:
            # `runs` makes visible the runs, and the jobs of pipelines that belong to no kind. Any other job is visible
            # if `pipelines` has its pipeline.
            visible_pipelines = add(list(self._scope.pipelines), "text[]")
            owned_pipelines = add(list(self._scope.owned), "text[]")
            conditions.append(
                f"CASE WHEN r.job_id IS NOT NULL OR NOT (j.pipeline = ANY({owned_pipelines}))"
                f" THEN {str(self._scope.runs).lower()} ELSE j.pipeline = ANY({visible_pipelines}) END"
            )
        if "bulk_operation" in self._scope.pipelines and not self._scope.beyond_tenant:
            conditions.append(OF_OWN_TENANT)
        for column, value in (
            ("j.status", job_filter.status),
            ("coalesce(r.template, j.pipeline)", job_filter.template),
            ("j.error ->> 'code'", job_filter.code),
        ):
            if value is not None:
                conditions.append(f"{column} = {add(str(value), 'text')}")
        if job_filter.schedule is not None:
            conditions.append(f"r.schedule_id = {add(job_filter.schedule, 'uuid')}")
        if job_filter.created_after is not None:
            conditions.append(f"j.created_at >= {add(job_filter.created_after, 'timestamptz')}")
        if job_filter.created_before is not None:
            conditions.append(f"j.created_at < {add(job_filter.created_before, 'timestamptz')}")
        now = "clock_timestamp()"
        if self._bound is not None:
            now = add(self._bound.at, "timestamptz")
            conditions += self._conditions_of_bound(self._bound, now)
        waited = f"coalesce(j.started_at, j.finished_at, {now}) - j.created_at"
        conditions += self._conditions_on_interval(waited, job_filter.waited)
        duration = f"coalesce(j.finished_at, {now}) - j.started_at"
        conditions += self._conditions_on_interval(duration, job_filter.duration)
        return " AND ".join(conditions + self._conditions_on_other_rows())

    def _conditions_of_bound(self, bound: Bound, at: str) -> list[str]:
        """The conditions for a job on which the bulk operation may act. `at`: SQL for the instant `bound.at`."""
        conditions_by_state = {
            # leaves out a job that was retried after the operation's submission, and then failed again
            "failed": [f"j.finished_at <= {at}"],
            "unfinished": ["j.finished_at IS NULL", "j.status <> 'cancel_requested'"],
        }
        return [f"j.created_at <= {at}", *conditions_by_state.get(bound.state or "", ())]

    def _conditions_on_other_rows(self) -> list[str]:
        """Conditions on rows of other tables, and on texts."""
        job_filter, add = self._filter, self._parameters.add
        conditions = [
            "EXISTS (SELECT 1 FROM job_tag g WHERE g.job_id = j.id"
            f" AND g.name = {add(name, 'text')} AND g.value = {add(value, 'text')})"
            for name, value in job_filter.tags
        ]
        if job_filter.queue is not None:
            queue = add(job_filter.queue, "text")
            # The tasks of external workers have the queue `ext:<tenant>:<queue>`.
            self._queue_condition = f"(t.queue = {queue} OR t.queue = 'ext:' || t.tenant_id || ':' || {queue})"
            conditions.append(f"EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.id AND {self._queue_condition})")
        if job_filter.worker is not None:
            conditions.append(
                "EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.id AND t.status = 'running'"
                f" AND t.lease_owner = {add(job_filter.worker, 'uuid')})"
            )
        for path, value in job_filter.payload:
            conditions.append(f"j.params #>> {add(list(path), 'text[]')} = {add(value, 'text')}")
        for text in job_filter.texts:
            if (job_id := self._id_of(text)) is not None:
                conditions.append(f"j.id = {add(job_id, 'uuid')}")
            else:
                conditions.append(
                    f"strpos(lower(concat_ws(' ', j.pipeline, r.template, r.scope_id, j.dedupe_key, j.error ->> 'code',"
                    f" j.error ->> 'message')), lower({add(text, 'text')})) > 0"
                )
        return conditions

    def _conditions_on_interval(self, interval: str, limits: Range | None) -> list[str]:
        """Conditions: the `interval` (SQL) is within the limits."""
        bounds = [] if limits is None else [(">", limits.above), ("<", limits.below)]
        return [
            f"{interval} {sign} make_interval(secs => {self._parameters.add(seconds, 'float8')})"
            for sign, seconds in bounds
            if seconds is not None
        ]


#: The times in ids begin in 1970. The hour leaves room to subtract the clock skew.
_EARLIEST = datetime.fromisoformat("1970-01-01T01:00:00+00:00")


# $1 the id, $2 the tenant (NULL: any tenant).
_IS_JOB = """
-- is_job
SELECT EXISTS (SELECT 1 FROM job WHERE id = $1 AND ($2::text IS NULL OR tenant_id = $2))
"""

# The names of a tenant's pipelines, and whether each name contains the text. $1 the tenant, $2 the text. The recursion
# finds each name by one probe of an index. The condition of a search (`_conditions_on_other_rows`) joins a run's
# pipeline and its template, which have the same name, with a space. So this statement searches in "name name", because
# the text may match across the space.
_NAMES = f"""
-- job_names
WITH RECURSIVE names(name) AS (
    (SELECT j.pipeline FROM job j WHERE j.tenant_id = $1 ORDER BY j.pipeline LIMIT 1)
    UNION ALL
    SELECT (SELECT j.pipeline FROM job j WHERE j.tenant_id = $1 AND j.pipeline > names.name
            ORDER BY j.pipeline LIMIT 1)
    FROM names WHERE names.name IS NOT NULL
)
SELECT name, strpos(lower(name || ' ' || name), lower($2)) > 0 AS has_text
FROM names WHERE name IS NOT NULL LIMIT {_MAX_PIPELINES + 1}
"""


async def narrowed_to_text(connection: Connection, listing: Listing) -> Listing:
    """The listing, narrowed to the jobs that can contain the text of its filter. Exception: the listing is not narrowed
    if its filter has no text to search, or if the tenant has too many pipelines (_MAX_PIPELINES,
    _MAX_PIPELINES_WITH_TEXT). A UUID that is no job's id is searched as a text.
    """
    if listing.job_id is not None and not await connection.fetchval(_IS_JOB, listing.job_id, listing.tenant_id):
        listing = listing.with_ids_as_texts()
    if (text := listing.searchable_text) is None:
        return listing
    names = await connection.fetch(_NAMES, listing.tenant_id, text)
    pipelines_with_text = [row["name"] for row in names if row["has_text"]]
    if len(names) > _MAX_PIPELINES or len(pipelines_with_text) > _MAX_PIPELINES_WITH_TEXT:
        return listing
    return listing.narrowed_to_pipelines(pipelines_with_text)


def listing_of_page(scope: Scope, job_filter: JobFilter, before: UUID | None = None) -> Listing:
    """The listing whose pages the API and the console show."""
    return Listing(scope, job_filter, before, max_read=MAX_READ_BY_QUEUE if job_filter.queue is not None else None)


async def page(connection: Connection, listing: Listing, limit: int) -> Page:
    """At most `limit` jobs, newest first."""
    listing = await narrowed_to_text(connection, listing)
    return _page_of(listing, await _fetch(connection, listing.page(limit)), limit)


async def page_of_times(connection: Connection, listing: Listing, limit: int) -> Page:
    """The same jobs as `page`, but with only the times and the status of each job."""
    listing = await narrowed_to_text(connection, listing)
    statement = listing.columns("job_times", limit, "created_at", "started_at", "finished_at", "status")
    return _page_of(listing, await _fetch(connection, statement), limit)


def _page_of(listing: Listing, fetched_rows: Sequence[Row], limit: int) -> Page:
    """The page of the fetched rows, of which there may be `limit` + 1."""
    rows, ended_at = _rows_and_end(listing, fetched_rows)
    # A full page needs no `ended_at`, because the next page continues after the last job of this page.
    if len(rows) > limit or (ended_at is not None and len(rows) == limit):
        return Page(rows[:limit], has_more=True)
    return Page(rows, has_more=False, ended_at=ended_at)


def _rows_and_end(listing: Listing, fetched_rows: Sequence[Row]) -> tuple[Sequence[Row], Row | None]:
    """The rows that match, and the row at which the walk ended early, or None."""
    rows = [row for row in fetched_rows if row["walked"] <= listing.max_walked]
    return rows, next((row for row in fetched_rows if row["walked"] > listing.max_walked), None)


async def _fetch(connection: Connection, statement: Statement) -> Sequence[Row]:
    async with in_index_order(connection):  # else PostgreSQL might sort all jobs instead of walking over the index
        return await connection.fetch(statement.text, *statement.values)


@dataclass(frozen=True, slots=True)
class WalkPart:
    """One part of a bulk operation's walk over all matching jobs. `targets`: (id, tenant) of each job, newest first.
    `before`: the next part has only jobs with a smaller id (older jobs); None: the walk is complete.
    """

    targets: Sequence[tuple[UUID, str]]
    before: UUID | None


async def next_walk_part(connection: Connection, listing: Listing, limit: int) -> WalkPart:
    """The next part of the walk, with at most `limit` jobs. A part may have no jobs although another part follows,
    namely if none of the next `max_walked` jobs matched.
    """
    listing = await narrowed_to_text(connection, listing)
    rows, ended_at = _rows_and_end(
        listing, await _fetch(connection, listing.columns("job_ids", limit, "id", "tenant_id"))
    )
    targets = [(row["id"], row["tenant_id"]) for row in rows]
    if len(targets) > limit:
        return WalkPart(targets[:limit], targets[limit - 1][0])
    if ended_at is not None:  # this job was not checked: the next part begins with it
        return WalkPart(targets, UUID(int=ended_at["id"].int + 1))
    return WalkPart(targets, None)


async def count(connection: Connection, listing: Listing) -> tuple[int, bool]:
    """How many jobs match, and whether the number is exact. The number is exact up to MAX_COUNTED, unless the walk
    ended early. Otherwise the number is PostgreSQL's estimate, but at least the number of the counted jobs.
    """
    listing = await narrowed_to_text(connection, listing)
    (count_row,) = await _fetch(connection, listing.count())
    if count_row["n"] <= MAX_COUNTED and not count_row["ended"]:
        return count_row["n"], True
    explanation = await connection.fetchval(
        f"EXPLAIN (FORMAT JSON) {await with_literals(connection, listing.estimate())}"
    )
    plan = orjson.loads(explanation) if isinstance(explanation, str) else explanation
    return max(count_row["n"], int(plan[0]["Plan"]["Plan Rows"])), False


async def with_literals(connection: Connection, statement: Statement) -> str:
    """The statement with its values in its text, as PostgreSQL quotes them, because EXPLAIN takes no parameters."""
    quoted_values = await literals(connection, statement)
    return re.sub(r"\$(\d+)", lambda number: quoted_values[int(number[1]) - 1], statement.text)


async def literals(connection: Connection, statement: Statement) -> list[str]:
    """The statement's values as SQL, quoted by PostgreSQL."""
    quoted_values: list[str] | None = await connection.fetchval(
        "SELECT array_agg(quote_nullable(v) ORDER BY n) FROM unnest($1::text[]) WITH ORDINALITY AS u(v, n)",
        [_as_text(value) for value in statement.values],
    )
    return quoted_values or []


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list):
        return "{" + ",".join('"' + re.sub(r'(["\\\\])', r"\\\1", item) + '"' for item in value) + "}"
    return str(value)
