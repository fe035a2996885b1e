"""What a worker asks for beside the end of an attempt: no more than it has room for."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.transitions.settlements import Completion, Output, Settled, Suspending, Verdict
from leasehold.transitions.workflows.records import Call

LEASE = Lease(uuid4(), uuid4(), 1, 1, 0.0)


def test_a_completion_is_the_same_whether_its_worker_goes_on_or_knows_it_to_be_the_last() -> None:
    outputs, value = [Output("o", "k", 1, "00", "text/plain")], {"x": 1}
    done = Completion(LEASE, outputs, value)
    assert done.claiming_next() == Completion(LEASE, outputs, value, claim_next=True, is_last=False)
    assert done.claiming_next().of_last_step() == Completion(LEASE, outputs, value, claim_next=False, is_last=True)


def test_a_suspension_claims_the_first_step_that_it_starts_on_the_queue_of_its_worker() -> None:
    calls = (
        Call("", 1, "run", "f", child=new_id(), step="f#1", queue="elsewhere"),
        Call("", 2, "start", "g", child=new_id()),
        Call("", 3, "run", "f", child=new_id(), step="f#2", queue="here"),
        Call("", 4, "run", "f", child=new_id(), step="f#3", queue="here"),
    )
    suspending = Suspending(LEASE, calls, 3, 1, 60.0)
    assert suspending.claiming_next("here") == Suspending(LEASE, calls, 3, 1, 60.0, step_to_claim=calls[2].child)
    assert suspending.claiming_next("nowhere") == suspending


def test_a_second_outcome_adds_to_the_first_and_its_verdicts_count() -> None:
    first, second = UUID(int=1), UUID(int=2)

    def outcome(task: UUID, **verdicts: Verdict) -> Settled:
        anything: Any = f"of {task}"
        of_tasks = {UUID(int=int(name[1:])): verdict for name, verdict in verdicts.items()}
        return Settled(of_tasks, {task: "waiting"}, [anything], [anything], {task}, {task: anything})

    settled = outcome(first, _1=Verdict.SETTLED, _2=Verdict.LOST)
    settled.add(outcome(second, _2=Verdict.SETTLED))
    both: Any = [f"of {first}", f"of {second}"]
    assert settled == Settled(
        {first: Verdict.SETTLED, second: Verdict.SETTLED},
        {first: "waiting", second: "waiting"},
        both,
        both,
        {first, second},
        dict(zip((first, second), both, strict=True)),
    )
