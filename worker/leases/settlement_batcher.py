"""Settles attempts. All attempts that end during one round trip to PostgreSQL share the next round trip.

A settlement records how an attempt ended. PostgreSQL accepts a settlement only while the attempt's lease is valid.
After each commit, the batcher calls the callback `announce` with the hints (messages that a task is due) that the
commit wrote to the outbox. It also counts the jobs that the commit has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TypeAlias
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect
from leasehold.domain.lease import Lease, differ_in_a_task
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.settings import Settings
from leasehold.transitions import claims, settlements
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.transitions.settlements import (
    Completion,
    Failure,
    FanningOut,
    Settled,
    Snoozing,
    Suspending,
    Verdict,
)
from leasehold.worker import metrics
from leasehold.worker.leases.heartbeat import Heartbeat

#: For how many seconds a settlement waits while the database is away. There is no limit, because if a settlement gave
#: up, the step would have to run again.
_PATIENCE = float("inf")


@dataclass(frozen=True, slots=True)
class Release:
    """Release the lease, because the worker is stopping. The attempt then does not count, and the task is not charged a
    loss (an attempt whose worker died).
    """

    lease: Lease


@dataclass(frozen=True, slots=True)
class CancelAcknowledged:
    """The attempt stopped because a client cancelled its job."""

    lease: Lease


#: How an attempt ended.
Settlement: TypeAlias = Completion | Failure | Snoozing | Suspending | Release | FanningOut | CancelAcknowledged


@dataclass(frozen=True, slots=True)
class Answer:
    """PostgreSQL's answer to a settlement. `state`: the task's new state; None if the lease was lost.
    `next`: the job's next step, if the settlement has also claimed this step for the worker. `is_dead_letter`: the task
    failed for good, and no workflow decides what follows.
    """

    verdict: Verdict
    state: str | None
    next: Claimed | None = None
    is_dead_letter: bool = False


class SettlementBatcher:
    """Every attempt of the worker awaits `settle`. All settlements use one connection. `terms`: the owner and the
    duration of the leases of next steps, which a settlement may also claim. `at_most`: the most settlements of one
    batch.
    """

    def __init__(
        self,
        settings: Settings,
        terms: LeaseTerms,
        heartbeat: Heartbeat,
        announce: Callable[[Sequence[Announcement]], None],
        at_most: int,
    ) -> None:
        self._terms = terms
        self._heartbeat = heartbeat
        self._announce = announce
        self._batcher: Batcher[Settlement, Answer] = Batcher(
            lambda: connect(settings, "settlements"),
            self._settle,
            name="settlements",
            at_most=at_most,
            patience=_PATIENCE,
            sets_aside=True,  # a settlement that takes too long delays no other settlement
        )
        self.start, self.close = self._batcher.start, self._batcher.close

    async def settle(self, settlement: Settlement) -> Answer:
        """Settle, and return PostgreSQL's answer. While the database is away, this waits without a limit of time."""
        return await self._batcher.ask(settlement)

    async def _settle(
        self,
        connection: Connection,
        batch: Sequence[Settlement],
        repeated: bool,  # noqa: FBT001 - the Batcher's signature
    ) -> list[Answer]:
        """Settle the batch. If PostgreSQL refuses settlements, this method first makes the workflows among the refused
        tasks due again. For the other refused tasks, it then acknowledges the cancels. Returns the answers, in the
        order of the batch. `repeated`: the answer of an earlier try was lost, so PostgreSQL may already have accepted
        the settlements.

        If the worker lost a task and claimed it again while the first settlement waited, the batch has two settlements
        of the task. PostgreSQL answers by task. So this method then runs each settlement of the batch alone.
        """
        if differ_in_a_task(settlement.lease for settlement in batch):
            return [answer for one in batch for answer in await self._settle(connection, [one], repeated)]
        answers = await self._carry_out(connection, batch)
        refused = _refused(batch, answers)
        if refused:
            answers |= await self._return_workflows(connection, refused)
            refused = _refused(refused, answers)
        # PostgreSQL may have refused the remaining settlements because their jobs are being cancelled. So acknowledge
        # that the attempts have stopped. If a lease is lost, PostgreSQL refuses the acknowledgement, too.
        if refused:
            leases = [settlement.lease for settlement in refused]
            answers |= self._take(await settlements.acknowledge_cancel(connection, leases))
        if repeated:
            answers |= await self._recover_next(connection, batch, answers)
            # The earlier try may have claimed a step whose job is being cancelled by now. `_recover_next` does not
            # claim such a step again. The heartbeat then releases the tasks that this worker owns by PostgreSQL's rows
            # but does not hold.
            self._heartbeat.record_lost_answer()
        return [answers[settlement.lease.task_id] for settlement in batch]

    async def _carry_out(self, connection: Connection, batch: Sequence[Settlement]) -> dict[UUID, Answer]:
        """Run one statement for each kind of settlement in the batch. Exception: there is no statement here for a
        CancelAcknowledged. Such a settlement gets no answer, so it counts as refused, and `_settle` acknowledges the
        cancel.
        """
        completions = [settlement for settlement in batch if isinstance(settlement, Completion)]
        others = [settlement for settlement in batch if not isinstance(settlement, Completion)]  # empty in most batches
        failures = [settlement for settlement in others if isinstance(settlement, Failure)]
        snoozes = [settlement for settlement in others if isinstance(settlement, Snoozing)]
        leases_to_release = [settlement.lease for settlement in others if isinstance(settlement, Release)]
        fan_outs = [settlement for settlement in others if isinstance(settlement, FanningOut)]
        suspensions = [settlement for settlement in others if isinstance(settlement, Suspending)]
        began = perf_counter()
        answers: dict[UUID, Answer] = {}
        if completions:
            answers |= self._take(await settlements.complete(connection, completions, self._terms))
        if failures:
            answers |= self._take(await settlements.fail(connection, failures))
        if snoozes:
            answers |= self._take(await settlements.snooze(connection, snoozes))
        if leases_to_release:
            answers |= self._take(await settlements.release(connection, leases_to_release))
        if fan_outs:
            answers |= self._take(await settlements.fan_out(connection, fan_outs))
        if suspensions:
            answers |= self._take(await settlements.suspend(connection, suspensions, self._terms))
        metrics.observe_duration("settle", began)
        return answers

    def _take(self, outcome: Settled) -> dict[UUID, Answer]:
        """Announce the hints and count the ended jobs of a statement that has committed. Returns the answers.

        Call this before the next statement of the batch, because that statement may fail. In this case the batcher runs
        each settlement again. PostgreSQL then answers `settled`, but does not name the hints and the jobs a second
        time.
        """
        self._announce(outcome.announcements)
        count_ended_jobs(outcome.ended)
        return _answers(outcome)

    async def _return_workflows(self, connection: Connection, refused: Sequence[Settlement]) -> dict[UUID, Answer]:
        """Make the workflows among the `refused` settlements due again. PostgreSQL refuses the settlement of a workflow
        whose job a client has cancelled, and the workflow's code must see the cancel. A workflow that was about to wait
        is due immediately. A workflow whose attempt failed, and may be repeated, is due after the pause of this
        failure. If the task is no workflow, PostgreSQL refuses this release or snooze, too.
        """
        suspended_leases = [settlement.lease for settlement in refused if isinstance(settlement, Suspending)]
        snoozings = [
            Snoozing(settlement.lease, settlement.delay)
            for settlement in refused
            if isinstance(settlement, Failure) and settlement.retryable
        ]
        answers: dict[UUID, Answer] = {}
        if suspended_leases:
            answers |= self._take(await settlements.release(connection, suspended_leases))
        if snoozings:
            answers |= self._take(await settlements.snooze(connection, snoozings))
        return answers

    async def _recover_next(
        self, connection: Connection, batch: Sequence[Settlement], answers: Mapping[UUID, Answer]
    ) -> dict[UUID, Answer]:
        """Claim again the next steps that the earlier try may have claimed. The answer of that try was lost, so this
        worker does not know of these steps. Without a new claim, no worker would run them before their leases expire.
        Returns the changed answers.
        """
        completed_ids: list[UUID] = []
        workflow_of_step: dict[UUID, UUID] = {}  # a step that a suspension started -> the workflow's task
        for settlement in batch:
            task_id = settlement.lease.task_id
            if answers[task_id].next is not None:
                continue
            if isinstance(settlement, Completion) and settlement.claim_next:
                completed_ids.append(task_id)
            elif isinstance(settlement, Suspending) and settlement.step_to_claim:
                workflow_of_step[settlement.step_to_claim] = task_id
        if not completed_ids and not workflow_of_step:
            return {}
        held_ids = self._heartbeat.all_held()  # steps that the worker holds already are not claimed again
        by_task = await claims.claim_again(connection, completed_ids, workflow_of_step, self._terms, held_ids)
        return {task_id: replace(answers[task_id], next=claimed) for task_id, claimed in by_task.items()}


def _answers(outcome: Settled) -> dict[UUID, Answer]:
    return {
        task_id: Answer(
            verdict, outcome.states.get(task_id), outcome.next_steps.get(task_id), task_id in outcome.dead_letters
        )
        for task_id, verdict in outcome.verdicts.items()
    }


def _refused(batch: Sequence[Settlement], answers: Mapping[UUID, Answer]) -> list[Settlement]:
    """The settlements that PostgreSQL has not accepted."""
    return [settlement for settlement in batch if not _is_settled(answers.get(settlement.lease.task_id))]


def _is_settled(answer: Answer | None) -> bool:
    return answer is not None and answer.verdict is Verdict.SETTLED
