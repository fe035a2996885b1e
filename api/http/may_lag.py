"""Answers the requests of marked endpoints from a standby of PostgreSQL: these answers may be stale.

Lists, pages and counts are marked, because they are stale anyway once a person reads them. A request for one job by its
id, and a request that writes, always read from the primary: a client must see its own writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from math import ceil
from typing import Any, TypeVar

import asyncpg
from fastapi import Request, Response

from leasehold.api.process.replica_reads import ReplicaReads
from leasehold.api.process.services import services_of
from leasehold.db.replica import READS, REQUESTS, STANDBY_FAILED, ReplicaBusy

#: The header with the greatest age that an answer can have, in seconds. An answer without it is from the primary.
LAG_HEADER = "Leasehold-Read-Lag"
#: The cookie of a browser that has sent a form in the console: while it has the cookie, its pages are read from the
#: primary.
FRESH_COOKIE = "leasehold_fresh"

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_marked: set[Callable[..., Any]] = set()


def may_lag(endpoint: _Endpoint) -> _Endpoint:
    """Mark an endpoint that writes nothing, and whose answer may be some seconds old. Write this below its route."""
    _marked.add(endpoint)
    return endpoint


def lags(endpoint: Callable[..., Any] | None) -> bool:
    return endpoint in _marked


def answering(endpoint: Callable[..., Any], handler: _Handler) -> _Handler:
    """The handler of a route. A marked endpoint reads from the standby, if the standby serves. If the standby then
    fails, or cannot carry a statement out, the request is repeated on the primary.
    """
    if not lags(endpoint):
        return handler

    async def handle(request: Request) -> Response:
        reads = services_of(request).replica_reads
        if reads is None:
            return await handler(request)
        server = "fresh" if _wants_fresh(request) else "primary"
        if server == "primary" and reads.replica.serves:
            response = await _from_standby(request, handler, reads)
            if response is not None:
                return response
            server = "repeated"
        READS.labels(REQUESTS, server).inc()
        return await handler(request)

    return handle


def _wants_fresh(request: Request) -> bool:
    return "no-cache" in request.headers.get("cache-control", "") or FRESH_COOKIE in request.cookies


async def _from_standby(request: Request, handler: _Handler, reads: ReplicaReads) -> Response | None:
    """The answer from the standby. None: it failed."""
    with reads.reading() as reading:
        try:
            response = await handler(request)
        except ReplicaBusy:
            return None
        except STANDBY_FAILED as error:
            if not reading.is_over:
                reads.replica.leave(error)
            return None
        except asyncpg.PostgresError:  # the standby may lack a migration; any other error repeats on the primary
            return None
        if reading.lag is not None:
            response.headers[LAG_HEADER] = f"{ceil(reading.lag * 10) / 10:.1f}"
        READS.labels(REQUESTS, "standby").inc()
        return response


def stay_fresh(request: Request, response: Response) -> Response:
    """The response to a form. The browser's next pages are read from the primary, until the standby has what the form
    wrote.
    """
    services = services_of(request)
    if services.replica_reads is not None:
        path = services.settings.console_path or "/"
        seconds = ceil(services.replica_reads.fresh_after)
        response.set_cookie(FRESH_COOKIE, "1", max_age=seconds, path=path, httponly=True, samesite="strict")
    return response
