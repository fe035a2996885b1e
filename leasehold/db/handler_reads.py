"""Reads which workers can run a step: those that serve its queue, and those that have its handler."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

from leasehold.db.database import Connection

#: The queue of a step, and the `pipeline.step` of its code.
Place: TypeAlias = tuple[str, str]

#: `served` reads the workers for at most this many places.
_MAX_PLACES = 50
#: `names_of` reads at most this many handlers.
_MAX_NAMES = 1000


@dataclass(frozen=True, slots=True)
class Served:
    """How a place is served by the living workers that are not asked to drain.

    `workers`: how many of them serve the queue. `able`: how many of those have the handler, or are of an older release
    and do not tell. `elsewhere`: how many have the handler and do not serve the queue. `seen_at`: when a worker with
    the handler was last seen; None: none is recorded.
    """

    workers: int
    able: int
    elsewhere: int
    seen_at: datetime | None


# $1 the queues and $2 the handlers of the places, $3 the dead workers. A worker's row is read once for each place.
_SERVED = """
-- served
SELECT a.queue, a.handler, count(*) FILTER (WHERE w.lives AND w.serves) AS workers,
       count(*) FILTER (WHERE w.lives AND w.serves AND w.has IS NOT false) AS able,
       count(*) FILTER (WHERE w.lives AND NOT w.serves AND w.has) AS elsewhere,
       greatest((SELECT k.seen_at FROM known_handler k WHERE k.name = a.handler),
                max(w.seen_at) FILTER (WHERE w.has)) AS seen_at
FROM unnest($1::text[], $2::text[]) AS a(queue, handler)
LEFT JOIN LATERAL (
    SELECT a.queue = ANY(o.queues) AS serves, a.handler = ANY(o.handlers) AS has, o.seen_at,
           NOT o.draining AND o.id <> ALL($3::uuid[]) AS lives
    FROM worker o
) AS w ON true
GROUP BY a.queue, a.handler
"""


async def served(connection: Connection, places: Collection[Place], dead: Sequence[UUID]) -> dict[Place, Served]:
    """How each of the places is served, of the first _MAX_PLACES. `dead`: workers that are known to have ended."""
    some = sorted(set(places))[:_MAX_PLACES]
    rows = await connection.fetch(_SERVED, [queue for queue, _ in some], [handler for _, handler in some], list(dead))
    return {
        (row["queue"], row["handler"]): Served(row["workers"], row["able"], row["elsewhere"], row["seen_at"])
        for row in rows
    }


_NAMES = """
-- handler_names
SELECT DISTINCT h.name FROM worker w CROSS JOIN unnest(w.handlers) AS h(name) WHERE $1 = ANY(w.queues)
ORDER BY 1 LIMIT $2
"""


async def names_of(connection: Connection, queue: str) -> list[str]:
    """Handlers of the workers that serve the queue, at most _MAX_NAMES."""
    return [row["name"] for row in await connection.fetch(_NAMES, queue, _MAX_NAMES)]
