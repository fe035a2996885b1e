"""The health endpoints: `/livez` (the process answers) and `/readyz` (the process is ready for requests). A process is
ready if it is not shutting down, and if the database accepts writes and has the needed migrations.

If the broker or the store does not answer, the process stays ready. Submissions need no broker. All API processes share
one store, so another process could not serve the requests either. `/readyz` starts the checks of the broker and the
store, so that they record an outage. A process that is ready answers without waiting for these checks.

Neither endpoint needs a key, with one exception: `/readyz?verbose` needs an operator's key, because it shows versions
and settings of the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any, Generic, TypeVar

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from leasehold.api.auth.security import OPERATE, Require, bearer
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.problems import is_database_away
from leasehold.api.process.services import Services
from leasehold.db.schemas import CORE, state_of
from leasehold.domain.errors import StoreError
from leasehold.domain.ids import new_id
from leasehold.kinds.schemas import schemas_of
from leasehold.runtime.gather import cancel_and_wait, has_failed
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.selfcheck import Finding, check_all
from leasehold.telemetry import database
from leasehold.telemetry.outages import DATABASE, STORE

log = structlog.get_logger(__name__)
# Every router has this route class. Here the class has nothing to check, because `readyz` itself checks the key of
# `?verbose`.
router = APIRouter(include_in_schema=False, route_class=AuthenticatedFirst)
_require_operator = Require(OPERATE)

#: The result of a _SharedRun: the checks, or the findings of the self-check.
_Result = TypeVar("_Result")

#: Seconds for which all probes share one run of the checks, because anybody may call the probes, and one check writes.
_SHARED_SECONDS = 1.0
#: How long one check, or the whole self-check, may take.
_TIMEOUT_SECONDS = 3.0
#: An answer that shows all checks waits this many seconds for the checks that are not required. It does not wait for
#: the whole time of a check, because some callers give up sooner. The health check of compose.yaml gives up after three
#: seconds, and another cell after two.
_PATIENCE_SECONDS = 1.0
#: The request to the store may take only this part of _TIMEOUT_SECONDS. Otherwise the check would end first and cancel
#: the request. The request would then count as given up by its caller, and not as unanswered by the store.
_SHARE_OF_STORE = 0.8
#: The errors by which PostgreSQL, the broker or the store shows that it does not answer.
_NO_ANSWER: tuple[type[BaseException], ...] = (TimeoutError, StoreError, *TRY_AGAIN)
#: Seconds for which all requests share the findings of one self-check, because the servers seldom change.
_FINDINGS_SECONDS = 60.0

# A write that commits, to prove that PostgreSQL accepts writes. A demoted or read-only server refuses this write. On a
# full disk, or without a quorum of synchronous standbys, the write fails or takes longer than the check may take.
PROVE_WRITES = """
INSERT INTO leadership (role, owner, until) VALUES ('readiness', $1, clock_timestamp())
ON CONFLICT (role) DO UPDATE SET owner = excluded.owner, until = excluded.until
"""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `required`: the process is ready only if this check is `ok`."""

    name: str
    ok: bool
    required: bool
    detail: str = ""


class _SharedRun(Generic[_Result]):
    """Runs `run` at most once in `seconds`. Requests that arrive within this time share the result. If the run fails,
    the requests that wait for it share its error. The next request then starts a new run immediately.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, _Result]], seconds: float) -> None:
        self._run = run
        self._seconds = seconds
        self._task: asyncio.Task[_Result] | None = None
        self._started_at = 0.0

    async def result(self) -> _Result:
        return await asyncio.shield(self.start())

    def start(self) -> asyncio.Task[_Result]:
        """The asyncio task of the shared run. Do not cancel this task, because other requests wait for it, too."""
        if self._task is None or has_failed(self._task) or (self._task.done() and self._is_old()):
            self._started_at = monotonic()
            # The run has a context of its own, so that nothing of the request that starts the run applies to it. That
            # request may read from a standby, wait for its tenant's turn at the pool, or have little time left.
            self._task = asyncio.create_task(self._run(), context=Context())
        return self._task

    async def close(self) -> None:
        """Cancel the run that is under way, if there is one."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    def _is_old(self) -> bool:
        return monotonic() - self._started_at > self._seconds


class Readiness:
    """Runs the checks of one API process. Also runs the self-check, which is the same as in `leasehold doctor`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._id = new_id()  # of this process, for PROVE_WRITES
        self._schemas = schemas_of(services.kinds)
        self._required = _SharedRun(self._run_required, _SHARED_SECONDS)
        has_replica = services.replica_reads is not None
        others = {"broker": self._broker, "store": self._store, **({"replica": self._replica} if has_replica else {})}
        # The checks that are not required. Each check is a run of its own, so that a check that does not end delays no
        # other check.
        self._others = {
            name: _SharedRun(partial(_run_check, name, check, required=False), _SHARED_SECONDS)
            for name, check in others.items()
        }
        self._self_check = _SharedRun(self._run_self_check, _FINDINGS_SECONDS)

    async def required_checks(self) -> list[Check]:
        """The checks that decide whether the process is ready. Starts the other checks, but does not wait for them."""
        for run in self._others.values():
            run.start()
        return [Check("serving", not self._services.draining, required=True), *await self._required.result()]

    async def other_checks(self) -> list[Check]:
        """The checks that are not required. A check that has not ended after _PATIENCE_SECONDS is not `ok`."""
        runs = {name: run.start() for name, run in self._others.items()}
        await asyncio.wait(runs.values(), timeout=_PATIENCE_SECONDS)
        return [_result_or_late(name, run) for name, run in runs.items()]

    async def checks(self) -> list[Check]:
        return [*await self.required_checks(), *await self.other_checks()]

    async def findings(self) -> list[Finding]:
        """The findings of the self-check about the database, the broker and the store."""
        return await self._self_check.result()

    async def close(self) -> None:
        """End the checks that are under way."""
        for run in self._others.values():
            await run.close()
        await self._required.close()
        await self._self_check.close()

    async def _run_self_check(self) -> list[Finding]:
        services = self._services
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                return await check_all(
                    services.pool.acquire, services.broker, services.store,
                    services.settings, self._schemas,
                )  # fmt: skip
        except _NO_ANSWER as error:
            log.warning("the self-check did not finish", error=type(error).__name__)
            return [Finding("self-check", ok=False, found="not finished", meaning="a part does not answer: see checks")]

    async def _run_required(self) -> list[Check]:
        return list(
            await asyncio.gather(
                _run_check("database", self._database, required=True),
                _run_check("migrations", self._migrations, required=True),
            )
        )

    # The checks follow. A check returns its `detail`, or raises an error if it is not `ok`.
    async def _database(self) -> str:
        with database.recording_up():
            async with self._services.pool.acquire() as connection:
                await connection.execute(PROVE_WRITES, self._id)
        DATABASE.record_answer()
        return "accepts writes"

    async def _migrations(self) -> str:
        """The revisions of the platform's schema and of each schema that a kind of work has. Raises _NotReady if one of
        these schemas is behind.
        """
        async with self._services.pool.acquire() as connection:
            states = {schema.name: await state_of(connection, schema) for schema in self._schemas}
        for name, state in states.items():
            if state.behind:
                raise _NotReady(f"{_prefix_of(name)}at {state.revision}, but {state.head} is needed")
        return ", ".join(f"{_prefix_of(name)}at {state.revision}" for name, state in states.items())

    async def _broker(self) -> str:
        if not self._services.broker.connected:
            raise _NotReady(f"{self._services.broker.name} is not connected; the work goes on, but slower")
        return self._services.broker.name

    async def _replica(self) -> str:
        reads = self._services.replica_reads
        if reads is not None and not reads.replica.serves:
            raise _NotReady(f"{reads.replica.problem}; the primary answers instead")
        return "serves"

    async def _store(self) -> str:
        if self._services.store.is_absent:
            return "none"
        await self._services.store.check_answers(_SHARE_OF_STORE * _TIMEOUT_SECONDS)
        return "answers"


def _prefix_of(schema: str) -> str:
    """The text before a schema's revision: the schema's name and a space. Empty for the platform's own schema."""
    return "" if schema == CORE.name else f"{schema} "


class _NotReady(Exception):
    """A check failed. The text of this error is public, because `/readyz` shows it without a key."""


def _result_or_late(name: str, run: asyncio.Task[Check]) -> Check:
    """The result of a check that is not required. If the check has no result yet, the result says that nothing has
    answered.
    """
    if run.done() and not has_failed(run):
        return run.result()
    return Check(name, ok=False, required=False, detail=f"no answer within {_PATIENCE_SECONDS:g} s")


async def _run_check(name: str, check: Callable[[], Awaitable[str]], *, required: bool) -> Check:
    """Run one check. Its `detail` is public, so it never contains an address or the text of an error."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return Check(name, ok=True, required=required, detail=await check())
    except _NotReady as failure:
        return Check(name, ok=False, required=required, detail=str(failure))
    except Exception as error:  # noqa: BLE001 - after any error the check is not ok
        is_away = isinstance(error, StoreError) or is_database_away(error)
        detail = "does not answer" if is_away else type(error).__name__
        if is_away:
            # If the store answers too late, the error is a TimeoutError, as for the database. Only `name` shows which
            # of the two servers did not answer.
            outage = STORE if isinstance(error, StoreError) or name == "store" else DATABASE
            outage.record_error(error, "readiness")
        else:
            log.warning("readiness check failed", check=name, error=type(error).__name__)
        return Check(name, ok=False, required=required, detail=detail)


@router.get("/livez")
async def livez() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Whether the process is ready. `?verbose` adds all checks, and the findings that `leasehold doctor` prints. For
    these findings, `?verbose` waits up to _TIMEOUT_SECONDS for a server that does not answer.

    Raises Unauthenticated or Forbidden for `?verbose` without a key with the scope `fleet:operate`.
    """
    is_verbose = "verbose" in request.query_params
    if is_verbose:
        await _require_operator(request, await bearer(request))
    readiness = readiness_of(request)
    required_checks = await readiness.required_checks()
    is_ready = all(check.ok for check in required_checks)
    answer: dict[str, Any] = {"status": "ok" if is_ready else "unavailable"}
    if not is_ready or is_verbose:
        answer["checks"] = {
            check.name: {"ok": check.ok, "required": check.required, "detail": check.detail}
            for check in (*required_checks, *await readiness.other_checks())
        }
    if is_verbose:
        answer["findings"] = [asdict(finding) for finding in await readiness.findings()]
    return JSONResponse(answer, HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)


def readiness_of(request: Request) -> Readiness:
    readiness: Readiness = request.app.state.readiness
    return readiness
