"""`best_effort` suppresses an outage during the work that a request does after its commit. Such an outage must not
change the answer, because the request has already taken effect.
"""

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
    """Suppress the errors of the block that come from an outage of the database, or from a pool without a free
    connection.

    Use this only if a worker would do the work later, or if the work soon becomes needless (for example the release of
    a reservation that soon expires). `work`: the name of the work in the log.
    """
    try:
        yield
    except Unavailable as error:
        log.warning("work after a request was not done", work=work, code=error.code)
    except TRY_AGAIN as error:
        DATABASE.record_error(error, work)
