"""One attempt, from its claim to its settlement: fetch, run, store, and say how it ended. Nothing here writes a
status: the settle lane does, with the lease.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import asyncpg
import structlog

from leasehold.db.database import Pool
from leasehold.domain.backoff import delay_after
from leasehold.domain.errors import (
    Cancelled,
    ChildCrashed,
    LeaseLost,
    ObjectCorrupt,
    ObjectExists,
    Permanent,
    Retryable,
    StepError,
    StepTimeout,
    StoreAbsent,
    StoreError,
    Unforeseen,
    is_disk_full,
)
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.runtime import failpoints
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry import traces
from leasehold.telemetry.logs import say_with_every_line
from leasehold.telemetry.redaction import redact
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Snoozing, Verdict
from leasehold.worker import metrics
from leasehold.worker.attempts import inline
from leasehold.worker.attempts.heartbeat import Heartbeat, Held
from leasehold.worker.attempts.isolated import IsolatedAttempts
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.attempts.threads import Threads
from leasehold.worker.claiming.batchers import Acknowledgement, Answer, Release, Settlement, SettlementBatcher
from leasehold.worker.maintenance.admitter import Admitter
from leasehold.worker.sandbox import frames
from leasehold.worker.sandbox.children import Children

log = structlog.get_logger(__name__)

#: A lease is renewed for this long past the step's time limit: time to upload, and to wait for the database.
_GRACE = 120.0
#: A task of a pipeline that this worker does not know (an older release) is offered again after this.
_UNKNOWN_PAUSE = 30.0


_LAST_ERROR = "SELECT code FROM failure WHERE task_id = $1 AND cause = 'error' ORDER BY epoch DESC LIMIT 1"
_UNFORESEEN_CODE = Unforeseen("").code
#: After an exception that nobody foresaw.
_SOON = (timedelta(seconds=4),)


class Runner:
    def __init__(
        self,
        *,
        pipelines: Pipelines,
        store: ObjectStore,
        pool: Pool,
        children: Children,
        heartbeat: Heartbeat,
        settle: SettlementBatcher,
        reporter: Reporter,
        admitter: Admitter,
        work_dir: Path,
        opened: Mapping[str, Any],
        settings: Settings,
    ) -> None:
        self._pipelines = pipelines
        self._store = store
        self._pool = pool
        self._heartbeat = heartbeat
        self._settle = settle
        self._reporter = reporter
        self._admitter = admitter
        self._isolated = IsolatedAttempts(
            store=store, pool=pool, children=children, reporter=reporter, work_dir=work_dir, settings=settings
        )
        self._opened = opened
        self._threads = Threads(settings.worker_threads)
        self._blocked_after = settings.loop_blocked_seconds
        self._running: set[asyncio.Task[Settlement]] = set()
        self._giving_back = False

    def give_back(self) -> None:
        """Stop what runs now and give its leases back: the worker must go."""
        self._giving_back = True
        for task in self._running:
            task.cancel()

    async def run(
        self, claimed: Claimed, parent: Mapping[str, str] | None, may_go_on: Callable[[], bool]
    ) -> Claimed | None:
        """Run the attempt and settle it. Returns once the database has answered, or the lease is lost: with a step that
        the completion has claimed, if then there `may_go_on` one.
        """
        started = monotonic()
        trace = claimed.trace or {}
        say_with_every_line({
            "job_id": claimed.job_id,
            "task_id": claimed.lease.task_id,
            "step": claimed.step,
            "epoch": claimed.lease.epoch,
            "trace_id": traces.trace_id_of(trace),
            **{name: trace[name] for name in ("request_id", "media_id") if name in trace},
        })  # fmt: skip
        # The message that led here is the parent, where there was one; it is of the same trace.
        with traces.span(
            f"{claimed.pipeline} {claimed.step}",
            "CONSUMER",
            parent=parent or trace,
            leasehold_job_id=str(claimed.job_id),
            leasehold_attempt=claimed.lease.attempt,
        ) as span:
            settlement, held = await self._attempt(claimed, may_go_on)
            held.settling = settlement is not None
            if isinstance(settlement, Completion) and may_go_on():
                settlement = replace(settlement, goes_on=True)
            outcome, following = "lost", None
            try:
                if settlement is not None:
                    outcome, following = await self._settled(claimed, settlement)
            finally:
                self._heartbeat.drop(held)
                self._isolated.forget(claimed, following)
            span.tell(leasehold_outcome=outcome)
            if isinstance(settlement, Failure):
                span.failed(settlement.code)
        if claimed.gated:
            self._admitter.left(claimed.job_id)
        seconds = monotonic() - started
        metrics.ended(claimed.pipeline, claimed.step, outcome, seconds, traces.exemplar_of(trace))
        return following

    async def _attempt(self, claimed: Claimed, may_go_on: Callable[[], bool]) -> tuple[Settlement | None, Held]:
        failpoints.reach("after_claim")
        known = self._declared(claimed)
        seconds = _limit(claimed, known[1]) if known else 0.0
        held = self._heartbeat.hold(claimed.lease, seconds + _GRACE)
        if known is None:
            log.error("unknown pipeline or step", pipeline=claimed.pipeline, step=claimed.step)
            return Snoozing(claimed.lease, _UNKNOWN_PAUSE), held
        work = asyncio.ensure_future(self._perform(claimed, *known, held, may_go_on))
        held.on_stop(work.cancel, partial(self._ask_to_stop, claimed, work))
        if self._giving_back:
            work.cancel()
        self._running.add(work)
        try:
            return await self._outcome(work, claimed, known[1], held), held
        finally:
            self._running.discard(work)

    def _ask_to_stop(self, claimed: Claimed, work: asyncio.Future[Settlement]) -> None:
        """The handler sees it at its next checkpoint; what has none is stopped at the end of the grace."""
        sign = self._isolated.directory(claimed) / frames.CANCEL
        if sign.parent.exists():
            sign.touch()
        asyncio.get_running_loop().call_later(claimed.grace_seconds, work.cancel)

    def _declared(self, claimed: Claimed) -> tuple[Pipeline, Step] | None:
        """The code that does it: its job's own pipeline, or what its template names as the handler."""
        of, _, name = (claimed.handler or f"{claimed.pipeline}.{claimed.step}").partition(".")
        if of not in self._pipelines:
            return None
        pipeline = self._pipelines[of]
        step = pipeline.by_name.get(name)
        if step is not None and not step.isolated and step.name not in pipeline.handlers:
            return None  # another worker has loaded it
        return None if step is None else (pipeline, step)

    async def _perform(
        self, claimed: Claimed, pipeline: Pipeline, step: Step, held: Held, may_go_on: Callable[[], bool]
    ) -> Settlement:
        if step.isolated:
            return await self._isolated.perform(claimed, pipeline, step, held, _limit(claimed, step), may_go_on)
        return await self._inline(claimed, pipeline, step, held)

    async def _inline(self, claimed: Claimed, pipeline: Pipeline, step: Step, held: Held) -> Settlement:
        attempt = inline.InlineAttempt(
            claimed,
            pipeline,
            step,
            held,
            self._store,
            self._pool,
            self._reporter,
            opened=self._opened.get(pipeline.name),
            directory=partial(self._isolated.directory, claimed),
        )
        try:
            return await inline.perform(attempt, _limit(claimed, step), self._threads, self._blocked_after)
        finally:
            if attempt.used_directory:  # few inline handlers need one
                await asyncio.shield(
                    asyncio.to_thread(shutil.rmtree, self._isolated.directory(claimed), ignore_errors=True)
                )

    async def _outcome(
        self, work: asyncio.Future[Settlement], claimed: Claimed, step: Step, held: Held
    ) -> Settlement | None:
        """The settlement that the way the work ended calls for; None when the lease is no longer ours."""
        try:
            return await work
        except (asyncio.CancelledError, Cancelled) as stopped:
            return self._stopped(claimed, step, held, stopped)
        except (LeaseLost, ObjectExists):
            # ObjectExists: other bytes lie under our key and our lease is not trusted any more: the other attempt
            # decides.
            return None
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; whatever it is, the attempt failed
            failed = _as_step_error(error)
            if isinstance(failed, Unforeseen) and await self._failed_so_before(claimed):
                failed = Permanent(failed.code, failed.message)
            return _failure(claimed, step, failed)

    async def _failed_so_before(self, claimed: Claimed) -> bool:
        """Whether the attempt before this one ended with an exception that nobody foresaw, too."""
        if not claimed.errors:
            return False
        try:
            async with self._pool.acquire() as connection:
                code = await connection.fetchval(_LAST_ERROR, claimed.lease.task_id)
        except TRY_AGAIN:  # nobody can tell now: it costs one attempt more
            return False
        return bool(code == _UNFORESEEN_CODE)

    def _stopped(self, claimed: Claimed, step: Step, held: Held, stopped: BaseException) -> Settlement | None:
        """Why it stopped before its end: the lease is gone, the job was asked to stop, or the worker must go."""
        if held.lost:
            return None
        if held.cancelled:
            return Acknowledgement(claimed.lease)
        if isinstance(stopped, Cancelled):
            said = "the handler stopped as if it had been cancelled, which it was not"
            return _failure(claimed, step, Permanent("handler_cancelled", said))
        if self._giving_back:
            return Release(claimed.lease)
        raise stopped

    async def _settled(self, claimed: Claimed, settlement: Settlement) -> tuple[str, Claimed | None]:
        try:
            with traces.span("settle"):
                answer = await self._settle.settle(settlement)
        except asyncpg.DataError as error:  # a value that PostgreSQL has no form for, such as a NUL in JSON
            refused = Permanent("bad_output", f"what the step said cannot be stored: {error}")
            settlement = self._refusal(claimed, refused)
            answer = await self._settle.settle(settlement)
        except asyncpg.UniqueViolationError:
            refused = Permanent("spread_twice", "the step spread into parts that it has already")
            settlement = self._refusal(claimed, refused)
            answer = await self._settle.settle(settlement)
        outcome = _outcome(settlement, answer)
        if outcome == "lost":
            metrics.REFUSED.inc()
        if isinstance(settlement, Failure) and outcome in ("failed", "retried"):
            metrics.failed(claimed.pipeline, claimed.step, outcome, settlement.code)
        if outcome in ("failed", "retried", "lost"):
            log.warning(
                "attempt ended",
                outcome=outcome,
                code=settlement.code if isinstance(settlement, Failure) else None,
            )
        elif logging.getLogger(__name__).isEnabledFor(logging.DEBUG):  # on the hot path: even asking costs
            log.debug("attempt ended", outcome=outcome)
        return outcome, answer.next

    def _refusal(self, claimed: Claimed, error: Permanent) -> Failure:
        known = self._declared(claimed)
        assert known is not None  # it ran
        return _failure(claimed, known[1], error)


_OUTCOMES = {
    Completion: "succeeded",
    Failure: "failed",
    Snoozing: "parked",
    Release: "released",
    FanningOut: "spread",
    Acknowledgement: "cancelled",
}


def _limit(claimed: Claimed, step: Step) -> float:
    """Seconds that one attempt may take."""
    return float(claimed.timeout_seconds or step.timeout.total_seconds())


def _outcome(settlement: Settlement, answer: Answer) -> str:
    if answer.verdict is Verdict.LOST:
        return "lost"
    if answer.state in ("retry", "cancelled"):
        return "retried" if answer.state == "retry" else "cancelled"
    return _OUTCOMES[type(settlement)]


def _as_step_error(error: Exception) -> StepError:
    match error:
        case StepError():
            return error
        case ObjectCorrupt():
            return Retryable(str(error), code="input_corrupt")
        case StoreAbsent():
            return Permanent("store_not_configured", str(error))
        case StoreError():
            return Retryable(str(error), code="store_unavailable")
        case OSError() if is_disk_full(error):
            return Retryable("the disk of the worker is full", code="disk_full")
        case _:
            log.error("handler failed", exc_info=error)
            return Retryable(f"{type(error).__name__}: {error}", code="handler_error")


def _storable(message: str) -> str:
    """PostgreSQL's text has no NUL, and a str may hold halves of characters that UTF-8 does not."""
    return redact(message[:2000]).replace("\x00", "").encode(errors="replace").decode()


def _failure(claimed: Claimed, step: Step, error: StepError) -> Failure:
    cause = "timeout" if isinstance(error, StepTimeout) else "crash" if isinstance(error, ChildCrashed) else "error"
    before = claimed.crashes if cause == "crash" else claimed.errors
    delay = delay_after(before + 1, step.retry_ladder)
    if isinstance(error, Unforeseen):
        delay = delay_after(1, _SOON)
    elif isinstance(error, Retryable) and error.after is not None:
        delay = error.after
    retryable = error.retryable and not isinstance(error, Permanent)
    return Failure(claimed.lease, cause, error.code, _storable(error.message), retryable, delay.total_seconds())
