"""The handler of bulk operations (jobs that cancel, retry or delete every job that a filter finds). It walks over the
jobs that the filter finds (the targets), newest first, in small batches. An operation may have a canary (its first few
targets). If these jobs do not succeed, the operation stops.

A batch and the step's note (its stored progress, progress.py) commit in one transaction, under the lease. So the
operation acts on each target once, even if the worker dies. From time to time the step snoozes: it gives back its slot
(room for one attempt in a worker), and continues later. Otherwise the operation would hold the slot for hours, and a
worker that stops would have to wait for the operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Protocol
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db import handler_reads, job_lists
from leasehold.db.clock import DatabaseClock
from leasehold.db.database import Connection
from leasehold.db.job_lists import Bound, Listing, Scope
from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Invalid, Permanent, TooMany
from leasehold.domain.job_filter import parse
from leasehold.domain.sentences import counted
from leasehold.domain.verdicts import Done, LeftToOthers, Snooze
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.pipelines.operations.batch_size import MAX_BATCH, BatchSize
from leasehold.pipelines.operations.batches import Acting, Outcome, act_on
from leasehold.pipelines.operations.context import OperationContext, open_operation_context
from leasehold.pipelines.operations.pace import largest_batch, next_time, pause_before, rate_of
from leasehold.pipelines.operations.pipeline import QUEUE, Operation, bound_of, bulk_operation
from leasehold.pipelines.operations.progress import Busy, Count, Left, Progress, progress_of
from leasehold.runtime import failpoints
from leasehold.transitions import concurrency, operations
from leasehold.transitions.operations import Refusal

#: An attempt snoozes after this many seconds.
_ATTEMPT_SECONDS = 15.0
#: How many targets one statement reads ahead, and the most rows that it may read to find them.
_TARGETS_AHEAD, _MAX_READ = 500, 15_000
#: The step sleeps for a pause up to this long, and snoozes for a longer pause.
_LONGEST_SLEEP = 1.0
#: If another transaction holds a job, the operation tries it again after _BUSY_SECONDS. It tries at most _MAX_TRIES
#: times.
_MAX_TRIES, _BUSY_SECONDS = 20, 0.5
#: If this process lacks the code of a job, the operation leaves the job to a worker that has the code, and the note
#: names the job. When there are `_MAX_LEFT` of these jobs, the operation waits for such a worker. After
#: `_LEFT_SECONDS`, any worker may claim the operation, and checks again whether a worker has the code.
_MAX_LEFT, _LEFT_SECONDS = 1_000, 30.0
#: The pause between two checks of the canary jobs.
_CANARY_SECONDS = 1.0
#: The codes of the errors with which the canary stops the operation.
_CANARY_CODES = ("canary_refused", "canary_failed", "canary_late")

#: The commit of a batch does not wait for the disk, so its locks are short. If PostgreSQL dies before the batch is on
#: disk, the batch and its note are both lost, and the operation acts on these jobs again. The operation's end waits for
#: the disk.
_ASYNCHRONOUS_COMMIT = "SET LOCAL synchronous_commit TO off"

# The worker opens the context once. All attempts share it as `attempt.opened`.
bulk_operation.opens_with_pipelines(open_operation_context)


class AnnouncingAttempt(Attempt, Protocol):
    """The attempt of a step of the platform, which may announce tasks of other jobs."""

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Publish hints (messages that tell workers of tasks) soon. Call this after the commit of these tasks."""


@bulk_operation.handles("act")
async def act(attempt: AnnouncingAttempt) -> Done | Snooze:
    """Act on one batch after the other, for about `_ATTEMPT_SECONDS`."""
    async with attempt.connection() as connection:
        clock = await DatabaseClock.read(connection)
    return await _OperationAttempt(attempt, progress_of(await attempt.note()), clock).run()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Jobs of one tenant to act on. `before`: the id below which the walk goes on after this batch. `walked`: the walk
    ends with this batch. `is_repeated`: the batch has jobs of earlier batches, so the walk does not move. `pause`: the
    shortest pause before the batch, in seconds.
    """

    job_ids: Sequence[UUID]
    tenant_id: str
    before: UUID | None
    walked: bool
    is_repeated: bool = False
    pause: float = 0.0


class _OperationAttempt:
    """One attempt of the step: it acts on batches until it snoozes or the operation is done."""

    def __init__(self, attempt: AnnouncingAttempt, progress: Progress, clock: DatabaseClock) -> None:
        self._attempt, self._progress = attempt, progress
        self._clock = clock  # the times in the progress are PostgreSQL's, because another worker may read them
        self._operation: Operation = attempt.params
        self._acting = Acting(attempt.job_id, self._operation)
        self._context: OperationContext = attempt.opened
        self._ends_at = monotonic() + _ATTEMPT_SECONDS  # after this time the attempt snoozes
        self._targets: list[tuple[UUID, str]] = []  # id and tenant of the targets that have been read ahead
        #: The values that `before` and `walked` of the progress get once the operation has acted on all `_targets`.
        self._walk_after_targets: tuple[UUID | None, bool] = (None, False)
        #: This attempt acts on a job in `left` of the progress if the job's pipeline is in this set. For each of these
        #: pipelines, this process has the code, or no worker has it.
        self._pipelines_to_take: frozenset[str] = frozenset()
        self._size = BatchSize()  # chooses how many jobs the next batch has
        # The operation acts on at most this many jobs a second.
        self._rate = rate_of(self._operation.action, self._operation.rate, self._context.settings)

    async def run(self) -> Done | Snooze:
        await self._count_targets()
        await self._choose_pipelines_to_take()
        while True:
            self._attempt.checkpoint()
            if not await self._may_go_on():
                return self._snooze(_CANARY_SECONDS)
            batch = await self._next_batch()
            if batch is None:
                return self._leave() if self._progress.left else Done(value=self._summary())
            pause = self._pause_before(batch)
            if pause > _LONGEST_SLEEP or monotonic() > self._ends_at:
                return self._snooze(max(pause, 0.0))
            if pause > 0:
                await asyncio.sleep(pause)
                self._attempt.checkpoint()
            seconds_until_room = await self._commit(batch)
            if seconds_until_room is not None:
                return self._snooze(seconds_until_room)
            self._attempt.progress(self._progress.percent, counted(self._progress.done, "job", "jobs"))

    async def _count_targets(self) -> None:
        """Count the targets, in the first attempt of the operation only."""
        if self._progress.total is None:
            async with self._attempt.connection() as connection:
                n, exact = await job_lists.count(connection, self._listing())
            self._progress.total = Count(n=n, exact=exact)

    def _snooze(self, seconds: float) -> Snooze:
        return Snooze(timedelta(seconds=seconds), self._progress.note())

    async def _choose_pipelines_to_take(self) -> None:
        """Set `_pipelines_to_take`. Earlier attempts have left jobs to workers with their code. This attempt acts on
        such a job if this process has the code. If no worker has the code, this attempt refuses the job.
        """
        pipelines = {_pipeline_of(left.handler) for left in self._progress.left}
        lacking = [pipeline for pipeline in pipelines if self._context.actions.kinds.pipeline(pipeline) is None]
        if lacking:
            async with self._attempt.connection() as connection:
                pipelines -= (await handler_reads.handlers_of_pipelines(connection, QUEUE, lacking)).keys()
        self._pipelines_to_take = frozenset(pipelines)

    def _leave(self) -> LeftToOthers:
        # A worker with the code of this handler makes the operation due at once, and acts on the left jobs. If there is
        # no such worker, the operation runs again after _LEFT_SECONDS.
        handler = self._progress.left[0].handler
        return LeftToOthers(timedelta(seconds=_LEFT_SECONDS), self._progress.note(), handler=handler)

    def _summary(self) -> dict[str, object]:
        progress = self._progress
        counts = {"acted": progress.acted, "refused": progress.refused, "codes": progress.codes}
        return counts | {"longest_ms": progress.longest_ms}

    def _listing(self, max_read: int | None = None) -> Listing:
        operation, kinds = self._operation, self._context.actions.kinds
        try:
            job_filter = parse(operation.filter, operation.at)
        except Invalid as error:  # a newer release accepted the filter, and this release cannot read it
            raise Permanent(error.code, error.message) from None
        # `owned`: the pipelines that belong to a kind of work. `others`: the pipelines that belong to no kind.
        scope = Scope(operation.of_tenant, operation.pipelines, operation.runs, others=kinds.unowned, owned=kinds.owned)
        bound = Bound(operation.at, bound_of(operation.action))
        return Listing(scope, job_filter, self._progress.before, bound=bound, max_read=max_read)

    # --- the next batch

    async def _next_batch(self) -> _Batch | None:
        """The next batch. First come the jobs in `left` that this attempt may take (`_pipelines_to_take`). Then come
        the targets of the walk. Busy jobs (another transaction held them) are tried again when they fill a batch, or
        when the walk has no more targets.

        Returns None if no job remains except those that are left to other workers, or if `_MAX_LEFT` jobs are left.
        """
        for left in self._progress.left:
            if _pipeline_of(left.handler) in self._pipelines_to_take:
                return self._repeated_batch(left.job_ids, left.tenant_id)
        if sum(len(left.job_ids) for left in self._progress.left) >= _MAX_LEFT:
            return None
        await self._read_targets()
        if self._progress.busy and (not self._targets or len(self._progress.busy) >= MAX_BATCH):
            return self._busy_batch()
        return self._batch_of_targets() if self._targets else None

    async def _read_targets(self) -> None:
        """Read the next targets of the walk, if all targets that were read are done and the walk has not ended."""
        while not self._targets and not self._progress.walked:
            async with self._attempt.connection() as connection:
                walk_part = await job_lists.next_walk_part(connection, self._listing(_MAX_READ), _TARGETS_AHEAD)
            self._targets = list(walk_part.targets)
            self._walk_after_targets = (walk_part.before, walk_part.before is None)
            if not self._targets:  # the statement stopped at _MAX_READ rows, or at the end of the jobs
                self._progress.before, self._progress.walked = self._walk_after_targets
                self._attempt.checkpoint()

    def _busy_batch(self) -> _Batch:
        """A batch of busy jobs. All are of the tenant of the first busy job."""
        tenant_id = self._progress.busy[0].tenant_id
        busy_ids = [busy.job_id for busy in self._progress.busy if busy.tenant_id == tenant_id]
        return self._repeated_batch(busy_ids, tenant_id, pause=_BUSY_SECONDS)

    def _repeated_batch(self, job_ids: Sequence[UUID], tenant_id: str, pause: float = 0.0) -> _Batch:
        progress = self._progress
        return _Batch(job_ids[: self._max_jobs()], tenant_id, progress.before, progress.walked, True, pause)

    def _batch_of_targets(self) -> _Batch:
        """A batch of the first targets that have been read, all of one tenant."""
        tenant_id = self._targets[0][1]
        job_ids = []
        for job_id, owner in self._targets[: self._max_jobs()]:
            if owner != tenant_id:
                break
            job_ids.append(job_id)
        is_last = len(job_ids) == len(self._targets)
        before, walked = self._walk_after_targets if is_last else (job_ids[-1], False)
        return _Batch(job_ids, tenant_id, before, walked)

    def _max_jobs(self) -> int:
        """The most jobs of the next batch: limited by the time that it may take, by the rate, and by the canary."""
        allowed: int = min(self._size.jobs, largest_batch(self._rate))
        if self._operation.canary and self._progress.canary.passed is None:
            allowed = min(allowed, max(self._operation.canary - self._progress.done, 1))
        return allowed

    def _pause_before(self, batch: _Batch) -> float:
        pause = pause_before(self._progress.next_at, self._clock.time(), self._rate)
        return max(pause, batch.pause)

    # --- a batch

    async def _commit(self, batch: _Batch) -> float | None:
        """Act on the batch, and commit. If a limit of the tenant has no room for the batch, nothing changes, and the
        next batch is smaller. Returns the seconds to wait if the limit has no room for a single job; otherwise None.
        """
        async with self._attempt.connection() as connection:
            began = monotonic()
            try:
                async with connection.transaction():
                    await connection.execute(_ASYNCHRONOUS_COMMIT)
                    outcome = await act_on(self._context, connection, self._acting, batch.job_ids, batch.tenant_id)
                    progress = self._progress_after(batch, outcome)
                    failpoints.reach("mid_batch")
                    await self._record_refusals(connection, outcome)
                    await self._attempt.remember(progress.note(), connection)
            except (TooMany, Invalid) as error:  # Invalid means that the batch alone exceeds a limit
                if len(batch.job_ids) > 1:
                    self._size.record_refusal(len(batch.job_ids))
                    return None
                return error.retry_after or _LONGEST_SLEEP
            failpoints.reach("after_batch")
            self._progress = progress
            self._pipelines_to_take -= {_pipeline_of(handler) for handler in outcome.left.values()}
            if not batch.is_repeated:
                del self._targets[: len(batch.job_ids)]
            seconds = monotonic() - began
            self._size.record_batch(len(batch.job_ids), seconds)
            self._progress.longest_ms = max(self._progress.longest_ms, round(1000 * seconds))
            count_ended_jobs(outcome.ended)
            # The relay (a loop of the worker) would also publish these hints, but only twice a second, and many at
            # once.
            self._attempt.announce(outcome.hints)
            if outcome.limits:
                self._attempt.announce(await concurrency.admit(connection, sorted(outcome.limits), outcome.departed))
        return None

    def _progress_after(self, batch: _Batch, outcome: Outcome) -> Progress:
        """The progress once the batch is committed. Also adds to the outcome the refusals of jobs that were busy too
        often.
        """
        progress = self._progress.model_copy(deep=True)
        progress.busy = self._busy_after(batch, outcome)  # first, because it may add refusals for `count`
        progress.left = self._left_after(batch, outcome)
        progress.count(outcome.acted, outcome.refusals)
        progress.before, progress.walked = batch.before, batch.walked
        progress.next_at = next_time(progress.next_at, self._clock.time(), len(outcome.acted), self._rate)
        self._advance_canary(progress, outcome)
        return progress

    def _busy_after(self, batch: _Batch, outcome: Outcome) -> list[Busy]:
        """The jobs that the operation must try again. A job that was busy too often is refused instead."""
        tries = {busy.job_id: busy.tries for busy in self._progress.busy}
        in_batch = set(batch.job_ids)
        to_try_again = [busy for busy in self._progress.busy if busy.job_id not in in_batch]
        for job_id in outcome.busy:
            tries_now = tries.get(job_id, 0) + 1
            if tries_now < _MAX_TRIES:
                to_try_again.append(Busy(job_id=job_id, tenant_id=batch.tenant_id, tries=tries_now))
            else:
                sentence = "Another transaction held the job all the time."
                outcome.refusals.append(Refusal(job_id, "job_busy", sentence))
        return to_try_again

    def _left_after(self, batch: _Batch, outcome: Outcome) -> list[Left]:
        """The jobs that the operation must leave to workers with their code."""
        job_ids: dict[tuple[str, str], list[UUID]] = {}  # (handler, tenant) -> the jobs to leave
        in_batch = set(batch.job_ids)
        for left in self._progress.left:
            job_ids[left.handler, left.tenant_id] = [job_id for job_id in left.job_ids if job_id not in in_batch]
        for job_id, handler in outcome.left.items():
            job_ids.setdefault((handler, batch.tenant_id), []).append(job_id)
        return [
            Left(handler=handler, tenant_id=tenant_id, job_ids=ids)
            for (handler, tenant_id), ids in job_ids.items()
            if ids
        ]

    def _advance_canary(self, progress: Progress, outcome: Outcome) -> None:
        """Add the jobs of a batch to the canary. When the canary is complete, set the time by which its jobs must have
        ended.
        """
        canary, size = progress.canary, self._operation.canary
        if not size or canary.passed is not None:
            return
        canary.job_ids += outcome.acted
        if progress.done >= size:
            canary.until = self._clock.time() + self._context.settings.operation_canary_seconds

    async def _record_refusals(self, connection: Connection, outcome: Outcome) -> None:
        """Record refusals, up to the number in the setting `operation_refusals`. The progress counts all refusals."""
        room = self._context.settings.operation_refusals - self._progress.refused
        if outcome.refusals and room > 0:
            await operations.record(connection, self._attempt.job_id, self._attempt.tenant_id, outcome.refusals[:room])

    # --- the canary

    async def _may_go_on(self) -> bool:
        """Whether the operation may act on the next batch. If not, it must wait until all canary jobs have ended. If
        the operation retries jobs, the canary jobs must also have succeeded.

        Raises Permanent, which stops the operation, if a canary job was refused, failed, or takes too long. If a person
        then retries the operation, it goes on without a canary.
        """
        canary = self._progress.canary
        if canary.until is None or canary.passed:  # the canary is not complete yet, or has succeeded
            return True
        if canary.passed is False and await self._was_stopped():
            canary.until = None  # so that no later batch checks the canary
            return True
        if self._progress.refused:
            codes = ", ".join(sorted(self._progress.codes))
            refused = counted(self._progress.refused, "of the canary jobs was", "of the canary jobs were")
            await self._stop("canary_refused", f"{refused} refused: {codes}.")
        if self._operation.action != "delete":
            async with self._attempt.connection() as connection:
                operation = self._operation
                unfinished, failed = await operations.canary(
                    connection, canary.job_ids, operation.of_tenant, operation.action
                )
            if failed:
                await self._stop("canary_failed", f"{failed} of {len(canary.job_ids)} canary jobs did not succeed.")
            if unfinished:
                if self._clock.time() > canary.until:
                    await self._stop(
                        "canary_late", f"{counted(unfinished, 'canary job', 'canary jobs')} had not ended in time."
                    )
                return False
        canary.passed, canary.job_ids = True, []
        return True

    async def _was_stopped(self) -> bool:
        """Whether the operation has failed because of its canary. Then this attempt runs because a person retried the
        operation. If the answer is False, the attempt that wrote `passed=False` into the note died before its failure
        was committed.
        """
        async with self._attempt.connection() as connection:
            return await operations.has_failed(connection, self._attempt.task_id, _CANARY_CODES)

    async def _stop(self, code: str, sentence: str) -> None:
        self._progress.canary.passed = False
        await self._attempt.remember(self._progress.note())
        raise Permanent(code, sentence)


def _pipeline_of(handler: str) -> str:
    """The pipeline of a handler, `pipeline.step`."""
    return handler.rpartition(".")[0]
