"""Judges I21: all rows of a job have its tenant, and no endpoint shows another tenant's thing."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

from chaos.checks.verdict import Observation, observed
from chaos.history import History


def i21(history: History) -> Iterator[Observation]:
    """The tenant is the same in a job and in all its rows, and no endpoint shows another tenant's thing of any kind."""
    rows = {
        "task": history.tasks, "event": history.events, "media": history.media, "output": history.outputs,
        "run": history.run_rows, "conversion": history.conversions, "generation": history.generations,
    }  # fmt: skip
    for kind, rows_of_kind in rows.items():
        for row in rows_of_kind:
            job = history.job_by_id.get(row["job_id"] or "")
            if job is not None:
                sentence = f"job {job['id']} is {job['tenant_id']}'s and has a {kind} of {row['tenant_id']}"
                yield observed(kind, sentence, good=row["tenant_id"] == job["tenant_id"])
    for kind, request, status in history.probes:
        yield observed(f"foreign {kind}", f"{request} was answered with {status}", good=status == HTTPStatus.NOT_FOUND)
