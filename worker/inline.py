"""Running an inline handler: in the worker's own loop, with its time limit."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from leasehold.artifacts import note_of
from leasehold.database import Pool
from leasehold.errors import LeaseLost, ObjectMissing, ObjectTooLarge, Permanent, StepTimeout
from leasehold.keys import output_key
from leasehold.pipeline import Pipeline, Step
from leasehold.storage.store import ObjectStore
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Output, Parking
from leasehold.verdicts import Done, Park
from worker.heartbeat import Held
from worker.inputs import sources_of

#: An inline handler keeps what it reads in memory; larger inputs belong to isolated steps.
MAX_READ_BYTES = 64 * 1024 * 1024


class InlineAttempt:
    """The worker's `leasehold.attempt.Attempt`."""

    def __init__(
        self, claimed: Claimed, pipeline: Pipeline, step: Step, held: Held, store: ObjectStore, pool: Pool
    ) -> None:
        self._claimed = claimed
        self._pipeline = pipeline
        self._step = step
        self._held = held
        self._store = store
        self._pool = pool
        self.params = _params(pipeline, claimed)
        self.outputs: dict[str, Output] = {}

    @property
    def job_id(self) -> UUID:
        return self._claimed.job_id

    @property
    def task_id(self) -> UUID:
        return self._claimed.lease.task_id

    @property
    def step(self) -> str:
        return self._step.name

    @property
    def number(self) -> int:
        return self._claimed.lease.attempt

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
        stored = await self._store.put_bytes(
            output_key(self._claimed.output_prefix, name),
            data,
            content_type=content_type,
            metadata={},
            may_replace=self._held.trusted,
        )
        self.outputs[name] = Output(name, stored.key, stored.size, stored.sha256, stored.content_type)

    async def note(self) -> dict[str, Any]:
        if self._claimed.was != "waiting":
            return {}
        async with self._pool.acquire() as connection:
            return await note_of(connection, self.task_id)


def _params(pipeline: Pipeline, claimed: Claimed) -> Any:
    try:
        return pipeline.params.model_validate(claimed.params)
    except ValidationError as error:
        raise Permanent("bad_params", f"the parameters do not fit pipeline {pipeline.name}") from error


async def perform(
    claimed: Claimed, pipeline: Pipeline, step: Step, held: Held, store: ObjectStore, pool: Pool
) -> Completion | Parking:
    """Raises what the handler raises, and StepTimeout past the step's limit."""
    attempt = InlineAttempt(claimed, pipeline, step, held, store, pool)
    seconds = step.timeout.total_seconds()
    try:
        async with asyncio.timeout(seconds) as limit:
            said = await pipeline.handlers[step.name](attempt)
    except TimeoutError:
        if not limit.expired():
            raise  # the handler's own
        raise StepTimeout("step_timeout", f"the step ran longer than {seconds:g} s") from None
    if isinstance(said, Done) and not said.files:
        return Completion(claimed.lease, list(attempt.outputs.values()), said.value)
    if isinstance(said, Park):
        return Parking(claimed.lease, _seconds_until(said.until), said.note)
    raise Permanent("bad_answer", f"the handler of {step.name} returned a {type(said).__name__}, not Done or Park")


def _seconds_until(until: datetime | timedelta) -> float:
    delay = until if isinstance(until, timedelta) else until - datetime.now(UTC)
    return max(delay.total_seconds(), 0.0)
