"""What the exporter asks of generations: how many are under way, by status and by server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric

from leasehold.kinds.metrics import CAP, Question, labelled
from leasehold.pipelines.generation.rows import STATUS, UNDER_WAY

#: The most servers that are reported: those with most to do.
MAX_SERVERS = 100

# Unfinished generations, in the words of their endpoints, of each server. $1 the cap.
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
    return [Question("generations", GENERATIONS, (CAP,), _families)]


def _families(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    words, servers = Counter[tuple[str, str]](), Counter[str]()
    for row in rows:
        words[row["kind"], row["status"]] += row["n"]
        if row["status"] in UNDER_WAY:
            servers[row["server_id"]] += row["n"]
    meaning = f"Unfinished generations, in the words of their API; counted up to {CAP}"
    yield labelled("generation_tasks", meaning, ["kind", "status"], words.items())
    first = servers.most_common(MAX_SERVERS)
    yield labelled(
        "generation_server_tasks", "Generations that a server has under way", ["server_id"],
        [((name,), n) for name, n in first],
    )  # fmt: skip
