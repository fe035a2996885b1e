"""SQL that writes the rows of an attempt's outputs, for the settlements that commit outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from leasehold.transitions.settlements.records import Output


def write_outputs(settled: str, parameter: str) -> str:
    """SQL: the CTE `outputs`. `settled`: the name of a CTE with a row for each task whose attempt still had the lease.
    Its columns are id, job_id, tenant_id, step, and `place`, the task's position (from 1) in an array. `parameter`: the
    SQL parameter with this array, which `outputs_column` makes.

    After a snooze or a fan-out, a later attempt of the step may write an output again. Then the newer object replaces
    the older one.
    """
    return f"""outputs AS (
    INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)
    SELECT d.id, o.name, d.job_id, d.tenant_id, d.step, o.key, o.size, o.sha256, o.content_type
    FROM {settled} d CROSS JOIN LATERAL jsonb_to_recordset(({parameter}::jsonb[])[d.place] -> 'of')
        AS o(name text, key text, size bigint, sha256 text, content_type text)
    ON CONFLICT (task_id, name) DO UPDATE
    SET key = excluded.key, size = excluded.size, sha256 = excluded.sha256, content_type = excluded.content_type
)"""


def outputs_column(outputs: Sequence[Sequence[Output]]) -> list[Mapping[str, Any] | None]:
    """The parameter that `write_outputs` reads. Each element is a mapping, because PostgreSQL would read a list of
    lists as an array of two dimensions.
    """
    return [{"of": [asdict(output) for output in of_task]} if of_task else None for of_task in outputs]
