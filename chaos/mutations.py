"""The mutations: each removes one guard of the platform, and the checker must notice it.

Each function changes the platform in the memory of the calling process, before its main starts. It raises LookupError
if the platform no longer has the text that it would change: then rewrite the mutation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leasehold.broker.amqp.publisher import Publisher
from leasehold.broker.base import Delivery, Hint
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.storage.content import digest_of_bytes
from leasehold.storage.store import ObjectStore, Stored
from leasehold.transitions import settlements
from leasehold.transitions.claims import LeaseTerms
from leasehold.transitions.settlements import (
    Completion,
    Settled,
    cancellation,
    completion,
    failing,
    fanning_out,
    releasing,
    snoozing,
)

_SETTLEMENTS = (cancellation, completion, failing, fanning_out, releasing, snoozing)


def _replaced(text: str, part: str, instead: str = "") -> str:
    """The text with `instead` in place of `part`. Raises LookupError if the text lacks the part."""
    if part not in text:
        raise LookupError(f"nothing to mutate: {part!r} is not in the statement")
    return text.replace(part, instead)


def _in_settlements(part: str, instead: str) -> None:
    """Replace the guard `part` in every settlement statement. Raises LookupError if one of them lacks it."""
    guarded = [
        (module, name)
        for module in _SETTLEMENTS
        for name, text in vars(module).items()
        if name.isupper() and isinstance(text, str) and part in text
    ]
    if {module for module, _ in guarded} != {*_SETTLEMENTS}:
        raise LookupError(f"nothing to mutate: not every settlement has {part!r}")
    for module, name in guarded:
        setattr(module, name, getattr(module, name).replace(part, instead))


def epoch() -> None:
    """Settlements do not compare the epoch: a worker that held the task before may settle it now."""
    _in_settlements(" AND t.epoch = a.epoch AND t.status = 'running'", " AND t.status = 'running'")


def fence() -> None:
    """Settlements compare neither the epoch nor the owner."""
    _in_settlements("t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running'", "t.status = 'running'")


def ack() -> None:
    """A worker acknowledges a hint on its arrival, before the claim and the commit."""
    slot_pool = __import__("leasehold.worker.claiming.slot_pool", fromlist=["SlotPool"]).SlotPool
    follow = slot_pool._follow  # noqa: SLF001 - the mutation changes the order of its two acts

    async def acknowledged_first(self: Any, delivery: Delivery) -> None:
        await delivery.ack()
        await follow(self, delivery)

    slot_pool._follow = acknowledged_first  # noqa: SLF001 - as above


def outbox() -> None:
    """A completion commits first, and writes the next step's hint into the outbox afterwards."""
    start = completion.COMPLETE.index(", hints AS (")
    before, hinted = completion.COMPLETE[:start], completion.COMPLETE[start:]
    hinted = _replaced(
        hinted,
        "INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)\n    SELECT f.id, f.job_id,",
        "SELECT f.id AS task_id, 0::bigint AS id,",
    )
    hinted = _replaced(hinted, "f.trace, clock_timestamp() + interval '1 second'\n", "f.trace AS headers\n")
    text = before + _replaced(hinted, "\n    RETURNING id, task_id, queue, priority, headers")
    completion.COMPLETE = text
    complete = settlements.complete

    async def complete_and_then_hint(
        connection: Connection, completions: Sequence[Completion], terms: LeaseTerms | None = None
    ) -> Settled:
        settled = await complete(connection, completions, terms)
        settled.announcements[:] = [
            Announcement(await _write_hint(connection, announced.hint), announced.hint)
            for announced in settled.announcements
        ]
        return settled

    settlements.complete = complete_and_then_hint


async def _write_hint(connection: Connection, hint: Hint) -> int:
    written: int = await connection.fetchval(
        "INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)"
        " SELECT id, job_id, queue, priority, $2, clock_timestamp() + interval '1 second' FROM task WHERE id = $1"
        " RETURNING id",
        hint.task_id,
        dict(hint.headers),
    )
    return written


def overwrite() -> None:
    """Puts are not create-only: the last writer wins."""

    async def put(self: Any, key: str, source: Any, *, content_type: str, metadata: Any, **_ruled: Any) -> Stored:
        data = source.read_bytes() if isinstance(source, Path) else source
        signed = {**metadata, "sha256": digest_of_bytes(data)}
        etag = await self._put_once(key, data, content_type, signed)
        return Stored(key, len(data), signed["sha256"], content_type, etag, signed)

    ObjectStore.put = put  # type: ignore[method-assign]  # the guard itself


def confirm() -> None:
    """A hint counts as sent once the connection has its bytes, whether or not the broker confirms it."""
    publish = Publisher.publish
    sending: set[asyncio.Task[list[bool]]] = set()

    async def published(self: Publisher, hints: Sequence[Hint]) -> list[bool]:
        task = asyncio.create_task(publish(self, hints))
        sending.add(task)
        task.add_done_callback(sending.discard)
        return [True] * len(hints)

    Publisher.publish = published  # type: ignore[method-assign]  # the guard itself


MUTATIONS: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation for mutation in (epoch, fence, ack, outbox, overwrite, confirm)
}
#: Mutation -> the invariant that must be violated without the guard. A violation of another invariant proves nothing.
CAUGHT_BY = {"epoch": "I6", "fence": "I6", "ack": "I9", "outbox": "I10", "overwrite": "I12", "confirm": "I10"}
