"""Drives a media's job by the transitions themselves, as a worker would."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

from leasehold.db.database import Connection
from leasehold.transitions import claims, settlements
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.transitions.settlements import Completion, Failure, Output

TERMS = LeaseTerms(uuid4(), 30.0, 5.0, 5)
ORIGINAL = {"original": {"width": 640, "height": 480}}


async def claim_step(rows: Connection, media_id: str) -> Claimed:
    """The step of the media that may run now."""
    task_id = await rows.fetchval(
        "SELECT t.id FROM task t JOIN media m ON m.job_id = t.job_id"
        " WHERE m.id = $1 AND t.status IN ('pending', 'retry') ORDER BY t.position LIMIT 1",
        UUID(media_id),
    )
    (claimed,) = await claims.claim(rows, TERMS, [task_id])
    return claimed


async def finish_step(rows: Connection, claimed: Claimed, *names: str, value: dict[str, Any] | None = None) -> None:
    outputs = [Output(name, f"{claimed.output_prefix}/{name}", 100, "0" * 64, "image/webp") for name in names]
    await settlements.complete(rows, [Completion(claimed.lease, outputs, value)])


async def fail_step(rows: Connection, claimed: Claimed, code: str, *, retryable: bool) -> None:
    await settlements.fail(rows, [Failure(claimed.lease, "error", code, "It did not work.", retryable, 0.0)])


async def finish_all(rows: Connection, media_id: str, *variants: str) -> None:
    await finish_step(rows, await claim_step(rows, media_id), "resize.jpg", value=ORIGINAL)
    await finish_step(rows, await claim_step(rows, media_id), "compress.jpg")
    await finish_step(rows, await claim_step(rows, media_id), "final.webp", *variants)
