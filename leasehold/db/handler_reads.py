"""Reads which workers serve a step's queue, and which workers have the step's handler. Only a worker with both can run
the step.

The API and the worker call this module to explain why a task waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

from leasehold.db.database import Connection

#: Where a step can run: (its queue, its handler). A handler is the code of a step, named `pipeline.step`. A worker can
#: run the step if it serves the queue and has the handler. If a step needs several handlers, the text names all of
#: them: `a.b, c.d` (missing_code.py).
Place: TypeAlias = tuple[str, str]

#: `served` answers for at most this many places.
_MAX_PLACES = 50
#: `handlers_of_queue` returns at most this many names.
_MAX_NAMES = 1000


@dataclass(frozen=True, slots=True)
class Served:
    """How many living workers serve a place. Draining workers are left out.

    `workers`: workers that serve the queue. `able`: the workers among these that have the handler, or whose version of
    the platform is too old to report its handlers. `elsewhere`: workers that have the handler, but do not serve the
    queue. `seen_at`: when a worker with the handler was last seen; None: no such worker is recorded.
    """

    workers: int
    able: int
    elsewhere: int
    seen_at: datetime | None


# $1 the queues and $2 the handlers of the places, $3 the dead workers. `candidate` has a row for each pair of a place
# and a worker. The row says whether the worker lives, whether it serves the queue, and whether it has the handler
# (NULL: the worker has not reported its handlers). The table `known_handler` has the time at which each handler was
# last seen. It keeps this time even after the rows of the handler's workers are deleted.
_SERVED = """
-- served
SELECT place.queue, place.handler,
       count(*) FILTER (WHERE candidate.lives AND candidate.serves_queue) AS workers,
       count(*) FILTER (WHERE candidate.lives AND candidate.serves_queue
                          AND candidate.has_handler IS NOT false) AS able,
       count(*) FILTER (WHERE candidate.lives AND NOT candidate.serves_queue AND candidate.has_handler) AS elsewhere,
       greatest((SELECT k.seen_at FROM known_handler k WHERE k.name = place.handler),
                max(candidate.seen_at) FILTER (WHERE candidate.has_handler)) AS seen_at
FROM unnest($1::text[], $2::text[]) AS place(queue, handler)
LEFT JOIN LATERAL (
    SELECT place.queue = ANY(w.queues) AS serves_queue, w.seen_at,
           string_to_array(place.handler, ', ') <@ w.handlers AS has_handler,
           NOT w.draining AND w.id <> ALL($3::uuid[]) AS lives
    FROM worker w
) AS candidate ON true
GROUP BY place.queue, place.handler
"""


async def served(connection: Connection, places: Collection[Place], dead: Sequence[UUID]) -> dict[Place, Served]:
    """How many workers serve each place. The answer has at most _MAX_PLACES places, the first in sorted order. `dead`:
    the ids of workers that have died, but still have a row.
    """
    first_places = sorted(set(places))[:_MAX_PLACES]
    queues, handlers = [queue for queue, _ in first_places], [handler for _, handler in first_places]
    rows = await connection.fetch(_SERVED, queues, handlers, list(dead))
    return {
        (row["queue"], row["handler"]): Served(row["workers"], row["able"], row["elsewhere"], row["seen_at"])
        for row in rows
    }


# $1 queue, $2 pipelines. The name of a handler is `pipeline.step`, so without its last part it is the pipeline's name.
_OF_PIPELINES = """
-- handlers_of_pipelines
SELECT name.pipeline, min(h.name) AS handler
FROM worker w CROSS JOIN unnest(w.handlers) AS h(name)
CROSS JOIN LATERAL (SELECT regexp_replace(h.name, '\\.[^.]*$', '') AS pipeline) AS name
WHERE NOT w.draining AND $1 = ANY(w.queues) AND name.pipeline = ANY($2::text[])
GROUP BY name.pipeline
"""


async def handlers_of_pipelines(connection: Connection, queue: str, pipelines: Collection[str]) -> dict[str, str]:
    """Returns pipeline -> one handler (`pipeline.step`) of the pipeline that a registered worker of the queue has.
    Pipelines without such a handler are absent. Draining workers are left out. This function does not check whether a
    worker lives (see `LEASEHOLD_PRESENCE`), so a dead worker counts until its row is deleted.
    """
    rows = await connection.fetch(_OF_PIPELINES, queue, list(pipelines)) if pipelines else ()
    return {row["pipeline"]: row["handler"] for row in rows}


# $1 queue, $2 how many names to return at most, $3 the dead workers.
_NAMES = """
-- handler_names
SELECT DISTINCT h.name FROM worker w CROSS JOIN unnest(w.handlers) AS h(name)
WHERE $1 = ANY(w.queues) AND NOT w.draining AND w.id <> ALL($3::uuid[])
ORDER BY 1 LIMIT $2
"""


async def handlers_of_queue(connection: Connection, queue: str, dead: Sequence[UUID]) -> list[str]:
    """The handlers (`pipeline.step`) of the living workers that serve the queue, at most _MAX_NAMES. Draining workers
    are left out. `dead`: as for `served`.
    """
    return [row["name"] for row in await connection.fetch(_NAMES, queue, _MAX_NAMES, list(dead))]
