"""Whether a process has its database. A worker's heartbeat says so, and the API's readiness probe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.telemetry.meters import counter, gauge

UP = gauge("database_up", "1 while this process's last contact with the database was good")
CONNECTS = counter("database_connects_total", "Connections of a worker's heartbeat: the first one, and each again")


@contextmanager
def contact() -> Iterator[None]:
    """The block asks the database something; whether it answered is whether it is up."""
    try:
        yield
    except BaseException:
        UP.set(0)
        raise
    UP.set(1)
