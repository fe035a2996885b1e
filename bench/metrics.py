"""Reading what a worker counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from bench.http import Connection, request

_CLAIMS = re.compile(r'^leasehold_claims_total\{found_by="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)


async def claims_by(ports: Sequence[int]) -> dict[str, int]:
    """How many tasks the workers with these metrics ports claimed, by how they were found: `hint` or `look`."""
    found: Counter[str] = Counter()
    for port in ports:
        connection = await Connection.open(port)
        _, body = await connection.send(request("GET", "/metrics"))
        await connection.close()
        found.update({how: int(float(count)) for how, count in _CLAIMS.findall(body.decode())})
    return dict(found)
