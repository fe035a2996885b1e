"""`best_effort`, for work that a request does after its commit: an outage then must not change the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from leasehold.domain.errors import Unavailable
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry.outages import DATABASE

log = structlog.get_logger(__name__)


@contextmanager
def best_effort(work: str) -> Iterator[None]:
    """Suppress an outage of the database, and a pool without a free connection, in the block.

    Use it only for work that a worker repeats later. `work`: the name of that work in the log.
    """
    try:
        yield
    except Unavailable as error:
        log.warning("work after a request was left to the workers", work=work, code=error.code)
    except TRY_AGAIN as error:
        DATABASE.record_error(error, work)
