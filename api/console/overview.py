"""The Overview, the first page of the console. It shows findings that need attention, numbers of jobs and queues, and
rates of the last hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from leasehold.api.auth.security import JOBS_READ
from leasehold.api.console.findings import Finding, findings_of
from leasehold.api.console.rates import Rates, rates_of
from leasehold.api.console.rendering import page
from leasehold.api.console.session import Anybody
from leasehold.api.console.shared import Shared
from leasehold.api.console.state import state_of
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import overview_reads
from leasehold.db.job_reads import Row

router = APIRouter()
#: An open page is refreshed after this many seconds. All requests of a tenant with the same scopes share one `State`
#: for this time.
REFRESH_SECONDS = 10
#: All requests of a tenant with the same scopes share the rates for this many seconds.
_RATES_SECONDS = 20


@dataclass(frozen=True, slots=True)
class State:
    """The findings, and the numbers of `findings.Numbers`. `live`: counts of unfinished jobs; None if the caller may
    not read jobs. `queues`: a row for each queue. `workers`: the number of workers. `queues` and `workers` are None if
    the caller may not see all tenants.
    """

    findings: list[Finding]
    live: Row | None
    queues: list[Row] | None
    workers: int | None


@router.get("/")
@may_read_standby
async def show_overview(request: Request, caller: Anybody) -> Response:  # Anybody: every caller who is signed in
    services = services_of(request)
    key = (caller.tenant_id, caller.scopes)
    # Requests with the same `key` get the same answer. `state_of` returns the ConsoleState, which all pages of the
    # process share, and not a `State`.
    states: Shared[State] = state_of(request).answers.named("state", REFRESH_SECONDS)
    rates: Shared[Rates] = state_of(request).answers.named("rates", _RATES_SECONDS)
    state = await states.get(key, lambda: _read_state(request, services, caller))
    last_hour = (
        await rates.get(key, lambda: rates_of(services, caller, datetime.now(UTC)))
        if JOBS_READ in caller.scopes
        else None
    )
    return page(
        request,
        "overview.html",
        made_of=(state, last_hour),  # if both are unchanged, a refresh renders nothing
        refresh_seconds=REFRESH_SECONDS,
        refresh_url=request.url.path,
        state=state,
        rates=last_hour,
        max_counted=overview_reads.MAX_UNFINISHED,
    )


async def _read_state(request: Request, services: Services, caller: Caller) -> State:
    findings, numbers = await findings_of(request, services, caller)
    return State(findings, numbers.live, numbers.queues, numbers.workers)
