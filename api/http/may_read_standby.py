"""Answers requests to marked endpoints from a standby of PostgreSQL, while this standby serves. A standby serves while
its lag is small and no read from it has failed lately. Answers from a standby may be some seconds old.

Lists, pages and counts are marked, because they are old anyway when a person reads them. Requests that write always
read from the primary. Requests for one job by its id also read from the primary, because a client must see its own
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from math import ceil
from typing import Any, TypeVar

import asyncpg
from fastapi import Request, Response

from leasehold.api.process.replica_reads import ReplicaReads
from leasehold.api.process.services import services_of
from leasehold.db.replica import READS, REQUESTS, STANDBY_FAILED, ReplicaBusy, ReplicaUnusable
from leasehold.domain.errors import NotFound
from leasehold.runtime.transient import may_try_again

#: The header with the greatest possible age of the answer, in seconds. An answer without the header is from the
#: primary.
LAG_HEADER = "Leasehold-Read-Lag"
#: The cookie of a browser that has sent a form in the console. While the browser has the cookie, the console reads its
#: pages from the primary.
FRESH_COOKIE = "leasehold_fresh"

#: The function of an endpoint, which the decorator returns unchanged.
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
#: FastAPI's function for a route: it makes the response to a request, by calling the endpoint.
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_marked_endpoints: set[Callable[..., Any]] = set()


def may_read_standby(endpoint: _Endpoint) -> _Endpoint:
    """Mark an endpoint that writes nothing, and whose answer may be some seconds old. This decorator must stand below
    the route's decorator, because the route's decorator looks for the mark.
    """
    _marked_endpoints.add(endpoint)
    return endpoint


def is_marked(endpoint: Callable[..., Any] | None) -> bool:
    return endpoint in _marked_endpoints


def with_standby(endpoint: Callable[..., Any], handler: _Handler) -> _Handler:
    """The handler for a route. If the endpoint is not marked, this is `handler` itself. If it is marked, this is a new
    handler, which runs `handler` on the standby while the standby serves. If the standby fails, cannot run a statement,
    or does not have the object that the request names, the new handler runs `handler` again on the primary.
    """
    if not is_marked(endpoint):
        return handler

    async def handle(request: Request) -> Response:
        reads = services_of(request).replica_reads
        if reads is None:
            return await handler(request)
        # The metric's label says why the primary answers. `primary`: the standby does not serve. `fresh`: the request
        # demands the primary. `repeated`: the standby could not answer.
        reason = "primary"
        if _demands_primary(request):
            reason = "fresh"
        elif reads.replica.serves:
            response = await _from_standby(request, handler, reads)
            if response is not None:
                return response
            reason = "repeated"
        READS.labels(REQUESTS, reason).inc()
        return await handler(request)

    return handle


def _demands_primary(request: Request) -> bool:
    directives = ",".join(request.headers.getlist("cache-control")).lower()
    return "no-cache" in directives or FRESH_COOKIE in request.cookies


async def _from_standby(request: Request, handler: _Handler, reads: ReplicaReads) -> Response | None:
    """The answer from the standby; None if the standby failed or lacks the object. Then the primary must answer."""
    with reads.reading() as reading:
        try:
            response = await handler(request)
        except ReplicaBusy:
            return None
        except NotFound:  # the standby may not have the object yet, so the primary decides
            return None
        except STANDBY_FAILED as error:
            # If the error shows that the standby is unusable, `leave` sends all reads to the primary for some seconds.
            # Three kinds of errors do not show this. If no use of the standby has failed, the error comes from the
            # primary, which this request uses for rates and keys. If the request has used up its time for the standby
            # (`is_over`), the standby may merely be slow. If asyncpg cannot encode a value, the request is bad.
            is_of_standby = reading.has_failed and not reading.is_over
            if is_of_standby and (isinstance(error, ReplicaUnusable) or may_try_again(error)):
                reads.replica.leave(error)
            return None
        except asyncpg.PostgresError:  # the standby may lack a migration; any other error occurs again on the primary
            return None
        if reading.lag is not None:
            response.headers[LAG_HEADER] = f"{ceil(reading.lag * 10) / 10:.1f}"
        READS.labels(REQUESTS, "standby").inc()
        return response


def stay_fresh(request: Request, response: Response) -> Response:
    """Set a cookie on the response to a form, so that the console reads the browser's next pages from the primary. The
    cookie lasts for the largest lag with which the standby serves. After this time the standby has the rows that the
    form has written.
    """
    services = services_of(request)
    if services.replica_reads is not None:
        path = services.settings.console_path or "/"
        seconds = ceil(services.replica_reads.fresh_after_seconds)
        response.set_cookie(FRESH_COOKIE, "1", max_age=seconds, path=path, httponly=True, samesite="strict")
    return response
