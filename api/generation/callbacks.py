"""The endpoint that a provider calls when the state of a generation changes. The job then polls the provider
immediately.

The caller has no API key. Instead, the address contains a signature.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from time import monotonic
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Request, Response

from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.process.services import services_of
from leasehold.domain.errors import NotFound, Unavailable
from leasehold.domain.states import JOB_TERMINAL
from leasehold.pipelines.generation import callbacks
from leasehold.pipelines.generation import rows as generations
from leasehold.security.sealing import Sealing
from leasehold.transitions.wakes import wake

#: The path of the addresses that `callbacks.callback_url` makes.
ROUTE = callbacks.PATH + "/{job_id}/{signature}"
# The endpoint needs no body and declares none, so the route class reads none.
router = APIRouter(tags=["generation"], route_class=AuthenticatedFirst)
#: Only a poll step that snoozes (sleeps until a time) can be woken. If the poll step does not snooze yet, the endpoint
#: waits for at most this many seconds. Then it answers 503, so that the provider calls again. This time must be shorter
#: than the time for which a provider waits for the answer (Ark: five seconds).
_WAIT_SECONDS = 3.0
#: Seconds between two tries to wake the poll.
_RETRY_SECONDS = 0.2


@router.post(
    ROUTE,
    operation_id="hearProvider",
    status_code=204,
    include_in_schema=False,  # only providers call it, at the address that their order names
)
async def hear_provider(request: Request, job_id: UUID, signature: Annotated[str, Path(max_length=100)]) -> Response:
    """Wake the job's poll. Answers 404 `task_not_found` if the signature is wrong, and 503 `not_waiting` if the poll
    does not snooze. After 503 the provider sends the callback again.
    """
    services = services_of(request)
    if not callbacks.is_genuine(Sealing(services.settings), job_id, signature):
        raise NotFound("task_not_found", "There is no such generation.")
    deadline = monotonic() + _WAIT_SECONDS
    while True:
        async with services.pool.acquire() as connection:
            row = await generations.owner(connection, job_id)
            if row is None or row["status"] in JOB_TERMINAL:  # the job needs no poll any more
                return Response(status_code=HTTPStatus.NO_CONTENT)
            hints = await wake(connection, job_id, row["tenant_id"], "poll")
        if hints:  # the poll was snoozing, and the hints (messages to workers) say that it is due now
            services.announcer.announce(hints)
            return Response(status_code=HTTPStatus.NO_CONTENT)
        if monotonic() > deadline:
            raise Unavailable("not_waiting", "The generation is not waiting for a callback now. Send it again.")
        await asyncio.sleep(_RETRY_SECONDS)
