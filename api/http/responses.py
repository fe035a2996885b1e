"""Answers of every endpoint: JSON, and what is announced after a commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson
from fastapi import Response

from leasehold.api.process.services import Services
from leasehold.broker.outbox import Announcement
from leasehold.exporter.jobs import jobs_ended
from leasehold.transitions import gates
from leasehold.transitions.gates import ConcurrencyLimitName
from leasehold.transitions.runs import Made


def encoded(said: Any) -> bytes:
    """As JSON; the driver's own kind of UUID, which orjson does not know, by its text."""
    return orjson.dumps(said, option=orjson.OPT_UTC_Z, default=str)


def json_response(said: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = said if isinstance(said, bytes) else encoded(said)
    return Response(body, status, headers, media_type="application/json")


async def tell(
    services: Services,
    hints: Sequence[Announcement],
    names: Sequence[ConcurrencyLimitName] = (),
    left: Sequence[UUID] = (),
) -> None:
    """After a commit: publish its hints, and let in whom its gates have room for, once `left` have left them."""
    services.announcer.announce(hints)
    if names:
        async with services.pool.acquire() as connection:
            services.announcer.announce(await gates.admit(connection, names, left))


async def tell_of(services: Services, made: Made) -> None:
    """After the commit of a run: what follows from it, and from those that it replaced."""
    jobs_ended(made.ended)
    await tell(services, made.hints, made.gates, made.left)
