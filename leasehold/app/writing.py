"""Writes the runs of submitted calls to PostgreSQL, on the app's own connection or on a connection of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import UUID

import orjson

from leasehold.app.calls import PRIORITIES, Call, Options
from leasehold.broker.outbox import Announcement
from leasehold.db import celery_ids, idempotency
from leasehold.db.database import Connection
from leasehold.db.idempotency import Reservation
from leasehold.domain.celery_ids import TAG
from leasehold.domain.errors import Invalid
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.template import encoded_payload, template_of_pipeline
from leasehold.evaluation.templates import TemplateVersion
from leasehold.transitions import debounce, runs
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.runs import NewRun

_TIME = "SELECT extract(epoch FROM clock_timestamp())::float8"  # the database's time, as a number of seconds
_ACCEPTED = 202  # the HTTP status that is stored with a key, as the API stores it


@dataclass(slots=True)
class Written:
    """The runs that were written. `ids`: the ids of the runs, in the order of the calls. After the commit the caller
    publishes `hints` (messages that tell workers of due tasks). `limits`: concurrency limits at which some of the runs
    wait. After the commit the caller also calls `admit` for these limits, which starts as many of the waiting runs as
    the limits have room for.
    """

    ids: list[UUID] = field(default_factory=list)
    hints: list[Announcement] = field(default_factory=list)
    limits: list[ConcurrencyLimitName] = field(default_factory=list)


async def write(connection: Connection, calls: Sequence[Call[Any]], tenant: str, keep_seconds: int) -> Written:
    """Write a run for each call, either all runs or none. Call this function in a transaction. `keep_seconds`: how long
    a run is kept after it has ended. Raises Invalid for an idempotency key (`key`) that was used with other arguments,
    or a payload that is too large. Raises Conflict for a Celery id that a run of another task has.

    The steps:
    - Leave out calls whose Celery id a run has already.
    - Divide the calls into debounced calls, calls with a key, and all others.
    - Reserve each key. A new key gets one run. All calls with the key get the id of the key's run.
    - Merge debounced calls with runs that wait.
    - Write all new runs together.
    - Store each new run's id with its key.
    """
    written = Written([call.run_id for call in calls])
    now = await _time_of_submission(connection, calls)
    new_runs: dict[int, NewRun] = {}  # index of the call -> its run
    keyed_indexes: dict[tuple[str, str], list[int]] = {}  # (task, key) -> indexes of the calls
    debounced_indexes: dict[tuple[str, str], list[int]] = {}  # (task, debounce key) -> indexes
    for index, call in await _calls_to_write(connection, calls, tenant, written):
        encoded_payload(call.params)  # raises Invalid
        if call.debounce_key is not None:
            debounced_indexes.setdefault((call.task.name, call.debounce_key), []).append(index)
        elif call.key is not None:
            keyed_indexes.setdefault((call.task.name, call.key), []).append(index)
        else:
            new_runs[index] = _new_run(call, tenant, keep_seconds, now)
    reservations: dict[int, Reservation] = {}
    # Submissions at the same time lock the keys in the same order, and then all limits (in `create_together`), so that
    # they cannot deadlock.
    for (_, key), indexes in sorted(keyed_indexes.items()):
        reservation = await _reserve_key(connection, [calls[index] for index in indexes], key, tenant)
        if isinstance(reservation, Reservation):
            run_id = calls[indexes[0]].run_id
            new_runs[indexes[0]] = _new_run(calls[indexes[0]], tenant, keep_seconds, now)
            reservations[indexes[0]] = reservation
        else:
            run_id = reservation
        for index in indexes:
            written.ids[index] = run_id
    to_write = [run for _, run in sorted(new_runs.items())]
    if debounced_indexes:
        to_write += await _write_debounced(
            connection, calls, list(debounced_indexes.values()), tenant, keep_seconds, written, now
        )
    if to_write:
        creation = await runs.create_together(connection, to_write)
        written.hints += creation.hints
        written.limits += creation.limits
    for index, reservation in reservations.items():
        body = orjson.dumps({"id": str(written.ids[index])})
        await idempotency.store(connection, reservation, _ACCEPTED, body, calls[index].key_lasts)
    return written


async def write_plain(
    connection: Connection, calls: Sequence[Call[Any]], tenant: str, keep_seconds: int
) -> Written | None:
    """Write the run of a single call by one statement outside a transaction, which saves round trips to PostgreSQL. If
    the submission has several calls, a key, a Celery id, a debounce or a limit, returns None, and nothing is written.
    Then use `write`.

    Raises Invalid for a payload that is too large.
    """
    if len(calls) != 1 or calls[0].key is not None or calls[0].debounce_key is not None:
        return None
    if calls[0].options.celery_id is not None:
        return None
    encoded_payload(calls[0].params)  # raises Invalid
    now = await _time_of_submission(connection, calls)
    (is_written,), hints = await runs.create_unlimited(connection, [_new_run(calls[0], tenant, keep_seconds, now)])
    return Written([calls[0].run_id], list(hints)) if is_written else None


async def _calls_to_write(
    connection: Connection, calls: Sequence[Call[Any]], tenant: str, written: Written
) -> list[tuple[int, Call[Any]]]:
    """The calls that must be written, with their indexes. A call whose Celery id a run has already is left out, and
    `written` gets the id of that run. Raises Conflict for a Celery id that a run of another task has.
    """
    to_write = []
    for index, call in enumerate(calls):
        celery_id, earlier_id = call.options.celery_id, None
        if celery_id is not None:
            earlier_id = await celery_ids.written_earlier(connection, tenant, celery_id, call.task.name)
        if earlier_id is None:
            to_write.append((index, call))
        else:
            written.ids[index] = earlier_id
    return to_write


async def _write_debounced(
    connection: Connection,
    calls: Sequence[Call[Any]],
    indexes_by_key: Sequence[Sequence[int]],
    tenant: str,
    keep_seconds: int,
    written: Written,
    now: datetime,
) -> list[NewRun]:
    """Debounce the calls, and set their ids in `written`. Calls with the same debounce key become one run, with the id
    of the first call and the arguments of the last call. `indexes_by_key`: for each key, the indexes of its calls.

    If a run with the key waits already, that run gets the last call's arguments, and its delay begins again. All other
    runs are new. This function returns them, and the caller must write them.
    """
    first_calls = [calls[indexes[0]] for indexes in indexes_by_key]
    last_calls = [calls[indexes[-1]] for indexes in indexes_by_key]
    last_runs = [_new_run(last_call, tenant, keep_seconds, now) for last_call in last_calls]
    submissions = [
        _submission(first_call.run_id, last_call) for first_call, last_call in zip(first_calls, last_calls, strict=True)
    ]
    waiting_ids = await runs.merge(connection, tenant, last_runs, submissions)
    new_runs: list[NewRun] = []
    for indexes, first_call, last_run, waiting_id in zip(
        indexes_by_key, first_calls, last_runs, waiting_ids, strict=True
    ):
        if waiting_id is None:
            new_runs.append(replace(last_run, id=first_call.run_id, dedupe_key=first_call.debounce_key))
        for index in indexes:
            written.ids[index] = waiting_id or first_call.run_id
    return new_runs


def _submission(submission_id: UUID, call: Call[Any]) -> debounce.Debounced:
    assert call.debounce_key is not None
    assert call.task.terms.debounce is not None
    delay = call.task.terms.debounce.total_seconds()
    return debounce.Debounced(submission_id, call.task.name, call.debounce_key, call.params, delay)


async def _reserve_key(connection: Connection, calls: Sequence[Call[Any]], key: str, tenant: str) -> Reservation | UUID:
    """Reserve the key of these calls of one task, for a run that the caller then writes. If an earlier submission has
    written a run with the key, returns the id of that run instead. Raises Invalid if the calls, or that run, have
    different arguments.
    """
    name = calls[0].task.name
    # If the caller gave the key, all calls with it must have equal arguments. A key of the option `unique` is made of
    # the arguments, so they need no comparison.
    arguments = {encoded_payload(call.params) if call.has_key_of_caller else b"" for call in calls}
    if len(arguments) > 1:
        raise Invalid("idempotency_key_reused", f"The key {key!r} of {name} was used with other arguments.")
    fingerprint = idempotency.fingerprint(name.encode(), *arguments)
    try:
        reservation = await idempotency.reserve(connection, tenant, f"task:{name}:{key}", fingerprint)
    except Invalid as error:
        raise Invalid(error.code, f"The key {key!r} of {name} was used with other arguments.") from None
    # If the key was used before, `reservation` is the stored answer of that submission.
    return reservation if isinstance(reservation, Reservation) else UUID(orjson.loads(reservation.body)["id"])


async def _time_of_submission(connection: Connection, calls: Sequence[Call[Any]]) -> datetime:
    """The time from which the delays of the calls count. This is the database's time, because the clock of the program
    may be wrong. If no call has a delay, this time has no effect, so the program's clock is used.
    """
    if not any(call.delay for call in calls):
        return datetime.now(UTC)
    # _TIME is a number, because some drivers of `submit_in` return a timestamp without its time zone.
    return datetime.fromtimestamp(await connection.fetchval(_TIME), UTC)


def _new_run(call: Call[Any], tenant: str, keep_seconds: int, now: datetime) -> NewRun:
    return NewRun(
        template_version=template_version_of(call.task.pipeline),
        tenant_id=tenant,
        params=call.params,
        priority=PRIORITIES.index(call.options.priority),
        scheduled_at=call.scheduled_at(now),
        keep_seconds=keep_seconds,
        tags=_tags_of(call.options),
        id=call.run_id,
    )


def _tags_of(options: Options) -> Mapping[str, str]:
    """The caller's tags and, if the run has a Celery id, a tag with this id."""
    tags = options.tags or {}
    return tags if options.celery_id is None else {**tags, TAG: options.celery_id}


@cache
def template_version_of(pipeline: Pipeline) -> TemplateVersion:
    """The pipeline as the template of its runs."""
    return TemplateVersion(template_of_pipeline(pipeline), pipeline, enabled=True, in_code=True)
