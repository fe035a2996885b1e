"""The metrics that count unfinished generations (orders of images or videos) by status and by server. A question is an
SQL statement whose rows the exporter turns into metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric

from leasehold.kinds.metrics import CAP, Question, labelled_gauge
from leasehold.pipelines.generation.rows import STATUS, UNDER_WAY

#: The exporter reports at most this many servers, the busiest first. `server_id` is a label of workers, and clients
#: choose it in their orders. So there may be any number of servers.
MAX_SERVERS = 100

# Unfinished generations by kind, server and public status (the words of the endpoints). $1: the most generations to
# count (CAP).
GENERATIONS = f"""
-- exporter_generations
SELECT kind, server_id, status, count(*)::int AS n
FROM (
    SELECT g.kind, g.server_id, {STATUS} AS status
    FROM (SELECT id, status FROM job WHERE finished_at IS NULL AND pipeline = 'generation' LIMIT $1) AS j
    JOIN generation g ON g.job_id = j.id
    LEFT JOIN task s ON s.job_id = j.id AND s.step = 'submit'
) AS counted
GROUP BY kind, server_id, status
"""


def questions() -> list[Question]:
    """The exporter's statements about generations. The declaration of the kind of work `generation` names this function
    in its field `questions`.
    """
    return [Question("generations", GENERATIONS, (CAP,), _families)]


def _families(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    by_status, by_server = Counter[tuple[str, str]](), Counter[str]()
    for row in rows:
        by_status[row["kind"], row["status"]] += row["n"]
        if row["status"] in UNDER_WAY:
            by_server[row["server_id"]] += row["n"]
    meaning = f"Unfinished generations by the API's status words, counted up to {CAP}"
    yield labelled_gauge("generation_tasks", meaning, ["kind", "status"], by_status.items())
    busiest = by_server.most_common(MAX_SERVERS)
    yield labelled_gauge(
        "generation_server_tasks", "Generations that a server has under way", ["server_id"],
        [((name,), n) for name, n in busiest],
    )  # fmt: skip
