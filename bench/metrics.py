"""Reads the counts of workers from their metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from bench.http import Connection, request

_CLAIMS = re.compile(r'^leasehold_claims_total\{found_by="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)


async def claims_by(ports: Sequence[int]) -> dict[str, int]:
    """How many tasks the workers with these metrics ports have claimed, by the label `found_by`: `hint` or `look` (a
    poll).
    """
    claims: Counter[str] = Counter()
    for port in ports:
        connection = await Connection.open(port)
        _, body = await connection.send(request("GET", "/metrics"))
        await connection.close()
        claims.update({found_by: int(float(count)) for found_by, count in _CLAIMS.findall(body.decode())})
    return dict(claims)
