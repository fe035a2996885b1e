"""Each invariant goes red on a history that breaks it, and the sound history is green."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chaos import probes, record
from chaos.amqp_tap import HintEvent, HintRecord
from chaos.catalogue import EVERYTHING
from chaos.checker import INVARIANTS, Verdict
from chaos.checker import judge as judge_by
from chaos.checks import idempotency
from chaos.checks.floors import floors_of
from chaos.evidence import Request, StoredObject
from chaos.history import Failover, History
from chaos.pipelines import UNDO_CALL
from chaos.plan import DIRECTED, make_plan
from chaos.postgres_tap import Session
from chaos.receiver import Delivery
from chaos.row_changes import Change, seconds
from chaos.starvation import OURSELVES, Starved
from tests.chaos.histories import ME, OTHER, SHA, T0, at, sound, task_row

#: Where in the sound history's changes what happens.
SUBMITTED, CLAIMED_FIRST, DONE_FIRST, FREED, CLAIMED_SECOND, DONE_SECOND = 1, 5, 7, 8, 11, 12
#: The sound history has no object with a multipart upload.
UNSEEN = {"I14"}


def judge(history: History) -> list[Verdict]:
    """Without floors: one observation is enough."""
    return judge_by(history, {})


def found(history: History) -> dict[str, list[str]]:
    return {verdict.number: list(verdict.why) for verdict in judge(history) if verdict.state == "violated"}


def change(history: History, index: int, **said: Any) -> None:
    history.changes[index] = replace(history.changes[index], **said)


def row(history: History, index: int, **after: Any) -> None:
    """The change left another row, and the next change of that row found it."""
    old = history.changes[index].after
    assert old is not None
    new = old | after
    history.changes[index] = replace(history.changes[index], after=new)
    for later, other in enumerate(history.changes):
        if other.before is old:
            history.changes[later] = replace(other, before=new)


def test_a_sound_history_violates_nothing() -> None:
    assert found(sound()) == {}
    states = {verdict.number: verdict.state for verdict in judge(sound())}
    assert {number for number, state in states.items() if state != "ok"} == UNSEEN
    assert set(states) == set(INVARIANTS) == {f"I{number}" for number in range(1, 28)}


def test_an_empty_history_is_red_for_all_that_a_run_must_have_seen() -> None:
    floors = floors_of(make_plan(1), broker=True)
    verdicts = judge_by(History(sound().terms), floors)
    assert [verdict.number for verdict in verdicts if not verdict.red] == []


def test_each_process_of_a_plan_is_looked_at_when_the_run_has_ended() -> None:
    assert floors_of(make_plan(1), broker=True)["I24"]["process"] == 5
    assert floors_of(DIRECTED["epoch"], broker=True)["I24"]["process"] == 3


def test_a_recorded_run_has_seen_every_endpoint_with_a_key_and_every_kind_of_thing_that_a_stranger_asks_for() -> None:
    floors = floors_of(record.plan_of(record.FIRST_SEED, EVERYTHING), broker=True)
    assert {endpoint for endpoint in idempotency.ENDPOINTS if not floors["I2"].get(f"key at {endpoint}")} == set()
    assert {kind for kind in probes.ENDPOINTS if not floors["I21"].get(f"foreign {kind}")} == set()


@pytest.mark.parametrize(("number", "what"), [("I8", "run"), ("I3", "step")])
def test_a_history_that_has_less_than_its_floor_is_red(number: str, what: str) -> None:
    has = {each.number: each for each in judge(sound())}[number].observed[what]
    for least, state in ((has, "ok"), (has + 1, "not observed")):
        verdict = {each.number: each for each in judge_by(sound(), {number: {what: least}})}[number]
        assert verdict.state == state
        assert verdict.red is (state != "ok")


def test_a_step_that_only_a_signal_wakes_is_never_due() -> None:
    assert seconds("infinity") > seconds(at(10_000))


# --- the ways to break it


def a_job_is_lost(history: History) -> None:
    history.requests.append(Request("short", "red", "gone", T0, T0, "accepted", "gone"))


def a_job_never_ends(history: History) -> None:
    history.jobs[0]["status"] = "running"


def a_schedule_makes_no_run(history: History) -> None:
    history.firings.clear()


def a_schedule_makes_two_runs(history: History) -> None:
    history.firings *= 2


def told(history: History, **changes: Any) -> None:
    """One more message about the end of the sound job."""
    said = {"message": "msg_0", "tenant": "red", "event": "run.succeeded", "run": "job", "at": T0 + 5}
    history.deliveries.append(Delivery(**{**said, "genuine": True, "taken": True, **changes}))


def a_run_that_nobody_heard_of(history: History) -> None:
    history.deliveries.clear()
    told(history, taken=False)


def a_message_with_another_id_when_repeated(history: History) -> None:
    told(history, taken=False)
    told(history, message="msg_2")


def a_message_that_is_not_ours(history: History) -> None:
    told(history, genuine=False)


def a_message_for_somebody_else(history: History) -> None:
    told(history)
    told(history, tenant="blue")


def a_message_that_lies(history: History) -> None:
    told(history, event="run.failed")


def beside(history: History, seconds: float) -> None:
    """The worker that lost the first step works on at it for so long, while another one does it."""
    history.journal[1] |= {"what": "tick"}
    history.journal += [history.journal[1] | {"at": T0 + 2 + 0.2 * nth} for nth in range(round(seconds / 0.2) + 1)]
    row(history, CLAIMED_FIRST, lease_until=at(3))  # trusted for two seconds
    taken = history.changes[DONE_FIRST]
    free = {"status": "pending", "losses": 1, "lease_owner": None, "lease_until": None}
    history.changes[DONE_FIRST] = replace(taken, process=OTHER, at=T0 + 3.1, after=(taken.before or {}) | free)


def a_zombie_that_ran_for_ten_minutes_beside_its_successor(history: History) -> None:
    beside(history, 600)


def a_handler_that_went_on_after_its_worker_had_settled_it(history: History) -> None:
    history.journal += [history.journal[0] | {"what": "tick", "at": T0 + 2 + 0.2 * nth} for nth in range(20)]


def a_lease_taken_without_counting_it(history: History) -> None:
    taken = history.changes[DONE_FIRST]
    stolen = (taken.before or {}) | {"lease_owner": "other", "epoch": 2}
    history.changes[DONE_FIRST] = replace(taken, process=OTHER, after=stolen)


def of_the_stopped(history: History, of: str, status: str) -> int:
    """Where the changes give the job that was cancelled while it ran, or its task, this status."""
    wanted = ("ran" if of == "job" else "task-ran", status)
    return next(
        index
        for index, one in enumerate(history.changes)
        if one.kind == of and (one.row["id"], one.row["status"]) == wanted
    )


def commit_for(history: History, seconds: int) -> None:
    """The database is there: something is committed all the time."""
    row = {"tenant_id": "red", "key": "other", "job_id": "other", "admitted_at": None}
    history.changes += [Change(1000 + nth, T0 + nth / 2, "o", "", "gate_job", None, row) for nth in range(2 * seconds)]


def a_running_job_that_was_cancelled_and_went_on(history: History) -> None:
    said = next(line for line in history.journal if line["task"] == "task-ran")
    history.journal += [said | {"what": "tick", "at": T0 + 2.3 + 0.2 * nth} for nth in range(180)]


def a_running_job_that_was_cancelled_and_never_ended(history: History) -> None:
    del history.changes[of_the_stopped(history, "job", "cancelled")]


def a_running_job_that_ended_long_after_its_cancel(history: History) -> None:
    commit_for(history, 60)
    change(history, of_the_stopped(history, "job", "cancelled"), at=T0 + 2.05 + 45.0)


def a_step_that_started_after_its_running_job_was_cancelled(history: History) -> None:
    change(history, of_the_stopped(history, "task", "running"), at=T0 + 2.2)


def a_step_that_was_made_with_a_lease_of_nobody_who_suspended(history: History) -> None:
    index = next(n for n, one in enumerate(history.changes) if one.kind == "task" and one.row["id"] == "task-step")
    row(history, index, lease_owner="another")


def the_call(history: History, name: str) -> int:
    return next(n for n, one in enumerate(history.changes) if one.kind == "call" and one.row.get("name") == name)


def a_workflow_that_acknowledged_and_undid_nothing(history: History) -> None:
    del history.changes[the_call(history, UNDO_CALL)]


def a_workflow_that_undid_its_work_twice(history: History) -> None:
    done = history.changes[the_call(history, UNDO_CALL)]
    history.changes.append(replace(done, after=(done.after or {}) | {"number": 3}))


def a_workflow_that_undid_its_work_and_succeeded(history: History) -> None:
    next(job for job in history.jobs if job["id"] == "undone")["status"] = "succeeded"


def a_workflow_that_ended_with_its_first_lost_worker(history: History) -> None:
    a_workflow_that_acknowledged_and_undid_nothing(history)
    end_workflow_because(history, "the worker was lost")


def end_workflow_because(history: History, because: str) -> None:
    last = [event for event in history.events if event["job_id"] == "undone"][-1]
    last["data"] = {"forced": True, "because": because}


def a_workflow_that_had_called_nothing_and_began_after_its_cancel(history: History) -> None:
    for index, one in enumerate(history.changes):
        if one.kind == "task" and one.before and one.row["id"] == "task-undone":
            history.changes[index] = replace(one, before=one.before | {"journaled": False})


def a_key_that_made_two_runs(history: History) -> None:
    history.run_rows.append(history.run_rows[0] | {"job_id": "twin"})


def a_batch_of_which_half_was_made(history: History) -> None:
    history.requests[0] = replace(history.requests[0], jobs_requested=2)


def a_refused_request_that_made_its_run(history: History) -> None:
    history.requests[0] = replace(history.requests[0], answer="refused", answers=())


def a_repeated_request_that_was_answered_otherwise(history: History) -> None:
    history.requests[0] = replace(history.requests[0], answers=(("twin",), ("job",)))


def an_accepted_request_without_its_run(history: History) -> None:
    history.run_rows.clear()


def a_run_repeated_twice(history: History) -> None:
    history.run_rows += [history.run_rows[0] | {"job_id": name, "rerun_of": "job"} for name in ("one", "two")]


def a_generation_that_was_bought_twice(history: History) -> None:
    history.orders.append(replace(history.orders[0], id="2"))


def a_generation_that_succeeded_and_was_never_bought(history: History) -> None:
    history.orders.clear()


def an_order_that_is_polled_for_ever(history: History) -> None:
    history.orders[0] = replace(history.orders[0], last_polled_at=T0 + 600)


def admit(history: History, seconds: float, *, left: bool) -> None:
    """Another job is admitted by the limit, after the first one has `left` or beside it."""
    first = next(one for one in history.changes if one.kind == "gate_job")
    if left:
        history.changes.append(replace(first, number=900, at=T0 + seconds, before=first.after, after=None))
    after = (first.after or {}) | {"job_id": "next", "admitted_at": at(seconds)}
    history.changes.append(replace(first, number=901, at=T0 + seconds, before=None, after=after))


def more_jobs_than_a_limit_allows(history: History) -> None:
    admit(history, 90, left=False)


def more_jobs_in_a_minute_than_a_rate_allows(history: History) -> None:
    admit(history, 59, left=True)


def a_cancelled_job_goes_on(history: History) -> None:
    job = history.jobs[0]["id"]
    history.requests.append(Request("cancel", "red", f"cancel {job}", T0, T0, "accepted", job))


def good_work_is_given_up(history: History) -> None:
    history.jobs[0] |= {"status": "failed", "error": {"code": "handler_error"}}


def a_request_made_two_media(history: History) -> None:
    history.requests.append(Request("media", "red", "k", T0, T0, "unknown"))
    history.media += [
        {"id": name, "tenant_id": "red", "file_name": "k.jpg", "job_id": None, "original_key": name} for name in "ab"
    ]


def a_job_that_nobody_asked_for(history: History) -> None:
    history.requests.clear()


def an_effect_was_committed_twice(history: History) -> None:
    row(history, DONE_FIRST, status="running", lease_owner="me", lease_until=at(30))
    again = history.changes[DONE_FIRST]
    for _ in range(2):
        history.changes.append(replace(again, number=len(history.changes) + 1, before=again.before, after={
            **(again.before or {}), "status": "succeeded"}))  # fmt: skip


def an_effect_without_its_event(history: History) -> None:
    history.events[2]["kind"] = "noted"


def a_move_that_the_diagram_has_not(history: History) -> None:
    row(history, SUBMITTED, status="failed")


def a_row_that_its_events_do_not_tell_of(history: History) -> None:
    history.events[4]["task_status"] = "running"


def an_epoch_was_skipped(history: History) -> None:
    row(history, CLAIMED_FIRST, epoch=2)
    history.tasks[0]["epoch"] = 2


def a_claim_without_a_new_epoch(history: History) -> None:
    row(history, CLAIMED_SECOND, epoch=0)
    history.tasks[1]["epoch"] = 0


def a_foreign_settlement(history: History) -> None:
    change(history, DONE_FIRST, process=OTHER)


def a_settlement_before_the_handler_ended(history: History) -> None:
    history.journal[1]["at"] = T0 + 2.5


def the_result_of_an_older_claim(history: History) -> None:
    later = history.changes[CLAIMED_SECOND]
    assert later.after is not None
    history.changes.append(
        replace(
            later, number=99, at=T0 + 3.5, before=later.after, after=later.after | {"epoch": 2, "lease_owner": "again"}
        )
    )
    history.tasks[1]["epoch"] = 2


def an_epoch_that_fell(history: History) -> None:
    row(history, DONE_FIRST, epoch=0)


def a_lease_that_passed_unnoticed(history: History) -> None:
    history.overdue.append(["task-first is running, its lease passed long ago"])


def a_task_that_still_runs(history: History) -> None:
    history.tasks[1]["status"] = "running"


def a_lease_taken_from_the_living(history: History) -> None:
    row(history, CLAIMED_FIRST, losses=0)
    taken = history.changes[DONE_FIRST]
    history.changes[DONE_FIRST] = replace(taken, process=OTHER, after={
        **(taken.before or {}), "status": "pending", "losses": 1, "lease_owner": None,
        "lease_until": None})  # fmt: skip


def one_claim_ran_twice(history: History) -> None:
    history.journal += [line | {"run": "again"} for line in history.journal[:2]]


def a_run_without_a_claim(history: History) -> None:
    history.journal[0]["process"] = OTHER


def an_ack_before_the_claim(history: History) -> None:
    index = next(i for i, record in enumerate(history.hint_records) if record.event is HintEvent.ACKED)
    history.hint_records[index] = replace(history.hint_records[index], at=T0 + 0.95)


def a_hint_in_another_transaction(history: History) -> None:
    for index, one in enumerate(history.changes):
        if one.kind == "outbox" and one.after and one.xact == "b":
            change(history, index, xact="later")


def a_hint_dropped_without_a_confirm(history: History) -> None:
    history.hint_records = [record for record in history.hint_records if record.event is not HintEvent.CONFIRMED]


def a_hint_that_only_came_back(history: History) -> None:
    history.hint_records = [
        HintRecord(record.process, HintEvent.RETURNED, record.task, record.at)
        if record.event is HintEvent.CONFIRMED
        else record
        for record in history.hint_records
    ]


def a_hint_that_stays_in_the_outbox(history: History) -> None:
    history.outbox.append({"task_id": "task-first"})


def a_queue_that_is_not_empty(history: History) -> None:
    history.queued["leasehold.chaos.normal"] = 3


def a_hint_that_was_never_acknowledged(history: History) -> None:
    history.returned["leasehold.chaos.normal"] = 1


def a_dead_letter_whose_task_waits(history: History) -> None:
    history.dead_letters.append('{"v":1,"task":"task-second"}')
    history.tasks[1]["status"] = "pending"


def an_output_that_is_gone(history: History) -> None:
    history.objects.clear()


def an_output_with_other_bytes(history: History) -> None:
    history.objects["jobs/job/output/first.txt"] = StoredObject(3, "b" * 64)


def an_output_that_is_not_the_references(history: History) -> None:
    history.expected_bytes["short", "first.txt", "to"] = "c" * 64


def an_object_that_nobody_knows(history: History) -> None:
    history.objects["jobs/job/output/stray.txt"] = StoredObject(1, SHA)


def an_upload_that_a_good_attempt_left_open(history: History) -> None:
    history.outputs[0] |= {"size": 65 * 1024 * 1024, "step": "first"}
    history.uploads.append(history.outputs[0]["key"])


def a_step_before_the_one_it_needs(history: History) -> None:
    change(history, CLAIMED_SECOND, number=1)


def more_errors_than_are_allowed(history: History) -> None:
    history.tasks[0]["errors"] = 6


def a_failure_that_was_counted_as_another(history: History) -> None:
    history.tasks[0]["crashes"] = 1
    history.failures.append({"task_id": "task-first", "epoch": 1, "cause": "error"})


def a_step_that_failed_for_no_reason(history: History) -> None:
    history.tasks[0]["status"] = "failed"


def poison_that_succeeded(history: History) -> None:
    history.jobs[0]["pipeline"] = "poison"


def a_gap_in_the_events(history: History) -> None:
    history.events[3]["seq"] = 9


def an_event_that_a_client_missed(history: History) -> None:
    history.streams["job"] = [(0, [1, 2]), (2, [4, 5])]


def a_row_of_another_tenant(history: History) -> None:
    history.tasks[0]["tenant_id"] = "blue"


def an_output_of_another_tenant(history: History) -> None:
    history.outputs[0]["tenant_id"] = "blue"


def a_run_of_another_tenant(history: History) -> None:
    history.run_rows[0]["tenant_id"] = "blue"


def a_generation_of_another_tenant(history: History) -> None:
    history.generations[0]["tenant_id"] = "blue"


def a_foreign_media_that_was_shown(history: History) -> None:
    history.probes.append(("media", "red's media with blue's key", 200))


def a_client_that_saw_less_than_the_ledger_has(history: History) -> None:
    history.streams["job"] = [(0, [1])]


def a_client_that_saw_nothing(history: History) -> None:
    history.streams["job"] = []


def a_success_without_its_output(history: History) -> None:
    history.outputs.clear()
    history.objects.clear()


def a_process_that_lives_on(history: History) -> None:
    history.leftovers.append(("processes", ["process 1 still runs"]))


def called(history: History, index: int, **changes: Any) -> None:
    """One of the two changes of the workflow's call had another row, or came at another time."""
    places = [place for place, one in enumerate(history.changes) if one.kind == "call"]
    change(history, places[index], **changes)


def a_call_written_by_a_zombie(history: History) -> None:
    after = [one for one in history.changes if one.kind == "call"][1].after
    called(history, 1, after=(after or {}) | {"epoch": 0})


def a_call_written_after_the_lease_had_ended(history: History) -> None:
    called(history, 1, number=10_000)


def a_result_of_a_call_that_changed(history: History) -> None:
    before = [one for one in history.changes if one.kind == "call"][1].before
    called(history, 1, before=(before or {}) | {"state": "done"})


def an_operation_that_was_made_twice(history: History) -> None:
    history.jobs.append(history.job_by_id["bulk"] | {"id": "bulk again"})


def promotion(at: float) -> Failover:
    """The primary had ended just before."""
    return Failover(None, at, at)


def a_promotion_after_which_nobody_claimed_for_long(history: History) -> None:
    history.failovers = [promotion(T0 - 2.1)]  # the first claim is at T0 + 1


def a_promotion_after_which_nobody_claimed_at_all(history: History) -> None:
    history.failovers.append(promotion(T0 + 1000))


def a_loss_that_only_a_failover_explains(history: History) -> None:
    row(history, DONE_FIRST, losses=1)


def an_operation_that_acted_twice(history: History) -> None:
    again = [one for one in history.changes if one.kind == "job" and one.moved() == ("failed", "pending")]
    history.changes.append(replace(again[0], number=len(history.changes) + 1))


def an_operation_that_passed_a_job_over(history: History) -> None:
    history.operations[0] = replace(history.operations[0], targets=("again", "passed over"))
    history.tags.append({"job_id": "passed over", "name": "operation", "value": "op"})


def an_operation_that_counted_wrong(history: History) -> None:
    history.results[-1]["value"]["acted"] = 2


WAYS: dict[str, list[Callable[[History], None]]] = {
    "I1": [a_job_is_lost, a_job_never_ends, a_schedule_makes_no_run, good_work_is_given_up],
    "I2": [
        a_request_made_two_media, a_job_that_nobody_asked_for, a_key_that_made_two_runs, a_batch_of_which_half_was_made,
        a_refused_request_that_made_its_run, a_repeated_request_that_was_answered_otherwise,
        an_accepted_request_without_its_run, a_run_repeated_twice,
    ],
    "I3": [an_effect_was_committed_twice, an_effect_without_its_event],
    "I4": [a_move_that_the_diagram_has_not, a_row_that_its_events_do_not_tell_of],
    "I5": [
        an_epoch_was_skipped, a_claim_without_a_new_epoch, a_step_that_was_made_with_a_lease_of_nobody_who_suspended,
    ],
    "I6": [
        a_foreign_settlement, a_settlement_before_the_handler_ended, the_result_of_an_older_claim, an_epoch_that_fell,
    ],
    "I7": [a_lease_that_passed_unnoticed, a_task_that_still_runs],
    "I8": [
        a_lease_taken_from_the_living, a_lease_taken_without_counting_it, one_claim_ran_twice, a_run_without_a_claim,
        a_zombie_that_ran_for_ten_minutes_beside_its_successor, a_handler_that_went_on_after_its_worker_had_settled_it,
    ],
    "I9": [an_ack_before_the_claim],
    "I10": [
        a_hint_in_another_transaction, a_hint_dropped_without_a_confirm, a_hint_that_only_came_back,
        a_hint_that_stays_in_the_outbox,
    ],
    "I11": [a_queue_that_is_not_empty, a_hint_that_was_never_acknowledged, a_dead_letter_whose_task_waits],
    "I12": [
        a_success_without_its_output, an_output_that_is_gone, an_output_with_other_bytes,
        an_output_that_is_not_the_references,
    ],
    "I13": [an_object_that_nobody_knows],
    "I14": [an_upload_that_a_good_attempt_left_open],
    "I16": [a_step_before_the_one_it_needs],
    "I17": [
        more_errors_than_are_allowed, a_failure_that_was_counted_as_another, a_step_that_failed_for_no_reason,
        poison_that_succeeded,
    ],
    "I15": [
        a_cancelled_job_goes_on, a_running_job_that_was_cancelled_and_went_on,
        a_running_job_that_was_cancelled_and_never_ended, a_running_job_that_ended_long_after_its_cancel,
        a_step_that_started_after_its_running_job_was_cancelled, a_workflow_that_acknowledged_and_undid_nothing,
        a_workflow_that_undid_its_work_twice, a_workflow_that_undid_its_work_and_succeeded,
        a_workflow_that_ended_with_its_first_lost_worker, a_workflow_that_had_called_nothing_and_began_after_its_cancel,
    ],
    "I18": [a_schedule_makes_two_runs],
    "I19": [
        a_run_that_nobody_heard_of, a_message_with_another_id_when_repeated, a_message_that_is_not_ours,
        a_message_for_somebody_else, a_message_that_lies,
    ],
    "I20": [
        a_gap_in_the_events, an_event_that_a_client_missed, a_client_that_saw_less_than_the_ledger_has,
        a_client_that_saw_nothing,
    ],
    "I21": [
        a_row_of_another_tenant, an_output_of_another_tenant, a_run_of_another_tenant, a_generation_of_another_tenant,
        a_foreign_media_that_was_shown,
    ],
    "I22": [
        a_generation_that_was_bought_twice, a_generation_that_succeeded_and_was_never_bought,
        an_order_that_is_polled_for_ever,
    ],
    "I23": [more_jobs_than_a_limit_allows, more_jobs_in_a_minute_than_a_rate_allows],
    "I24": [a_process_that_lives_on],
    "I25": [a_call_written_by_a_zombie, a_call_written_after_the_lease_had_ended, a_result_of_a_call_that_changed],
    "I26": [
        an_operation_that_was_made_twice, an_operation_that_acted_twice, an_operation_that_passed_a_job_over,
        an_operation_that_counted_wrong,
    ],
    "I27": [
        a_promotion_after_which_nobody_claimed_for_long, a_promotion_after_which_nobody_claimed_at_all,
        a_loss_that_only_a_failover_explains,
    ],
}  # fmt: skip


@pytest.mark.parametrize(("number", "spoil"), [(number, way) for number, ways in WAYS.items() for way in ways])
def test_a_broken_history_is_red(number: str, spoil: Callable[[History], None]) -> None:
    history = sound()
    spoil(history)
    assert number in found(history)


def test_every_invariant_that_the_load_can_break_has_a_broken_history() -> None:
    assert set(WAYS) == set(INVARIANTS)


# --- what is allowed


def test_claims_may_stand_still_for_a_moment_after_a_promotion_and_for_longer_beside_other_faults() -> None:
    history = sound()
    history.failovers = [promotion(T0 - 1.9)]
    assert "I27" not in found(history)
    a_promotion_after_which_nobody_claimed_at_all(history)
    a_loss_that_only_a_failover_explains(history)
    history.has_only_failovers = False
    (verdict,) = (each for each in judge(history) if each.number == "I27")
    assert verdict.state == "not applicable"


def test_a_primary_that_only_fell_silent_is_left_as_soon_as_one_that_died() -> None:
    for promoted, late in ((1.9, False), (2.1, True)):  # the first claim is at T0 + 1
        history = sound()
        history.failovers = [Failover(T0 - promoted - 6, T0 - promoted, T0 - promoted)]
        assert ("I27" in found(history)) is late


OLD_SERVES = Failover(T0 - 8, T0 - 2, T0 + 1000, old_port=1)
ASKS_OLD = Session(ME, "leasehold worker", T0 - 9, T0 + 9, port=1)


@pytest.mark.parametrize(
    ("failover", "session", "excused"),
    [
        (OLD_SERVES, ASKS_OLD, True),
        # The ACK is of T0 + 0.95. A promotion is recorded up to 0.2 s after the new primary takes writes.
        (OLD_SERVES._replace(promoted_at=T0 + 1.1), ASKS_OLD, True),
        (OLD_SERVES._replace(promoted_at=T0 + 1.2), ASKS_OLD, False),
        (OLD_SERVES._replace(ended_at=T0 - 1), ASKS_OLD, False),
        (OLD_SERVES._replace(silent_since=None), ASKS_OLD, False),  # it had died
        (OLD_SERVES, replace(ASKS_OLD, until=T0 - 1), False),
        (OLD_SERVES, replace(ASKS_OLD, port=2), False),
        (OLD_SERVES, replace(ASKS_OLD, process="another"), False),
    ],
)
def test_a_hint_may_be_acknowledged_by_what_an_old_primary_says_to_its_own_sessions_as_long_as_it_serves(
    failover: Failover, session: Session, excused: bool
) -> None:
    history = sound()
    WAYS["I9"][0](history)
    history.failovers = [failover]
    history.sessions.append(session)
    assert ("I9" not in found(history)) is excused


def test_an_external_worker_that_falls_silent_is_charged_whatever_fails_over() -> None:
    history = sound()
    a_loss_that_only_a_failover_explains(history)
    for index, one in enumerate(history.changes):
        if one.row.get("id") == "task-first":
            before = one.before and one.before | {"queue": "outside:draw"}
            history.changes[index] = replace(one, before=before, after=one.row | {"queue": "outside:draw"})
    assert "I27" not in found(history)


@pytest.mark.parametrize(
    ("process", "starved", "wrong"),
    [(ME, 1.5, True), (ME, 2.5, False), (OURSELVES, 2.5, False), (OTHER, 2.5, True)],
)
def test_a_worker_without_a_processor_may_be_charged_and_claim_late(process: str, starved: float, wrong: bool) -> None:
    history = sound()
    a_loss_that_only_a_failover_explains(history)
    a_promotion_after_which_nobody_claimed_for_long(history)
    history.starved = [Starved(process, T0 - 2.1, T0 + 0.9, starved)]
    assert ("I27" in found(history)) is wrong


@pytest.mark.parametrize(
    ("cut_off", "reached_at", "lease_until", "excused"),
    [
        ("worker-0", T0 + 1, -9.0, True),
        ("worker-1", T0 + 1, -9.0, False),  # another worker
        ("worker-0", T0 - 2, -9.0, False),  # it had the time to come back
        ("worker-0", T0 + 1, -7.0, False),  # within the grace
    ],
)
def test_a_worker_that_was_kept_from_each_primary_for_longer_than_the_grace_may_be_charged(
    cut_off: str, reached_at: float, lease_until: float, excused: bool
) -> None:
    history = sound()
    a_loss_that_only_a_failover_explains(history)  # at T0 + 2
    change(history, DONE_FIRST, before=(history.changes[DONE_FIRST].before or {}) | {"lease_until": at(lease_until)})
    history.failovers = [Failover(T0 - 20, T0 - 1.9, T0 - 1.9, cut_off=(cut_off,), reached_at=reached_at)]
    assert ("I27" not in found(history)) is excused


def test_a_loss_long_after_a_failover_has_another_cause() -> None:
    history = sound()
    a_loss_that_only_a_failover_explains(history)
    history.failovers = [promotion(T0 - 20), promotion(T0 + 15)]
    assert not any("charged" in sentence for sentence in found(history)["I27"])


def test_a_zombie_may_work_for_as_long_as_its_margin() -> None:
    history = sound()
    beside(history, 0.8)
    assert "I8" not in found(history)


def starved(process: str, seconds: float, until: float) -> list[Starved]:
    """The process waited so long for a processor, evenly until that second."""
    share = 0.25 * seconds / until
    return [Starved(process, T0 + 0.25 * nth, T0 + 0.25 * (nth + 1), share) for nth in range(round(until / 0.25))]


def test_a_zombie_is_excused_for_the_time_in_which_its_process_had_no_processor() -> None:
    for process, waited, excused in ((ME, 2.0, True), (ME, 1.5, False), (OTHER, 4.0, False)):
        history = sound()
        beside(history, 3.0)
        history.starved = starved(process, waited, 5.0)  # of the three seconds: three fifths
        (i8,) = (verdict for verdict in judge(history) if verdict.number == "I8")
        assert (i8.state, "lost lease, without a processor" in i8.observed) == (
            ("ok", True) if excused else ("violated", False)
        )


def test_a_handler_of_the_release_is_counted_and_not_judged() -> None:
    history = sound()
    beside(history, 3.0)
    history.of_release = {ME}
    (i8,) = (verdict for verdict in judge(history) if verdict.number == "I8")
    assert (i8.state, i8.observed.get("lost lease of the release")) == ("ok", 1)
    history = sound()
    beside(history, 3.0)
    history.of_release = {OTHER}
    assert "I8" in found(history)


def test_the_hint_of_a_task_that_has_lost_its_last_worker_may_be_acknowledged() -> None:
    """Its lease has passed, and nobody may claim it: the sweeper fails it."""
    for losses, excused in ((20, True), (19, False)):
        history = sound()
        history.failovers = []
        row(history, CLAIMED_FIRST, lease_until=at(1.2), losses=losses)
        history.hint_records.append(HintRecord(ME, HintEvent.ACKED, "task-first", T0 + 1.8, T0 + 1.5))
        assert ("I9" not in found(history)) is excused


def test_the_hint_of_a_task_whose_lease_lasts_longer_after_a_failover_or_a_restart_may_be_acknowledged() -> None:
    for restarts, excused in (([T0 + 1.1], True), ([], False), ([T0 + 1.9], False)):
        history = sound()
        history.failovers = []
        history.restarts = restarts
        row(history, CLAIMED_FIRST, lease_until=at(1.2))
        history.hint_records.append(HintRecord(ME, HintEvent.ACKED, "task-first", T0 + 1.8, T0 + 1.5))
        assert ("I9" not in found(history)) is excused


def test_a_message_may_be_missed_whose_delivery_the_faults_have_used_up() -> None:
    for code, losses, excused in (("worker_lost", 21, True), ("worker_lost", 3, False), ("other", 21, False)):
        history = sound()
        a_run_that_nobody_heard_of(history)
        delivery = {
            "id": "delivery", "pipeline": "webhook", "status": "failed", "tenant_id": "red", "error": {"code": code},
            "params": {"event": {"data": {"id": "job"}}}, "inputs": {}, "event_seq": 0, "output_prefix": "jobs/d",
        }  # fmt: skip
        history.jobs.append(delivery)
        history.tasks.append(task_row("deliver", "failed", job_id="delivery", losses=losses))
        (i19,) = (verdict for verdict in judge(history) if verdict.number == "I19")
        assert (i19.state == "ok") is excused
        assert ("delivery that the faults used up" in i19.observed) is excused


def test_a_hint_is_no_younger_than_its_row_if_the_clock_jumps_back_before_the_trigger_reads_it() -> None:
    """The row has the time of a clock that was ahead; the trigger, a moment later, found it right again."""
    history = sound()
    for index, one in enumerate(history.changes):
        if one.kind == "outbox":
            made = {"created_at": at(15.0)}
            history.changes[index] = replace(
                one, before=one.before and one.before | made, after=one.after and one.after | made
            )
    assert "I10" not in found(history)
    a_hint_dropped_without_a_confirm(history)
    assert "I10" in found(replace(history))


def in_batches(history: History) -> None:
    """Each hint stands in a row with others."""
    for index, one in enumerate(history.changes):
        if one.kind == "outbox":
            batch = {"id": one.row["id"], "task_ids": [one.row["task_id"]], "created_at": one.row["created_at"]}
            history.changes[index] = replace(
                one, kind="outbox_batch", before=one.before and batch, after=one.after and batch
            )


def test_a_hint_of_a_batch_is_judged_as_one_with_a_row_of_its_own() -> None:
    for break_it in (None, a_hint_dropped_without_a_confirm, a_hint_that_only_came_back):
        history = sound()
        in_batches(history)
        if break_it is not None:
            break_it(history)
        assert ("I10" in found(history)) is (break_it is not None)


@pytest.mark.parametrize("how", ["the relay writes its hints", "its tasks are claimed before"])
def test_a_batch_may_go_before_the_broker_has_confirmed_it(how: str) -> None:
    history = sound()
    in_batches(history)
    gone = next(index for index, one in enumerate(history.changes) if one.xact == "a gone")
    history.hint_records = [
        one for one in history.hint_records if one.event is not HintEvent.CONFIRMED or one.task != "task-first"
    ]
    assert "I10" in found(replace(history))
    if how == "the relay writes its hints":
        hint = {"id": 99, "task_id": "task-first", "created_at": at(0.0)}
        history.changes.append(Change(99, T0 + 0.2, "a gone", "", "outbox", None, hint))
    else:
        change(history, gone, number=99, at=T0 + 1.5)
    assert "I10" not in found(replace(history))


def test_a_lost_lease_is_called_starved_only_if_that_excuses_it() -> None:
    history = sound()
    beside(history, 1.8)
    history.starved = starved(ME, 2.0, 5.0)
    (i8,) = (verdict for verdict in judge(history) if verdict.number == "I8")
    assert (i8.state, i8.observed.get("lost lease")) == ("ok", 1)


def test_a_job_may_end_later_while_processes_have_no_processor() -> None:
    for waited, excused in ((40.0, True), (0.5, False)):
        history = sound()
        a_running_job_that_ended_long_after_its_cancel(history)  # a violation otherwise: see WAYS
        history.starved = starved(OTHER, waited, 60.0)
        (i15,) = (verdict for verdict in judge(history) if verdict.number == "I15")
        assert (i15.state, "running job, without a processor" in i15.observed) == (
            ("ok", True) if excused else ("violated", False)
        )


def test_a_worker_that_stood_still_may_write_a_line_when_it_goes_on() -> None:
    history = sound()
    beside(history, 0.0)
    history.journal = [line for line in history.journal if line["task"] == "task-first"]
    history.journal[-1]["at"] = T0 + 600.0
    assert "I8" not in found(history)


def test_a_job_may_end_later_while_the_database_is_away() -> None:
    history = sound()
    change(history, of_the_stopped(history, "job", "cancelled"), at=T0 + 2.05 + 45.0)
    assert "I15" not in found(history)


def test_what_an_api_stored_before_it_died_is_known_by_its_upload() -> None:
    for key in ("jobs/none/input/model", "jobs/none/"):
        history = sound()
        history.objects["jobs/none/input/model"] = StoredObject(1, SHA)
        assert "I13" in found(history)
        history.upload_rows.append({"key": key})
        assert "I13" not in found(history)


def test_a_limit_has_room_again_when_a_job_has_left_and_a_minute_has_passed() -> None:
    history = sound()
    admit(history, 61, left=True)
    assert "I23" not in found(history)


def test_a_lease_may_be_taken_once_it_has_passed_or_its_owners_session_has_ended() -> None:
    for allow in ("lease", "session"):
        history = sound()
        if allow == "lease":
            row(history, CLAIMED_FIRST, lease_until=at(1.95))
        a_lease_taken_from_the_living(history)
        if allow == "session":
            history.sessions = [replace(history.sessions[0], until=T0 + 1.2)]
        assert "I8" not in found(history)


def test_a_lease_that_was_claimed_while_its_owner_was_not_present_may_be_taken() -> None:
    history = sound()
    a_lease_taken_from_the_living(history)
    history.sessions = [replace(history.sessions[0], since=T0 + 1.2)]
    assert "I8" not in found(history)


def claimed_anew(history: History) -> None:
    """The worker claims again what it holds, because an answer was lost: it charges no loss."""
    before = dict(history.changes[CLAIMED_FIRST].after or {})
    again = before | {"epoch": before["epoch"] + 1}
    history.changes.insert(CLAIMED_FIRST + 1, Change(0, T0 + 1.05, "", ME, "task", before, again))


def test_a_worker_that_claims_anew_what_it_claimed_unheard_takes_it_from_nobody() -> None:
    history = sound()
    claimed_anew(history)
    assert "I8" not in found(history)


def test_two_runs_are_of_one_claim_only_if_their_worker_had_no_other() -> None:
    """The answer of the earlier claim may come when the later claim is committed: both begin then."""
    for claims, runs, violated in ((2, 2, False), (2, 3, True), (1, 2, True)):
        history = sound()
        if claims > 1:
            claimed_anew(history)
        (begin,) = (line for line in history.journal if line["what"] == "begin" and line["task"] == "task-first")
        for nth in range(1, runs):
            history.journal.append(begin | {"run": f"other-{nth}", "at": begin["at"] + 0.01 * nth})
        history.journal.sort(key=lambda line: line["at"])
        assert any("ran twice" in sentence for sentence in found(history).get("I8", ())) is violated


def test_the_hint_of_a_job_that_is_being_cancelled_may_be_acknowledged() -> None:
    history = sound()
    an_ack_before_the_claim(history)  # a violation otherwise: see WAYS
    job = {"id": "job", "pipeline": "short", "status": "cancel_requested", "grace_seconds": 30}
    history.changes.insert(CLAIMED_FIRST, Change(0, T0 + 0.5, "cancel", "", "job", None, job))
    assert "I9" not in found(history)


@pytest.mark.parametrize(
    ("endpoint", "of_release", "is_found"),
    [
        ("POST /v1/dead-letters/replay", {OTHER}, False),
        ("POST /v1/dead-letters/replay", set(), True),
        ("POST /v1/runs/rerun", {OTHER}, True),
    ],
)
def test_a_repeated_request_may_be_done_again_only_where_the_release_beside_knows_no_key(
    endpoint: str, of_release: set[str], is_found: bool
) -> None:
    history = sound()
    history.of_release = of_release
    history.requests.append(
        replace(history.requests[0], kind="replayed", key="k", job="", endpoint=endpoint, answers=(("job",), ()))
    )
    assert ("I2" in found(history)) is is_found


@pytest.mark.parametrize(
    ("tries", "of_release", "excused"), [(2, {OTHER}, True), (1, {OTHER}, False), (2, set(), False)]
)
def test_the_release_may_refuse_to_repeat_what_a_newer_api_has_done(
    tries: int, of_release: set[str], excused: bool
) -> None:
    history = sound()
    history.requests[0] = replace(history.requests[0], answer="refused", tries=tries)
    history.of_release = of_release
    assert ("I2" not in found(history)) is excused


def test_the_release_may_not_have_made_a_job_twice_either() -> None:
    history = sound()
    history.requests[0] = replace(history.requests[0], answer="refused", tries=2)
    history.of_release = {OTHER}
    history.run_rows.append(history.run_rows[0] | {"job_id": "another"})
    assert "I2" in found(history)


@pytest.mark.parametrize(("seen", "excused"), [(0.92, True), (0.89, False)])
def test_the_hint_of_a_task_whose_change_has_not_ended_yet_may_be_acknowledged(seen: float, excused: bool) -> None:
    """Until the transaction that made the task runnable ends, nobody can claim the task: its hint came at 0.9."""
    history = sound()
    an_ack_before_the_claim(history)
    history.in_progress = {"a": T0 + seen}
    assert ("I9" not in found(history)) is excused


@pytest.mark.parametrize(("queue", "excused"), [("ext:red:draw", True), ("draw", False)])
def test_a_foreign_hint_of_a_task_of_an_external_worker_may_be_acknowledged(queue: str, excused: bool) -> None:
    history = sound()
    an_ack_before_the_claim(history)
    for index, one in enumerate(history.changes):
        if one.kind == "task" and one.row["id"] == "task-first":
            history.changes[index] = replace(one, after=one.row | {"queue": queue})
    assert ("I9" not in found(history)) is excused


@pytest.mark.parametrize(("begun", "excused"), [(0.94, True), (0.96, False)])
def test_the_hint_of_a_task_that_a_later_change_has_locked_may_be_acknowledged(begun: float, excused: bool) -> None:
    """The hint came at 0.9, and was acknowledged at 0.95. The next change of the task is the claim at 1."""
    history = sound()
    an_ack_before_the_claim(history)
    claim = next(one for one in history.changes if one.kind == "task" and one.moved() == ("pending", "running"))
    history.begun = {claim.xact: T0 + begun, "another": T0}
    assert ("I9" not in found(history)) is excused


def test_a_worker_that_is_only_connected_is_not_present_yet() -> None:
    history = sound()
    a_lease_taken_from_the_living(history)
    history.sessions = [replace(history.sessions[0], present=False)]
    assert "I8" not in found(history)


def test_a_needless_hint_may_be_acknowledged_at_once() -> None:
    history = sound()
    history.hint_records.append(HintRecord(ME, HintEvent.ACKED, "task-first", T0 + 1.51, T0 + 1.5))  # it is running
    history.hint_records.append(HintRecord(ME, HintEvent.ACKED, "task-second", T0 + 0.51, T0 + 0.5))  # it is blocked
    assert found(history) == {}


@pytest.mark.parametrize(
    ("made", "failed", "jumps", "excused"),
    [
        (0.0, 21.0, [(T0 + 0.2, 20.0), (T0 + 1.1, 0.0)], True),
        (0.0, 1.0, [(T0 + 1.1, 20.0)], False),
        (0.0, 21.0, [], False),
        (2.1, 1.0, [(T0 + 0.2, -20.0)], True),
    ],
)
def test_a_retry_leaves_out_a_run_that_is_younger_by_a_clock_that_jumped_back(
    made: float, failed: float, jumps: list[tuple[float, float]], excused: bool
) -> None:
    history = sound()
    history.jumps = jumps
    history.results[-1]["value"]["acted"] = 0
    history.changes = [
        one for one in history.changes if not (one.kind == "job" and one.moved() == ("failed", "pending"))
    ]
    for index, one in enumerate(history.changes):
        if one.kind == "job" and one.moved() == ("running", "failed"):
            history.changes[index] = replace(one, after=one.row | {"created_at": at(made), "finished_at": at(failed)})
    history.job_by_id["bulk"]["params"] = {"filter": "tag.operation:op", "at": at(2.0)}
    assert ("I26" not in found(history)) is excused


def test_a_workflow_may_be_claimed_to_see_the_cancel_of_its_job() -> None:
    history = sound()
    a_step_that_started_after_its_running_job_was_cancelled(history)  # a violation otherwise: see WAYS
    claim = of_the_stopped(history, "task", "running")
    history.changes[claim] = replace(
        history.changes[claim], before=(history.changes[claim].before or {}) | {"journaled": True}
    )
    assert "I15" not in found(history)


def test_a_workflow_may_end_before_it_has_undone_its_work_once_the_grace_has_passed_or_too_many_workers_were_lost() -> (
    None
):
    for because, losses in (("the grace passed", 0), ("the worker was lost", 20)):
        history = sound()
        a_workflow_that_acknowledged_and_undid_nothing(history)
        assert "I15" in found(history)
        end_workflow_because(history, because)
        next(task for task in history.tasks if task["id"] == "task-undone")["losses"] = losses
        assert "I15" not in found(history)


@pytest.mark.parametrize(
    ("process", "before", "of_release", "is_excused"),
    [
        ("", "waiting", {"api-0.1"}, True),
        ("", "waiting", set(), False),
        ("", "running", {"api-0.1"}, False),
        ("w0", "running", {"w0"}, True),
        ("w0", "waiting", {"w0"}, True),
        ("w0", "running", {"w1"}, False),
        ("w0", "waiting", {"w1"}, False),
    ],
)
def test_only_the_releases_code_may_end_a_workflow_that_has_not_undone_its_work(
    process: str, before: str, of_release: set[str], is_excused: bool
) -> None:
    history = sound()
    a_workflow_that_acknowledged_and_undid_nothing(history)
    index = max(
        index for index, change in enumerate(history.changes)
        if change.kind == "task" and change.row["id"] == "task-undone"
    )  # fmt: skip
    row_before = (history.changes[index].before or {}) | {"status": before}
    history.changes[index] = replace(history.changes[index], before=row_before, process=process)
    history.of_release = of_release
    assert ("I15" not in found(history)) == is_excused


def test_a_workflow_whose_code_ended_as_the_cancel_came_has_nothing_to_undo() -> None:
    history = sound()
    a_workflow_that_undid_its_work_and_succeeded(history)
    a_workflow_that_acknowledged_and_undid_nothing(history)
    assert "I15" not in found(history)


def test_a_cancelled_job_is_judged_once_a_load_cancels() -> None:
    history = sound()
    history.requests.append(Request("cancel", "red", "job", T0 + 2.5, T0 + 2.6, "accepted", "job"))
    assert "I15" in found(history)
    history.requests[-1] = replace(history.requests[-1], answered_at=T0 + 4.5)
    assert "I15" not in found(history)


def test_a_message_may_come_more_than_once() -> None:
    history = sound()
    told(history, taken=False)
    told(history)
    told(history)
    assert "I19" not in found(history)


def test_what_a_failed_job_left_in_the_store_is_known() -> None:
    history = sound()
    history.jobs[0]["status"] = "failed"
    history.objects["jobs/job/output/stray.txt"] = StoredObject(1, SHA)
    assert "I13" not in found(history)
