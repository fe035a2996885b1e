"""Running an inline handler: in the worker's own loop, with its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog
from pydantic import ValidationError

from leasehold.db.artifacts import note_of, value_of
from leasehold.db.database import Connection, Pool
from leasehold.domain.errors import Cancelled, LeaseLost, ObjectMissing, ObjectTooLarge, Permanent, StepTimeout
from leasehold.domain.lease import Lease
from leasehold.domain.object_keys import output_key
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.verdicts import Done, FanOut, Snooze
from leasehold.storage.store import ObjectStore
from leasehold.transitions import notes
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, FanningOut, Output, Part, Snoozing
from leasehold.worker.attempts.heartbeat import Held
from leasehold.worker.attempts.inputs import sources_of
from leasehold.worker.attempts.plain import in_thread, is_plain
from leasehold.worker.attempts.publishing import replaceable, signed
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.attempts.stalls import Watched
from leasehold.worker.attempts.threads import Threads

#: An inline handler keeps what it reads in memory; larger inputs belong to isolated steps.
MAX_READ_BYTES = 64 * 1024 * 1024
#: How long a plain handler waits for a thread, with its lease in hand, and then without it.
_THREAD_SECONDS = 5.0
#: The most parts that one step may spread into.
MAX_ITEMS = 1000


class InlineAttempt:
    """The worker's `leasehold.domain.attempt.Attempt`."""

    def __init__(
        self,
        claimed: Claimed,
        pipeline: Pipeline,
        step: Step,
        held: Held,
        store: ObjectStore,
        pool: Pool,
        reporter: Reporter,
        opened: Any,
        directory: Callable[[], Path],
    ) -> None:
        self._claimed = claimed
        self._pipeline = pipeline
        self._step = step
        self._held = held
        self._store = store
        self._pool = pool
        self._reporter = reporter
        self._directory = directory
        self.opened = opened
        self.params = _params(pipeline, claimed)
        self.outputs: dict[str, Output] = {}
        self.used_directory = False

    @property
    def pipeline(self) -> Pipeline:
        return self._pipeline

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
    def step(self) -> str:
        return self._step.name

    @property
    def number(self) -> int:
        return self._claimed.lease.attempt

    @property
    def directory(self) -> Path:
        self.used_directory = True
        directory = self._directory()
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        return self._pool.acquire()

    async def read(self, name: str) -> bytes:
        for source in await sources_of(self._pool, self._pipeline, self._step, self._claimed):
            if source.name == name:
                try:
                    return await self._store.fetch_bytes(source.key, sha256=source.sha256, max_bytes=MAX_READ_BYTES)
                except ObjectTooLarge as error:
                    raise Permanent("input_too_large", str(error)) from error
        raise ObjectMissing(f"step {self.step} reads nothing named {name!r}")

    async def write(self, name: str, data: bytes, content_type: str) -> None:
        if not self._held.trusted():
            raise LeaseLost
        stored = await self._store.put(
            output_key(self._claimed.output_prefix, name),
            data,
            content_type=content_type,
            metadata=signed(self.lease),
            may_replace=replaceable(self._held),
        )
        self.outputs[name] = Output(name, stored.key, stored.size, stored.sha256, stored.content_type)

    async def write_file(self, name: str, path: Path, content_type: str) -> None:
        if not self._held.trusted():
            raise LeaseLost
        stored = await self._store.put(
            output_key(self._claimed.output_prefix, name),
            path,
            content_type=content_type,
            metadata=signed(self.lease),
            may_replace=replaceable(self._held),
            fresh=self.lease.epoch == 1,
        )
        self.outputs[name] = Output(name, stored.key, stored.size, stored.sha256, stored.content_type)

    async def value(self, step: str) -> Any:
        async with self._pool.acquire() as connection:
            return await value_of(connection, self.job_id, step)

    async def item(self) -> Any:
        return await item_of(self._pool, self._claimed)

    async def joined(self) -> list[Any] | None:
        async with self._pool.acquire() as connection:
            rows = await connection.fetch(
                "SELECT r.value FROM item i LEFT JOIN result r ON r.task_id = i.task_id"
                " WHERE i.parent_id = $1 ORDER BY i.number",
                self.task_id,
            )
        return [row["value"] for row in rows] or None

    @property
    def log(self) -> Any:
        return structlog.get_logger(self.pipeline.module)  # job, task and step are in the context already

    def progress(self, percent: float, summary: str = "") -> None:
        self._reporter.say(self.lease, float(percent), summary)

    def checkpoint(self) -> None:
        if self._held.cancelled:
            raise Cancelled
        if not self._held.trusted():
            raise LeaseLost

    async def heartbeat(self) -> None:
        await asyncio.sleep(0)
        self.checkpoint()

    async def note(self) -> dict[str, Any]:
        if self.lease.epoch == 1:
            return {}
        async with self._pool.acquire() as connection:
            return await note_of(connection, self.task_id)

    async def remember(self, note: Mapping[str, Any]) -> None:
        async with self._pool.acquire() as connection:
            await notes.remember(connection, self.lease, note)


def _params(pipeline: Pipeline, claimed: Claimed) -> Any:
    try:
        return pipeline.params.model_validate(claimed.params)
    except ValidationError as error:
        raise Permanent("bad_params", f"the parameters do not fit pipeline {pipeline.name}") from error


async def item_of(pool: Pool, claimed: Claimed) -> Any:
    async with pool.acquire() as connection:
        return await connection.fetchval("SELECT value FROM item WHERE task_id = $1", claimed.lease.task_id)


async def perform(
    attempt: InlineAttempt, seconds: float, threads: Threads, blocked_after: float
) -> Completion | Snoozing | FanningOut:
    """Raises what the handler raises, and StepTimeout after `seconds`. A plain handler that finds no thread snoozes."""
    handler = attempt.pipeline.handlers[attempt.step]
    plain = is_plain(handler)
    if plain and not await threads.keep(_THREAD_SECONDS):
        return Snoozing(attempt.lease, _THREAD_SECONDS)
    try:
        async with asyncio.timeout(seconds) as limit:
            work = in_thread(handler, attempt, threads) if plain else handler(attempt)
            said = await Watched(work, attempt.pipeline.name, attempt.step, blocked_after)
    except TimeoutError:
        if not limit.expired():
            raise  # the handler's own
        raise StepTimeout("step_timeout", f"the step ran longer than {seconds:g} s") from None
    return _settlement(attempt, said)


def _settlement(attempt: InlineAttempt, said: object) -> Completion | Snoozing | FanningOut:
    if said is None or isinstance(said, Mapping):
        said = Done(value=said)
    if isinstance(said, Done) and not said.files:
        return Completion(attempt.lease, list(attempt.outputs.values()), said.value)
    if isinstance(said, Snooze):
        return Snoozing(attempt.lease, _seconds_until(said.until), said.note)
    if isinstance(said, FanOut):
        return FanningOut(attempt.lease, _parts(attempt.pipeline, said))
    raise Permanent(
        "bad_answer",
        f"the handler of {attempt.step} returned a {type(said).__name__}, not Done, Snooze, FanOut, a mapping or None",
    )


def _parts(pipeline: Pipeline, said: FanOut) -> list[Part]:
    step = pipeline.by_name.get(said.step)
    if step is None or not step.part:
        raise Permanent("bad_answer", f"{said.step!r} is not declared as a part of pipeline {pipeline.name}")
    if not 1 <= len(said.items) <= MAX_ITEMS:
        raise Permanent("bad_answer", f"a step spreads into 1 to {MAX_ITEMS} parts, not {len(said.items)}")
    handler = f"{pipeline.name}.{step.name}"
    return [Part(step.name, step.queue, step.max_attempts, handler, item) for item in said.items]


def _seconds_until(until: datetime | timedelta) -> float:
    delay = until if isinstance(until, timedelta) else until - datetime.now(UTC)
    return max(delay.total_seconds(), 0.0)
