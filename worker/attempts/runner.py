"""Runs one attempt from its claim to its settlement (the write of how it ended). A slot pool, which has room for some
attempts, calls `Runner.run`. Afterwards the slot pool ACKs the hint (the message that announced the task).

The runner writes no status itself. It hands a settlement to the settlement batcher, which writes the settlement if the
lease is still valid.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from uuid import UUID

import asyncpg
import structlog

from leasehold.db import handler_reads
from leasehold.db.database import Pool
from leasehold.domain.errors import (
    OVERTAKEN,
    Cancelled,
    Permanent,
    RequestError,
    Retryable,
    StepError,
    StepTimeout,
    Unforeseen,
    deciding,
)
from leasehold.domain.missing_code import SHORTEST_PAUSE, pause_without_code
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.step_names import declared_step
from leasehold.evaluation.templates import Templates
from leasehold.runtime import failpoints
from leasehold.runtime.foreign_errors import begin_foreign_code, contained, text_of
from leasehold.runtime.gather import being_cancelled
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry import traces
from leasehold.telemetry.attempt_logs import record_in
from leasehold.telemetry.dead_letters import count_dead_letter
from leasehold.telemetry.logs import set_facts_of_lines
from leasehold.transitions import workers
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Snoozing, Suspending, Verdict
from leasehold.worker import metrics
from leasehold.worker.attempts.directories import Directories
from leasehold.worker.attempts.failures import as_step_error, failure_of, traceback_of
from leasehold.worker.attempts.inline import InlineAttempts
from leasehold.worker.attempts.isolated import IsolatedAttempts
from leasehold.worker.attempts.log_and_stream import LogAndStream, LogAndStreamWriters
from leasehold.worker.attempts.slot import Slot
from leasehold.worker.attempts.stoppable import StoppableWork
from leasehold.worker.leases.heartbeat import Heartbeat
from leasehold.worker.leases.held_lease import HeldLease
from leasehold.worker.leases.settlement_batcher import (
    Answer,
    CancelAcknowledged,
    Release,
    Settlement,
    SettlementBatcher,
)
from leasehold.worker.leases.starts import Starts
from leasehold.worker.maintenance.admitter import Admitter
from leasehold.worker.sandbox.children import NoChild, NoneForked

log = structlog.get_logger(__name__)
_logger = logging.getLogger(__name__)  # each call of getLogger takes a lock

#: Seconds for which the heartbeat renews a lease beyond the step's time limit, because the attempt may still upload, or
#: wait for the database.
_AFTER_LIMIT_SECONDS = 120.0
#: If an isolated step gets no child process in time, the worker puts the step off. If other runs occupy all children,
#: or the handlers are not loaded yet, the pause is _NO_CHILD_SECONDS. If the zygote cannot start or fork (NoneForked),
#: the pause doubles with each claim of the task, up to _MAX_NO_CHILD_SECONDS, because each attempt fetches the step's
#: inputs, and adds events to the job's history. The alert LeaseholdStepsWithoutChild notices even one such task,
#: because it counts over the time of several pauses.
_NO_CHILD_SECONDS, _MAX_NO_CHILD_SECONDS = 5.0, 300.0
#: A cancelled attempt has the job's `grace_seconds` to end, but at least _MIN_STOP_SECONDS and at most
#: _MAX_STOP_SECONDS. Without the maximum, a handler could catch the CancelledError, go on, and keep its slot for ever.
#: A worker that ends waits only a little longer than _MAX_STOP_SECONDS (`_RELEASE_SECONDS` of worker/worker.py).
_MIN_STOP_SECONDS, _MAX_STOP_SECONDS = 1.0, 10.0
#: When a worker has to end, it lets the attempts of steps that are not cancelable finish, if their time limit is at
#: most this many seconds. For example, such a step records what was bought. If the worker stopped the step, nobody
#: would know what was bought.
LONGEST_TO_FINISH_SECONDS = 180.0

#: Errors that mean that the template cannot be read now, or that there is no template.
_NO_TEMPLATE: tuple[type[BaseException], ...] = (*TRY_AGAIN, RequestError)

#: SQL: the code of the last failure of task $1 that was an error (and not a crash, a timeout or a loss).
_LAST_ERROR = "SELECT code FROM failure WHERE task_id = $1 AND cause = 'error' ORDER BY epoch DESC LIMIT 1"
#: The code of the failure if an isolated handler raised an error that is no StepError.
_UNFORESEEN_CODE = Unforeseen("").code

#: The kind of settlement -> the outcome, as metrics, traces and log lines name it. These names keep two words of an
#: earlier release: "parked" for snoozed, "spread" for fanned out.
_OUTCOME_OF_SETTLEMENT = {
    Completion: "succeeded",
    Failure: "failed",
    Snoozing: "parked",
    Suspending: "suspended",
    Release: "released",
    FanningOut: "spread",
    CancelAcknowledged: "cancelled",
}
#: The task's new state -> the outcome, where the state is more exact than the kind of settlement.
_OUTCOME_OF_STATE = {"retry": "retried", "cancelled": "cancelled", "pending": "released"}


class Runner:
    """Runs the attempts of all slot pools of the worker."""

    def __init__(
        self,
        pipelines: Pipelines,
        pool: Pool,
        heartbeat: Heartbeat,
        starts: Starts,
        settlements: SettlementBatcher,
        templates: Templates,
        admitter: Admitter,
        directories: Directories,
        inline: InlineAttempts,
        isolated: IsolatedAttempts,
        log_and_stream_writers: LogAndStreamWriters,
    ) -> None:
        self._log_and_stream_writers = log_and_stream_writers
        self._pipelines = pipelines
        self._pool = pool
        self._heartbeat = heartbeat
        self._starts = starts
        self._settlements = settlements
        self._templates = templates
        self._admitter = admitter
        self._directories = directories
        self._inline = inline
        self._isolated = isolated
        self._running: dict[StoppableWork[Settlement], bool] = {}  # the value: whether `release` lets the work finish
        self._finishing: set[UUID] = set()  # the tasks of attempts that `release` lets finish, until they are settled
        self._have_finished = asyncio.Event()  # set once `release` was called and `_finishing` is empty
        self._given_up: set[asyncio.Task[Settlement]] = set()  # work of handlers that did not stop
        self._releasing = False

    def release(self) -> None:
        """Stop all attempts and release their leases, because the worker has to end. Exception: the attempts of short
        steps that are not cancelable go on (`finish` waits for them).
        """
        self._releasing = True
        for work, may_finish in self._running.items():
            if not may_finish:
                work.stop()
        if not self._finishing:
            self._have_finished.set()

    async def finish(self) -> None:
        """Call this after `release`. Wait until the attempts that `release` has not stopped are settled, but no longer
        than LONGEST_TO_FINISH_SECONDS.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_TO_FINISH_SECONDS):
                await self._have_finished.wait()

    async def run(self, claimed: Claimed, parent: Mapping[str, str] | None, slot: Slot) -> Claimed | None:
        """Run the attempt and settle it. Returns once PostgreSQL has answered the settlement, or the lease is lost.

        `parent`: the trace headers of the hint; None for a task that no hint announced.
        `slot`: the slot that the attempt runs in. While its `may_continue` returns True, the attempt may start the
        job's later steps speculatively, and its settlement also claims the job's next step.

        Returns the job's next step, if the settlement has claimed one.
        """
        began = monotonic()
        self._starts.count(claimed.queue)  # the list of queues shows how many attempts start in a minute
        trace = claimed.trace or {}
        trace_id = traces.trace_id_of(trace)
        declaration = self._declaration(claimed)  # the pipeline and the step; None: this worker cannot run the task
        log_and_stream = self._log_and_stream_writers.open(claimed)
        set_facts_of_lines({
            "job_id": claimed.job_id,
            "task_id": claimed.lease.task_id,
            "step": claimed.step,
            "epoch": claimed.lease.epoch,
            "trace_id": trace_id,
            **{name: trace[name] for name in ("request_id", "media_id") if name in trace},
        })  # fmt: skip
        # If a hint led to this claim, the hint's span is the parent. Otherwise the job's span is the parent. Both have
        # the same trace id.
        with traces.span(
            f"{claimed.pipeline} {_step_label(claimed)}",
            "CONSUMER",
            parent=parent or trace,
            leasehold_job_id=str(claimed.job_id),
            leasehold_step=claimed.step,
            leasehold_attempt=claimed.lease.attempt,
        ) as span:
            failpoints.reach("after_claim")  # a failpoint: here a test can stop or kill the process
            settlement: Settlement | None = None
            outcome, next_step, failure_code = "lost", None, None  # these values stay if nothing is settled
            seconds = _time_limit(claimed, declaration[1]) if declaration else 0.0
            held = self._heartbeat.hold(claimed.lease, seconds + _AFTER_LIMIT_SECONDS)  # renew the lease from now on
            if declaration is not None and _may_finish(declaration[1], seconds):
                self._finishing.add(claimed.lease.task_id)
            try:
                settlement = await self._attempt(claimed, declaration, seconds, held, log_and_stream, slot)
                await self._finish_log_and_stream(log_and_stream, settlement)
                if settlement is not None:
                    settlement = _with_next_step(settlement, claimed, slot)
                    held.settlement_sent = True  # from now on it is uncertain whether the lease is held
                    outcome, next_step, failure_code = await self._settle(claimed, settlement)
            finally:
                # Drop the lease in any case. Otherwise the heartbeat would renew the lease until the time limit has
                # passed.
                self._heartbeat.drop(held)
                self._finishing.discard(claimed.lease.task_id)
                if self._releasing and not self._finishing:
                    self._have_finished.set()
                # Discard what the attempt has begun speculatively. But if this worker goes on with `next_step`, it
                # needs this work, and keeps it.
                self._isolated.discard_speculations(claimed, next_step)
                # The worker keeps the code of the workflow running only if the suspension is committed.
                if isinstance(settlement, Suspending):
                    self._inline.workflows.settled(claimed.lease, committed=outcome == "suspended")
            span.set_attributes(leasehold_outcome=outcome)
            if failure_code is not None:
                span.mark_failed(failure_code)
        if claimed.gated:  # the job has concurrency limits, so its end may admit another job
            self._admitter.may_have_ended(claimed.job_id)
        exemplar = traces.exemplar_of(trace_id)
        metrics.count_end(claimed.pipeline, _step_label(claimed), outcome, monotonic() - began, exemplar)
        return next_step

    # --- the work

    async def _attempt(
        self,
        claimed: Claimed,
        declaration: tuple[Pipeline, Step] | None,
        seconds: float,
        held: HeldLease,
        log_and_stream: LogAndStream,
        slot: Slot,
    ) -> Settlement | None:
        """Run the handler under the held lease, for `seconds` at most. Returns the settlement to write; None when the
        lease is lost.
        """
        if declaration is None:
            log.error("unknown pipeline or step", pipeline=claimed.pipeline, step=claimed.step)
            return await self._put_off(claimed)
        work = StoppableWork(
            self._perform(claimed, *declaration, seconds, held, log_and_stream, slot), _seconds_to_stop(claimed)
        )
        # In a job that is being cancelled, only the task of a workflow can be claimed, because the workflow's code must
        # see the cancel.
        if claimed.cancelling:
            held.cancelled = True
        # `held` calls `work.stop` when the lease is lost or the attempt is overdue, and `on_cancel` when a client
        # cancels the job.
        held.subscribe(work.stop, on_cancel=partial(self._request_stop, claimed, work))
        if self._releasing:
            work.stop()
        self._running[work] = claimed.lease.task_id in self._finishing
        try:
            return await self._settlement_of(work, claimed, declaration[1], held, log_and_stream)
        finally:
            del self._running[work]
            if not work.task.done():
                self._give_up(work.task, claimed, held)

    def _give_up(self, task: asyncio.Task[Settlement], claimed: Claimed, held: HeldLease) -> None:
        """End an attempt whose handler has not stopped in time. The handler runs on, but its result is dropped, and its
        connections of the pool are cut.
        """
        log.warning(
            "a handler did not stop when its attempt was cancelled, and runs on without it: a handler must raise "
            "CancelledError again when it has caught it",
            handler=_handler_of(claimed),
            seconds=_seconds_to_stop(claimed),
        )
        self._given_up.add(task)  # the event loop itself has only weak references to asyncio tasks
        task.add_done_callback(self._forget)
        held.give_up()

    def _forget(self, task: asyncio.Task[Settlement]) -> None:
        self._given_up.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a handler that was given up has raised an error", error=text_of(error))

    def _declaration(self, claimed: Claimed) -> tuple[Pipeline, Step] | None:
        """The pipeline and step whose code does the task. If the task has a handler, which the job's template or a
        workflow names, they are those of the handler. Otherwise they are those of the task itself. Returns None if this
        worker has not loaded that code, or if the step is isolated and this worker has no child processes for its
        pipeline. (The task may stand in a queue that its step had in an earlier release, and that this worker serves
        without child processes.)
        """
        handler = _handler_of(claimed)
        pipeline_name, _, step_name = handler.rpartition(".")
        if pipeline_name not in self._pipelines:
            return None
        pipeline = self._pipelines[pipeline_name]
        step = pipeline.by_name.get(step_name)
        if step is None or not pipeline.has_code_of(step, self._isolated.pipelines):
            return None
        return pipeline, step

    async def _put_off(self, claimed: Claimed) -> Snoozing:
        """The snooze of a task whose code this worker lacks. The snooze is short while a living worker has the code."""
        handler = _handler_of(claimed)
        queue_and_handler = (claimed.queue, handler)
        try:
            async with self._pool.acquire() as connection:
                served = await handler_reads.served(connection, [queue_and_handler], await workers.dead(connection))
        except TRY_AGAIN as error:
            log.warning("the worker could not read who has the code", error=type(error).__name__)
            return Snoozing(claimed.lease, SHORTEST_PAUSE, missing_handler=handler)
        if served[queue_and_handler].able:  # a living worker has the code
            return Snoozing(claimed.lease, SHORTEST_PAUSE, missing_handler=handler)
        return Snoozing(claimed.lease, pause_without_code(claimed.job_id), missing_handler=handler)

    async def _perform(
        self,
        claimed: Claimed,
        pipeline: Pipeline,
        step: Step,
        seconds: float,
        held: HeldLease,
        log_and_stream: LogAndStream,
        slot: Slot,
    ) -> Settlement:
        record_in(log_and_stream)  # store what the handler logs
        # From now on this asyncio task runs the handler's code. Asyncio tasks that the handler makes cannot end the
        # worker.
        begin_foreign_code()
        try:
            if not step.isolated:
                return await self._inline.perform(claimed, pipeline, step, held, seconds, slot)
            if not await self._isolated.may_perform(pipeline):
                return await self._put_off(claimed)
            return await self._isolated.perform(claimed, pipeline, step, held, seconds, slot.may_continue)
        except NoChild as error:  # the step, or the task with process=True, has not begun, so it costs no attempt
            log.warning("a step is put off, perhaps to another worker", reason=str(error))
            if not isinstance(error, NoneForked):
                return Snoozing(claimed.lease, _NO_CHILD_SECONDS)
            metrics.NONE_FORKED.labels(pipeline.name).inc()
            # Let the slot rest. Otherwise it would take the next task that needs such a child.
            slot.rest_while(partial(self._isolated.failing, pipeline.name))
            return Snoozing(claimed.lease, _seconds_without_child(claimed.lease.epoch))
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise contained(error) from error  # as a RuntimeError, because SystemExit would end the worker's event loop

    def _request_stop(self, claimed: Claimed, work: StoppableWork[Settlement]) -> None:
        """Tell the handler that a client cancelled the job. The handler's next checkpoint (a call that checks whether
        to go on) then raises Cancelled. If the handler still runs after the job's `grace_seconds`, the worker cancels
        it.
        """
        self._directories.request_stop(claimed.lease)
        asyncio.get_running_loop().call_later(claimed.grace_seconds, work.stop)

    # --- how the work ended

    async def _settlement_of(
        self,
        work: StoppableWork[Settlement],
        claimed: Claimed,
        step: Step,
        held: HeldLease,
        log_and_stream: LogAndStream,
    ) -> Settlement | None:
        """Wait for `work`. Returns the settlement that fits its end; None when this worker has lost the lease."""
        try:
            return await work.result()
        except BaseException as raised:
            # If the handler raised a group of errors, `deciding` chooses the error that decides how the attempt ends.
            error = deciding(raised)
            if isinstance(error, asyncio.CancelledError | Cancelled):
                settlement = await self._settlement_of_stop(claimed, step, held, error)
                if isinstance(settlement, Failure):
                    log_and_stream.recorder.add_final("error", settlement.message, trace=traceback_of(raised))
                elif isinstance(error, Cancelled) and error.__cause__ is not None:  # the cleanup of a workflow failed
                    message = f"the cleanup after the cancel failed: {text_of(error.__cause__)}"
                    log_and_stream.recorder.add_final("error", message, trace=traceback_of(error.__cause__))
                return settlement
            if isinstance(error, OVERTAKEN):
                # LeaseLost, or ObjectExists. ObjectExists means that another attempt has written different bytes under
                # this attempt's key, so another worker has probably taken the lease over. Settle nothing, because the
                # newer attempt settles the task.
                return None
            if not work.task.done():
                raise  # this attempt is being ended from outside, so the error is not the handler's
            step_error = as_step_error(error)
            reason = f"{step_error.code}: {step_error.message}"
            log_and_stream.recorder.add_final("error", reason, trace=traceback_of(raised))
            # A second unforeseen exception in a row is hardly an accident, so do not retry again.
            if isinstance(step_error, Unforeseen) and await self._was_unforeseen_before(claimed):
                step_error = Permanent(step_error.code, step_error.message)
            return await self._failure(claimed, step, step_error)

    async def _settlement_of_stop(
        self, claimed: Claimed, step: Step, held: HeldLease, stop: BaseException
    ) -> Settlement | None:
        """The settlement of work that stopped early. The first of these checks that is true decides. Returns None if
        the lease is lost. Raises `stop` if this attempt's own asyncio task is cancelled.
        """
        if held.lost:
            return None
        if held.cancelled:
            return CancelAcknowledged(claimed.lease)
        if held.overdue:
            message = f"the step ran longer than {_time_limit(claimed, step):g} s, and did not stop after that"
            return await self._failure(claimed, step, StepTimeout("step_timeout", message))
        if isinstance(stop, Cancelled):
            message = "the handler raised Cancelled, but nobody has cancelled the job"
            return await self._failure(claimed, step, Permanent("handler_cancelled", message))
        if self._releasing:
            return Release(claimed.lease)
        if being_cancelled():
            raise stop
        # The handler awaited something that was cancelled.
        message = "the handler let a CancelledError out, but nobody has cancelled the attempt"
        return await self._failure(claimed, step, Retryable(message, code="handler_error"))

    async def _failure(self, claimed: Claimed, step: Step, error: StepError) -> Failure:
        ladder = await self._ladder(claimed, step) if error.retryable else step.retry_ladder
        return failure_of(claimed, step, error, ladder)

    async def _ladder(self, claimed: Claimed, step: Step) -> Sequence[timedelta]:
        """The delays before the task's further attempts. They come from the retry policy of the job's template if the
        template declares the step and names this code as its handler. They come from the code in all other cases, and
        if the template cannot be read now.
        """
        if claimed.handler is None:
            return step.retry_ladder
        try:
            async with self._pool.acquire() as connection:
                template = await self._templates.find(
                    connection, claimed.tenant_id, claimed.pipeline, claimed.pipeline_version
                )
        except _NO_TEMPLATE as error:  # NotFound: the job has no template, and the task is a part or a workflow's task
            log.debug("no retry policy of a template", error=type(error).__name__)
            return step.retry_ladder
        declared_step = template.template.step(claimed.step)
        if declared_step is None:  # a part or a workflow's task, which the code of a step has started
            return step.retry_ladder
        return template.template.retry(claimed.step).ladder

    async def _was_unforeseen_before(self, claimed: Claimed) -> bool:
        """Whether the attempt that last raised an error also ended with an unforeseen exception."""
        if not claimed.errors:
            return False
        try:
            async with self._pool.acquire() as connection:
                code = await connection.fetchval(_LAST_ERROR, claimed.lease.task_id)
        except TRY_AGAIN:  # the database is away; if False is wrong, the task gets one more attempt
            return False
        return bool(code == _UNFORESEEN_CODE)

    # --- the settlement

    async def _finish_log_and_stream(self, log_and_stream: LogAndStream, settlement: Settlement | None) -> None:
        """Write the last lines and values of the attempt's log and stream."""
        if settlement is None:
            log_and_stream.recorder.add_final("warning", "The lease is lost: another attempt decides about this step.")
        await self._log_and_stream_writers.finish(log_and_stream)

    async def _settle(self, claimed: Claimed, settlement: Settlement) -> tuple[str, Claimed | None, str | None]:
        """Settle, log and count. Returns the outcome's name, the step that the settlement claimed, and the code of the
        failure (None if the attempt did not fail).
        """
        try:
            with traces.span("settle"):
                answer = await self._settlements.settle(settlement)
        except (asyncpg.DataError, asyncpg.ProgramLimitExceededError) as error:
            # PostgreSQL cannot store the step's value. For example, the value has a NUL, or is too large.
            refused = Permanent("bad_output", f"PostgreSQL cannot store what the step returned: {error}")
            settlement, answer = await self._settle_refused(claimed, refused)
        except asyncpg.UniqueViolationError:  # the task of one of the new parts exists already
            try:  # perhaps another step has just fanned out into the same part; a second try uses other names
                answer = await self._settlements.settle(settlement)
            except asyncpg.UniqueViolationError:
                refused = Permanent("spread_twice", "the step fanned out into parts a second time")
                settlement, answer = await self._settle_refused(claimed, refused)
        outcome = _outcome(settlement, answer)
        if outcome == "lost":
            metrics.REFUSED.inc()
        code = settlement.code if isinstance(settlement, Failure) else None
        if code is not None and outcome == "retried":
            metrics.count_retry(claimed.pipeline, _step_label(claimed), code)
        elif code is not None and answer.is_dead_letter:
            count_dead_letter(claimed.pipeline, _step_label(claimed), code)
        if outcome in ("failed", "retried", "lost"):
            log.warning("attempt ended", outcome=outcome, code=code)
        elif _logger.isEnabledFor(logging.DEBUG):  # on this hot path even a line that is dropped costs time
            log.debug("attempt ended", outcome=outcome)
        return outcome, answer.next, code

    async def _settle_refused(self, claimed: Claimed, error: Permanent) -> tuple[Failure, Answer]:
        """Fail the attempt, because PostgreSQL refused the values of its settlement."""
        declaration = self._declaration(claimed)
        assert declaration is not None  # the handler has run
        failure = await self._failure(claimed, declaration[1], error)
        return failure, await self._settlements.settle(failure)


def _with_next_step(settlement: Settlement, claimed: Claimed, slot: Slot) -> Settlement:
    """The settlement to send. If `slot` may run a further step, this settlement also claims a next step of the job in
    the same queue. A completion of the last step records that no step follows.
    """
    if isinstance(settlement, Completion) and claimed.is_last:
        return settlement.of_last_step()
    if not slot.may_continue():
        return settlement
    if isinstance(settlement, Completion):
        return settlement.claiming_next()
    if isinstance(settlement, Suspending):
        return settlement.claiming_next(claimed.queue)
    return settlement


def _time_limit(claimed: Claimed, step: Step) -> float:
    """Seconds that one attempt may take."""
    return float(claimed.timeout_seconds or step.timeout.total_seconds())


def _may_finish(step: Step, seconds: float) -> bool:
    """Whether an attempt of this step, which may take `seconds`, goes on when the worker has to end."""
    return not step.cancelable and seconds <= LONGEST_TO_FINISH_SECONDS


def _seconds_to_stop(claimed: Claimed) -> float:
    """Seconds that a cancelled attempt has to end."""
    return min(max(float(claimed.grace_seconds), _MIN_STOP_SECONDS), _MAX_STOP_SECONDS)


def _seconds_without_child(epoch: int) -> float:
    """The pause of a task for which no child could be started or forked. `epoch`: how often the task was claimed."""
    return min(_NO_CHILD_SECONDS * 2.0 ** min(epoch - 1, 10), _MAX_NO_CHILD_SECONDS)


def _outcome(settlement: Settlement, answer: Answer) -> str:
    if answer.verdict is Verdict.LOST:
        return "lost"
    # A workflow that failed runs again if its job was cancelled meanwhile, because its code must see the cancel.
    if answer.state == "waiting" and isinstance(settlement, Failure):
        return "parked"
    return _OUTCOME_OF_STATE.get(answer.state or "") or _OUTCOME_OF_SETTLEMENT[type(settlement)]


def _step_label(claimed: Claimed) -> str:
    """The step as metrics and the names of spans have it."""
    return declared_step(claimed.step, claimed.handler)


def _handler_of(claimed: Claimed) -> str:
    """The name `pipeline.step` of the code that does the task."""
    return claimed.handler or f"{claimed.pipeline}.{claimed.step}"
