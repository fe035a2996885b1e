"""Runs attempts at inline steps: steps whose handlers run in the worker's own process. An `async def` handler runs in
the worker's event loop. A plain function runs in a thread.

The runner calls `InlineAttempts.perform`. The handler gets an `InlineAttempt`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import structlog
from pydantic import ValidationError

from leasehold.broker.announcer import Announcer
from leasehold.broker.outbox import Announcement
from leasehold.db.artifacts import note_of, value_of
from leasehold.db.database import Connection, Pool, is_of_platform
from leasehold.domain.errors import Cancelled, LeaseLost, ObjectMissing, Permanent, StepTimeout
from leasehold.domain.lease import Lease
from leasehold.domain.object_keys import output_key
from leasehold.domain.params import params_of_json
from leasehold.domain.pipeline import NAME, Pipeline, Step
from leasehold.domain.sentences import with_article
from leasehold.domain.storable import path_to_non_finite
from leasehold.domain.verdicts import Done, FanOut, LeftToOthers, Snooze
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry import attempt_logs
from leasehold.transitions import notes
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, FanningOut, Output, Part, Snoozing, Suspending
from leasehold.worker.attempts.directories import Directories
from leasehold.worker.attempts.inputs import item_of, sources_of
from leasehold.worker.attempts.journals import Journals
from leasehold.worker.attempts.plain import in_thread, is_plain
from leasehold.worker.attempts.primary import on_primary, primary_connection
from leasehold.worker.attempts.publishing import replacement_rule, writer_of
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.attempts.slot import Slot
from leasehold.worker.attempts.stalls import Watched
from leasehold.worker.attempts.threads import Reservation, Threads
from leasehold.worker.attempts.workflows import Workflows
from leasehold.worker.leases.held_lease import HeldLease
from leasehold.workflows.driver import Driver
from leasehold.workflows.pending import Outcome

_Answer = TypeVar("_Answer")

#: An inline handler reads its inputs into memory. Larger inputs belong to isolated steps, which run in child processes.
MAX_READ_BYTES = 64 * 1024 * 1024
#: An attempt needs room. For a plain handler, room is a thread. For an `async def` handler, room is the admission of
#: `Pipeline.room`, if the pipeline has such a rule. Without room the attempt snoozes for this many seconds, which means
#: that it gives its lease back, and the task is due again later. Before that, an attempt that needs a thread waits for
#: it up to the same number of seconds.
_ROOM_SECONDS = 5.0
#: The most parts that one step may fan out into.
MAX_ITEMS = 1000


class InlineAttempt:
    """The attempt that an inline handler gets. It implements leasehold.domain.attempt.Attempt, which describes the
    methods. `opened`: what the pipeline's opener has opened, such as a client or a pool.
    """

    def __init__(
        self,
        claimed: Claimed,
        pipeline: Pipeline,
        step: Step,
        held: HeldLease,
        store: ObjectStore,
        pool: Pool,
        reporter: Reporter,
        opened: Any,
        directories: Directories,
        workflows: Workflows,
        announcer: Announcer,
        slot: Slot,
    ) -> None:
        self._workflows = workflows
        self._announcer = announcer
        self.slot = slot
        self._claimed = claimed
        self._pipeline = pipeline
        self._step = step
        self._held = held
        self._store = store
        self._pool = pool
        self._reporter = reporter
        self._directories = directories
        self.opened = opened
        self.params = _params(pipeline, claimed)
        self.outputs: dict[str, Output] = {}
        self.used_directory = False  # whether the handler has used `directory`, which must then be removed
        self._log_source = attempt_logs.source()  # has the recorder of this attempt's log lines and chunks

    @property
    def pipeline(self) -> Pipeline:
        return self._pipeline

    @property
    def handler(self) -> tuple[str, str]:
        """The names of the pipeline and the step whose code runs."""
        return self._pipeline.name, self._step.name

    @property
    def lease(self) -> Lease:
        return self._claimed.lease

    @property
    def job_id(self) -> UUID:
        return self._claimed.job_id

    @property
    def tenant_id(self) -> str:
        return self._claimed.tenant_id

    @property
    def task_id(self) -> UUID:
        return self._claimed.lease.task_id

    @property
    def previous_state(self) -> str:
        return self._claimed.previous_state

    @property
    def step(self) -> str:
        return self._step.name

    @property
    def is_part(self) -> bool:
        return self._claimed.pipeline != self._pipeline.name

    @property
    def number(self) -> int:
        return self._claimed.lease.attempt

    @property
    def errors(self) -> int:
        return self._claimed.errors

    @property
    def is_last(self) -> bool:
        return self.errors + 1 >= self._step.max_attempts

    @property
    def directory(self) -> Path:
        self.used_directory = True
        directory = self._directories.path_of(self.lease)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        return primary_connection(self._pool, self._held)

    async def read(self, name: str) -> bytes:
        for source in await sources_of(self._pool, self._held, self._pipeline, self._step, self._claimed):
            if source.name == name:
                return await self._store.fetch_bytes(source.key, sha256=source.sha256, max_bytes=MAX_READ_BYTES)
        raise ObjectMissing(f"step {self.step} reads nothing named {name!r}")

    async def write(self, name: str, data: bytes, content_type: str, *, own: bool = False) -> None:
        # With `own`, the key of a template's step contains the step's name, because several steps may have the same
        # code. A step that a workflow has started, and a part of a fan-out, have output prefixes of their own, and need
        # no such key. Their names have a `#` or a point, so they do not match NAME.
        has_own_key = own and self.is_part and NAME.fullmatch(self._claimed.step) is not None
        await self._publish(name, data, content_type, f"{self._claimed.step}/{name}" if has_own_key else name)

    async def write_file(self, name: str, path: Path, content_type: str) -> None:
        await self._publish(name, path, content_type, name)

    async def _publish(self, name: str, source: bytes | Path, content_type: str, key_name: str) -> None:
        if not self._held.trusted():
            raise LeaseLost
        stored = await self._store.put(
            output_key(self._claimed.output_prefix, key_name),
            source,
            content_type=content_type,
            metadata=writer_of(self.lease),
            may_replace=replacement_rule(self._held),
        )
        self.outputs[name] = Output(name, stored.key, stored.size, stored.sha256, stored.content_type)

    async def value(self, step: str) -> Any:
        return await self._on_primary(partial(value_of, job_id=self.job_id, step=step))

    async def item(self) -> Any:
        return await item_of(self._pool, self._held)

    async def joined(self) -> list[Any] | None:
        """The results of the parts that the task has fanned out into, or None if the task has no parts."""
        rows = await self._on_primary(
            lambda connection: connection.fetch(
                "SELECT r.value FROM item i LEFT JOIN result r ON r.task_id = i.task_id"
                " WHERE i.parent_id = $1 ORDER BY i.number",
                self.task_id,
            )
        )
        return [row["value"] for row in rows] or None

    @property
    def log(self) -> Any:
        # The logger gets no further fields, because the log context names job, task and step already.
        if structlog.get_config()["processors"][-1:] == [structlog.stdlib.ProcessorFormatter.wrap_for_formatter]:
            return structlog.get_logger(self.pipeline.module)
        # Here structlog is not configured as in a worker, for example because a user's own program runs the worker. The
        # program's configuration would render the line as text and lose the fields. So wrap the standard logger, which
        # keeps the fields.
        return structlog.wrap_logger(
            logging.getLogger(self.pipeline.module),
            processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def progress(self, percent: float, summary: str = "") -> None:
        self._reporter.report(self.lease, float(percent), summary)

    def emit(self, chunk: Any) -> bool:
        stream = None if self._log_source is None else self._log_source.recorder.stream
        return stream is not None and stream.emit(chunk)

    def checkpoint(self) -> None:
        if self._held.cancelled:
            raise Cancelled
        if not self._held.trusted():
            raise LeaseLost

    async def heartbeat(self) -> None:
        await asyncio.sleep(0)
        self.checkpoint()

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Publish hints (messages that a task is due) soon. Steps of the platform that change other jobs call this
        after their commit.
        """
        self._announcer.announce(announcements)

    async def drive(self, start: Callable[[Driver], Coroutine[Any, Any, Any]]) -> Outcome:
        """Run the workflow whose coroutine `start` makes, until it waits or has ended."""
        return await self._workflows.drive(self, self._held, self.slot, start)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function: in the loop if it is an `async def`, else in a thread."""
        return await self._workflows.call(function, self.slot, self.handler)

    async def note(self) -> dict[str, Any]:
        if self.lease.epoch == 1:  # no earlier attempt has remembered anything
            return {}
        return await self._on_primary(partial(note_of, task_id=self.task_id))

    async def _on_primary(self, work: Callable[[Connection], Awaitable[_Answer]]) -> _Answer:
        return await on_primary(self._pool, self._held, work)

    async def remember(self, note: Mapping[str, Any], connection: Connection | None = None) -> None:
        _finite(note, "the note")
        if connection is not None:
            await self._remember_on(connection, note)
            return
        await self._on_primary(partial(notes.remember, lease=self.lease, note=note))

    async def _remember_on(self, connection: Connection, note: Mapping[str, Any]) -> None:
        """Write the note on `connection`, which the handler gave. Raises Permanent `bad_connection` if that fails."""
        if is_of_platform(connection):
            await notes.remember(connection, self.lease, note)
            return
        refusal = Permanent(
            "bad_connection",
            "remember takes a connection that the attempt lends:"
            " async with attempt.connection() as connection, connection.transaction()",
        )
        if not hasattr(connection, "fetchval"):  # the object is no connection of asyncpg
            raise refusal
        try:
            await notes.remember(connection, self.lease, note)
        except asyncpg.UntranslatableCharacterError:  # it is also a DataError, but the cause is a NUL in the note
            raise
        except (asyncpg.DataError, asyncpg.UndefinedTableError) as error:
            raise refusal from error


def _params(pipeline: Pipeline, claimed: Claimed) -> Any:
    try:
        return params_of_json(pipeline.params, claimed.params)
    except ValidationError as error:
        raise Permanent("bad_params", f"the parameters do not fit pipeline {pipeline.name}") from error


class InlineAttempts:
    """Runs all inline attempts of one worker. `opened`: pipeline -> what its opener has opened. `on_most_stuck`: called
    when over half of the worker's threads are stuck (threads.py).
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        pool: Pool,
        reporter: Reporter,
        directories: Directories,
        opened: Mapping[str, Any],
        journals: Journals,
        announcer: Announcer,
        settings: Settings,
        on_most_stuck: Callable[[], None],
    ) -> None:
        self._store = store
        self._pool = pool
        self._reporter = reporter
        self._directories = directories
        self._opened = opened
        self._announcer = announcer
        self._threads = Threads(settings.worker_threads, on_most_stuck)
        self.workflows = Workflows(settings, pool, store, journals, self._threads)
        self._blocked_after = settings.loop_blocked_seconds  # `Watched` reports handlers that block the loop longer
        self._plain: dict[tuple[str, str], bool] = {}  # (pipeline, step) -> the answer of `_is_plain`

    def close(self) -> None:
        """Call this when no attempt runs any more."""
        self.workflows.close()
        self._threads.close()

    async def perform(
        self, claimed: Claimed, pipeline: Pipeline, step: Step, held: HeldLease, seconds: float, slot: Slot
    ) -> Completion | Snoozing | Suspending | FanningOut:
        """Run the attempt. Raises what the handler raises, and StepTimeout after `seconds`."""
        attempt = InlineAttempt(
            claimed,
            pipeline,
            step,
            held,
            self._store,
            self._pool,
            self._reporter,
            opened=self._opened.get(pipeline.name),
            directories=self._directories,
            workflows=self.workflows,
            announcer=self._announcer,
            slot=slot,
        )
        try:
            return await self._call_if_room(attempt, seconds)
        finally:
            if attempt.used_directory:
                await self._directories.remove(claimed.lease)

    def _is_plain(self, pipeline: Pipeline, step: str) -> bool:
        """Whether the step's handler is a plain function. The answer is cached, because the check takes 1 µs."""
        key = (pipeline.name, step)
        if key not in self._plain:
            self._plain[key] = is_plain(pipeline.handlers[step])
        return self._plain[key]

    async def _call_if_room(
        self, attempt: InlineAttempt, seconds: float
    ) -> Completion | Snoozing | Suspending | FanningOut:
        """Reserve room for the attempt, then call the handler. Without room the attempt snoozes. A plain handler needs
        a thread. An `async def` handler needs the admission of the pipeline's own rule (`room`), if there is such a
        rule.
        """
        pipeline = attempt.pipeline
        if self._is_plain(pipeline, attempt.step):
            return await self._call_if_thread(attempt, seconds)
        if pipeline.room is None:
            return await self._call_in_middlewares(attempt, seconds, None)
        async with AsyncExitStack() as stack:
            with attempt.slot.lent():  # while this attempt waits for room, another attempt may run in its slot
                has_room = await stack.enter_async_context(pipeline.room(attempt))
            if not has_room:
                return Snoozing(attempt.lease, _ROOM_SECONDS)
            return await self._call_in_middlewares(attempt, seconds, None)

    async def _call_if_thread(
        self, attempt: InlineAttempt, seconds: float
    ) -> Completion | Snoozing | Suspending | FanningOut:
        """Reserve a thread, then call the plain handler. The attempt snoozes if no thread becomes free."""
        thread = await self._threads.reserve(_ROOM_SECONDS, attempt.slot)
        if thread is None:
            return Snoozing(attempt.lease, _ROOM_SECONDS)
        try:
            return await self._call_in_middlewares(attempt, seconds, thread)
        finally:
            thread.end()

    async def _call_in_middlewares(
        self, attempt: InlineAttempt, seconds: float, thread: Reservation | None
    ) -> Completion | Snoozing | Suspending | FanningOut:
        """Call the handler inside the pipeline's middlewares, if it has any."""
        if attempt.pipeline.around is None:
            return await self._call_handler(attempt, seconds, thread)
        settlement: Completion | Snoozing | Suspending | FanningOut | None = None
        async with attempt.pipeline.around(attempt):
            settlement = await self._call_handler(attempt, seconds, thread)
        if settlement is None:
            raise Permanent(
                "middleware_error", "a middleware caught the handler's error and did not raise it again: it must"
            )
        return settlement

    async def _call_handler(
        self, attempt: InlineAttempt, seconds: float, thread: Reservation | None
    ) -> Completion | Snoozing | Suspending | FanningOut:
        """Call the handler: in `thread` if it is plain, else in the event loop."""
        pipeline, step = attempt.pipeline, attempt.step
        handler = pipeline.handlers[step]
        try:
            async with asyncio.timeout(seconds) as limit:
                work = handler(attempt) if thread is None else in_thread(handler, attempt, thread, attempt.handler)
                returned = await Watched(work, pipeline.name, step, self._blocked_after)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the handler's own TimeoutError
            # `from error`: the traceback in the attempt's log then shows where the handler waited.
            raise StepTimeout("step_timeout", f"the step ran longer than {seconds:g} s") from error
        return _settlement(attempt, returned)


def _settlement(attempt: InlineAttempt, returned: object) -> Completion | Snoozing | Suspending | FanningOut:
    """The settlement for what the handler returned. Raises Permanent `bad_answer`."""
    if returned is None or isinstance(returned, Mapping):
        returned = Done(value=returned)
    outputs = list(attempt.outputs.values())
    match returned:
        case Done(files=files) if files:
            reason = "an inline step cannot return files: store them with `write` or `write_file`"
            raise Permanent("bad_answer", f"the handler of {attempt.step} returned files; {reason}")
        case Done(value=value):
            return Completion(attempt.lease, outputs, _finite(value, "the value of the step"))
        case Snooze():
            note = _finite(returned.note, "the note of the snooze")
            # LeftToOthers: the step needs a handler that this worker lacks.
            missing_handler = returned.handler if isinstance(returned, LeftToOthers) else None
            seconds = _seconds_until(returned.until)
            return Snoozing(attempt.lease, seconds, note, outputs, missing_handler, by_step=True)
        case Suspending():  # the workflow waits: its handler returned the suspension that it got from `drive`
            return returned
        case FanOut():
            return FanningOut(attempt.lease, _parts(attempt.pipeline, returned), outputs)
    allowed = "Done, Snooze, FanOut, a mapping or None"
    kind = with_article(type(returned).__name__)
    raise Permanent("bad_answer", f"the handler of {attempt.step} returned {kind}, not {allowed}")


def _finite(value: _Answer, what: str) -> _Answer:
    """Returns `value`. Raises Permanent `bad_output` for NaN and infinity, which readers would get as null."""
    if value is not None and (path := path_to_non_finite(value)) is not None:
        raise Permanent("bad_output", f"{what} has NaN or infinity at {path or 'its root'}: JSON has neither")
    return value


def _parts(pipeline: Pipeline, fan_out: FanOut) -> list[Part]:
    step = pipeline.by_name.get(fan_out.step)
    if step is None or not step.part:
        raise Permanent("bad_answer", f"pipeline {pipeline.name} declares no part {fan_out.step!r}")
    if not 1 <= len(fan_out.items) <= MAX_ITEMS:
        raise Permanent("bad_answer", f"a step fans out into 1 to {MAX_ITEMS} parts, not {len(fan_out.items)}")
    _finite(list(fan_out.items), "the items of the fan-out")
    handler = f"{pipeline.name}.{step.name}"
    return [Part(step.name, step.queue, step.max_attempts, handler, item) for item in fan_out.items]


def _seconds_until(until: datetime | timedelta) -> float:
    delay = until if isinstance(until, timedelta) else until - datetime.now(UTC)
    return max(delay.total_seconds(), 0.0)
