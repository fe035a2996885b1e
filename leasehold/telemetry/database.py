"""Records whether this process reaches the database, in two metrics. The heartbeat of a worker, and the readiness probe
and the exporter of an API, use this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.telemetry.meters import counter, gauge

UP = gauge("database_up", "1 while this process's last contact with the database was good")
CONNECTS = counter("database_connects_total", "Connections of a worker's heartbeat. Each reconnection counts, too")


@contextmanager
def recording_up() -> Iterator[None]:
    """Use this around code that queries the database. `UP` becomes 1 if the code succeeds, and 0 if it raises."""
    try:
        yield
    except BaseException:
        UP.set(0)
        raise
    UP.set(1)
