"""Reads the counts of workers from their metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from bench.http import Connection, request

_CLAIMS = re.compile(r'^leasehold_claims_total\{found_by="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)
_STATEMENTS = re.compile(
    r'^leasehold_statement_duration_seconds_count\{statement="(claim|look|settle)"\} ([0-9.e+]+)$', re.MULTILINE
)


async def claims_by(ports: Sequence[int]) -> dict[str, int]:
    """How many tasks the workers with these metrics ports have claimed, by the label `found_by`: `hint` or `look` (a
    poll).
    """
    return await _counts(ports, _CLAIMS)


async def statements_by(ports: Sequence[int]) -> dict[str, int]:
    """How many statements the workers have sent, by name: `claim`, `look` (a poll) and `settle`."""
    return await _counts(ports, _STATEMENTS)


async def _counts(ports: Sequence[int], lines: re.Pattern[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for port in ports:
        connection = await Connection.open(port)
        _, body = await connection.send(request("GET", "/metrics"))
        await connection.close()
        counts.update({label: int(float(count)) for label, count in lines.findall(body.decode())})
    return dict(counts)
