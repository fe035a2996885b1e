"""/livez: the process answers. /readyz: it can do its work, which is to write to the database.

The broker and the store are reported but decide nothing: submissions need no broker, and when the shared store is
away, taking every API process out of service would help nobody.

Both need no key. Versions and settings of the servers are told to operators alone: `/readyz?verbose` needs a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from leasehold.api.auth.security import OPERATE, Require, bearer
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.problems import is_database_away
from leasehold.api.process.services import Services, services_of
from leasehold.db.schemas import CORE, state_of
from leasehold.domain.errors import StoreError
from leasehold.domain.ids import new_id
from leasehold.kinds.schemas import schemas_of
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.selfcheck import Finding, check_all
from leasehold.telemetry import database
from leasehold.telemetry.outages import DATABASE, STORE

log = structlog.get_logger(__name__)
router = APIRouter(include_in_schema=False, route_class=CallerFirst)
_operator = Require(OPERATE)

#: Probes are public, and one of them writes: within this many seconds all share one answer.
_SHARED_SECONDS = 1.0
_PATIENCE = 3.0
_UNANSWERED: tuple[type[BaseException], ...] = (TimeoutError, StoreError, *TRY_AGAIN)
#: The parts seldom change; within this many seconds all share one look at what they promise.
_FOUND_SECONDS = 60.0

# A real, committed write: a demoted or read-only server refuses it, a full disk or a lost quorum stalls it.
PROVE_WRITES = """
INSERT INTO leadership (role, owner, until) VALUES ('readiness', $1, clock_timestamp())
ON CONFLICT (role) DO UPDATE SET owner = excluded.owner, until = excluded.until
"""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    required: bool
    detail: str = ""


class Readiness:
    """The checks, run at most once a second however many ask."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._id = new_id()
        self._schemas = schemas_of(services.kinds)
        self._running: asyncio.Task[list[Check]] | None = None
        self._asked_at = 0.0
        self._found: asyncio.Task[list[Finding]] | None = None
        self._found_at = 0.0

    async def checks(self) -> list[Check]:
        if self._running is None or (self._running.done() and monotonic() - self._asked_at > _SHARED_SECONDS):
            self._asked_at = monotonic()
            self._running = asyncio.create_task(self._run())
        return [
            Check("serving", not self._services.draining, required=True),
            *await asyncio.shield(self._running),
        ]

    async def findings(self) -> list[Finding]:
        """What the database, the broker and the store can promise; looked at again after a minute."""
        if self._found is None or (self._found.done() and monotonic() - self._found_at > _FOUND_SECONDS):
            self._found_at = monotonic()
            self._found = asyncio.create_task(self._examine())
        return await asyncio.shield(self._found)

    async def _examine(self) -> list[Finding]:
        services = self._services
        try:
            async with asyncio.timeout(_PATIENCE):
                return await check_all(
                    services.pool.acquire, services.broker, services.store,
                    services.settings, self._schemas,
                )  # fmt: skip
        except _UNANSWERED as error:
            log.warning("the self-check was cut short", error=type(error).__name__)
            return [Finding("self-check", ok=False, found="cut short", meaning="a part does not answer: see checks")]

    async def _run(self) -> list[Check]:
        return list(
            await asyncio.gather(
                _checked("database", self._database, required=True),
                _checked("migrations", self._migrations, required=True),
                _checked("broker", self._broker, required=False),
                _checked("store", self._store, required=False),
            )
        )

    async def _database(self) -> str:
        with database.contact():
            async with self._services.pool.acquire() as connection:
                await connection.execute(PROVE_WRITES, self._id)
        DATABASE.answered()
        return "takes writes"

    async def _migrations(self) -> str:
        """The platform's, and those of kinds of work, which are named where there are any."""
        async with self._services.pool.acquire() as connection:
            states = {schema.name: await state_of(connection, schema) for schema in self._schemas}
        for name, state in states.items():
            if state.behind:
                raise _NotReady(f"{_of(name)}at {state.found}, but {state.head} is needed")
        return ", ".join(f"{_of(name)}at {state.found}" for name, state in states.items())

    async def _broker(self) -> str:
        if not self._services.broker.connected:
            raise _NotReady(f"{self._services.broker.name} is not connected; work goes on, slower")
        return self._services.broker.name

    async def _store(self) -> str:
        if self._services.store.is_absent:
            return "none"
        await self._services.store.head("readiness")  # whether it is there does not matter: an answer is one
        return "answers"


def _of(schema: str) -> str:
    return "" if schema == CORE.name else f"{schema} "


class _NotReady(Exception):
    pass


async def _checked(name: str, look: Callable[[], Awaitable[str]], *, required: bool) -> Check:
    """`detail` says what is public anyway: never an address, never an error's own text."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return Check(name, ok=True, required=required, detail=await look())
    except _NotReady as finding:
        return Check(name, ok=False, required=required, detail=str(finding))
    except Exception as error:  # noqa: BLE001 - whatever it is, we are not ready
        away = isinstance(error, StoreError) or is_database_away(error)
        detail = "does not answer" if away else type(error).__name__
        if away:
            (STORE if isinstance(error, StoreError) or name == "store" else DATABASE).met(error, "readiness")
        else:
            log.warning("readiness check failed", check=name, error=type(error).__name__)
        return Check(name, ok=False, required=required, detail=detail)


@router.get("/livez")
async def livez() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """`?verbose` adds what was checked, and what the parts can promise (as `leasehold doctor` says it).

    Raises Unauthenticated and Forbidden where `?verbose` is asked for without a key that has `fleet:operate`.
    """
    verbose = "verbose" in request.query_params
    if verbose:
        await _operator(request, await bearer(request))
    checks = await readiness_of(request).checks()
    ready = all(check.ok for check in checks if check.required)
    said: dict[str, Any] = {"status": "ok" if ready else "unavailable"}
    if not ready or verbose:
        said["checks"] = {
            check.name: {"ok": check.ok, "required": check.required, "detail": check.detail} for check in checks
        }
    if verbose:
        said["findings"] = [asdict(finding) for finding in await readiness_of(request).findings()]
    return JSONResponse(said, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def readiness_of(request: Request) -> Readiness:
    state = request.app.state
    if not hasattr(state, "readiness"):
        state.readiness = Readiness(services_of(request))
    readiness: Readiness = state.readiness
    return readiness
