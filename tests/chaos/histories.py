"""A history that is as it should be, to be spoilt in one way by each test."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from chaos.amqp_tap import HintEvent, HintRecord
from chaos.evidence import Bound, Operation, Order, Request, StoredObject, Terms
from chaos.history import Failover, History
from chaos.pipelines import UNDO_CALL, UNDOING_WORKFLOW
from chaos.postgres_tap import Session
from chaos.receiver import Delivery
from chaos.row_changes import Change

T0 = 1_800_000_000.0
ME, OTHER = "worker-0.0", "worker-1.0"
SHA = "a" * 64


def at(seconds: float) -> str:
    return datetime.fromtimestamp(T0 + seconds, UTC).isoformat()


def task_row(name: str, status: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": f"task-{name}", "job_id": "job", "tenant_id": "red", "step": name, "status": status, "epoch": 0,
        "queue": "chaos",
        "attempt": 0, "errors": 0, "crashes": 0, "losses": 0, "max_attempts": 5, "lease_owner": None,
        "lease_until": None, "available_at": at(0), "cancelable": True, "contained": False,
        "journaled": False,
    }  # fmt: skip
    return row | changes


class Story:
    """Writes the changes of rows one after another."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.rows: dict[str, dict[str, Any]] = {}

    def change(self, of: str, after: dict[str, Any], seconds: float, process: str = "", xact: str = "") -> None:
        before = self.rows.get(after["id"])
        self.rows[after["id"]] = after
        number = len(self.changes) + 1
        self.changes.append(Change(number, T0 + seconds, xact or str(number), process, of, before, after))

    def hint(self, task: str, seconds: float, xact: str, *, gone_at: float) -> None:
        row = {"id": len(self.changes), "task_id": task, "created_at": at(seconds)}
        self.changes.append(Change(len(self.changes) + 1, T0 + seconds, xact, "", "outbox", None, row))
        self.changes.append(Change(len(self.changes) + 1, T0 + gone_at, f"{xact} gone", "", "outbox", row, None))


def sound() -> History:
    """One `short` job of two steps that were claimed, run and committed by one worker, and whose hints were ACKed. It
    is a run that was asked for over HTTP, admitted by a limit, bought of a provider, made by a schedule, and told of by
    a webhook. Beside it: a job that was cancelled while it waited, one that was while it ran, and a bulk operation that
    has retried one job; its step has a call, as a workflow's has. And a workflow that was cancelled while it waited,
    and has undone its work.
    """
    story = Story()
    running = {"status": "running", "epoch": 1, "attempt": 1, "lease_owner": "me", "lease_until": at(30)}
    first, second = task_row("first", "pending"), task_row("second", "blocked")
    job = {"id": "job", "status": "pending"}
    story.change("job", job, 0, xact="a")
    story.change("task", first, 0, xact="a")
    story.change("task", second, 0, xact="a")
    story.hint("task-first", 0, "a", gone_at=0.2)
    story.change("task", first | running, 1, ME)
    story.change("job", job | {"status": "running"}, 1, ME)
    done = {"status": "succeeded", "epoch": 1, "attempt": 1}
    story.change("task", first | done, 2, ME, "b")
    story.change("task", second | {"status": "pending"}, 2, ME, "b")
    story.hint("task-second", 2, "b", gone_at=2.2)
    story.change("task", second | running, 3, ME)
    story.change("task", second | done, 4, ME)
    story.change("job", job | {"status": "succeeded"}, 4, ME)
    limit = {"tenant_id": "red", "key": "template:short", "job_id": "job"}
    story.changes.append(Change(len(story.changes) + 1, T0, "a", "", "gate_job", None, limit | {"admitted_at": at(0)}))
    _stop_waiting(story)
    _stop_running(story)
    _operate(story)
    _take_back(story)
    history = History(
        _terms(),
        jobs=[{
            "id": "job", "pipeline": "short", "status": "succeeded", "tenant_id": "red", "error": None,
            "params": {"text": "to"}, "inputs": {}, "event_seq": 5, "output_prefix": "jobs/job/output",
        }],
        tasks=[story.rows["task-first"], story.rows["task-second"]],
        events=_events(),
        outputs=[{
            "job_id": "job", "tenant_id": "red", "name": "first.txt", "key": "jobs/job/output/first.txt", "size": 3,
            "sha256": SHA,
        }],
        results=[{"task_id": f"task-{step}", "value": {"run": f"run-{step}"}} for step in ("first", "second")]
        + [{"task_id": "task-bulk", "value": {"acted": 1, "refused": 0}}],
        media=[],
        changes=story.changes,
        requests=[
            Request("short", "red", "key", T0, T0 + 0.1, "accepted", "job", 2, "POST /v1/runs", (("job",), ("job",))),
            Request("short", "red", "waited", T0, T0 + 0.1, "accepted", "waited"),
            Request("cancel", "red", "cancel waited", T0 + 1, T0 + 1.1, "accepted", "waited"),
            Request("long", "red", "ran", T0, T0 + 0.1, "accepted", "ran"),
            Request("cancel", "red", "cancel ran", T0 + 2, T0 + 2.1, "stopping", "ran"),
            Request("workflow", "red", "undone", T0, T0 + 0.1, "accepted", "undone"),
            Request("cancel", "red", "cancel undone", T0 + 2, T0 + 2.1, "stopping", "undone"),
            Request("operation", "red", "op", T0, T0 + 0.1, "accepted", "bulk", 1, "POST /v1/operations", (("bulk",),)),
            Request("scheduled", "red", "clock", T0, T0 + 0.1, "accepted"),
        ],
        run_rows=[{"job_id": "job", "tenant_id": "red", "scope_id": "key", "schedule_id": None, "rerun_of": None}],
        firings=[{"schedule_id": "clock", "job_id": "job"}],
        generations=[{"job_id": "job", "tenant_id": "red", "task_id": "picture"}],
        orders=[Order("gateway", "picture", "1", T0 + 1, T0 + 2)],
        bounds=[Bound("red", "template:short", 1, None, T0 - 1), Bound("red", "template:short", None, 1, T0 - 1)],
        operations=[Operation("red", "retry", "op", ("again",))],
        tags=[{"job_id": "again", "name": "operation", "value": "op"}],
        subscribers=frozenset({"red"}),
        deliveries=[Delivery("msg_0", "red", "run.succeeded", "job", T0 + 5, genuine=True, taken=True)],
        journal=_journal(),
        hint_records=_hint_records(),
        sessions=[Session(ME, "leasehold heartbeat", T0 - 5, T0 + 50, present=True)],
        objects={"jobs/job/output/first.txt": StoredObject(3, SHA)},
        expected_bytes={("short", "first.txt", "to"): SHA},
        streams={"job": [(0, [1, 2]), (2, [3, 4, 5])]},
        probes=[("media", "red's media with blue's key", 404)],
        queued={"leasehold.chaos.normal": 0},
        returned={"leasehold.chaos.normal": 0},
        overdue=[[]],
        leftovers=[("process", []), ("directory", []), ("sessions", []), ("locks", [])],
        failovers=[Failover(None, T0 + 0.5, T0 + 0.5)],
        gathered=True,
        rested=True,
    )  # fmt: skip
    for name, pipeline in (("waited", "long"), ("ran", "long"), ("undone", UNDOING_WORKFLOW)):
        own: dict[str, Any] = {"id": name, "pipeline": pipeline, "output_prefix": f"jobs/{name}/output"}
        events = sum(event["job_id"] == name for event in history.events)
        history.jobs.append(history.jobs[0] | {"status": "cancelled", "event_seq": events} | own)
        history.tasks.append(story.rows[f"task-{name}"])
    history.tasks.append(story.rows["task-step"])
    own = {"id": "bulk", "output_prefix": "jobs/bulk/output", "params": {"filter": "tag.operation:op", "at": at(2)}}
    history.jobs.append(history.jobs[0] | {"pipeline": "bulk_operation", "event_seq": 3} | own)
    history.tasks.append(story.rows["task-bulk"])
    return history


def _stop_waiting(story: Story) -> None:
    job = {"id": "waited", "pipeline": "long", "status": "pending", "grace_seconds": 30}
    task = task_row("waited", "pending", job_id="waited")
    story.change("job", job, 0, xact="c")
    story.change("task", task, 0, xact="c")
    story.hint("task-waited", 0, "c", gone_at=0.2)
    story.change("task", task | {"status": "cancelled"}, 1.05)
    story.change("job", job | {"status": "cancelled"}, 1.05)


def _stop_running(story: Story) -> None:
    job = {"id": "ran", "pipeline": "long", "status": "pending", "grace_seconds": 30}
    task = task_row("ran", "pending", job_id="ran")
    story.change("job", job, 0, xact="d")
    story.change("task", task, 0, xact="d")
    story.hint("task-ran", 0, "d", gone_at=0.2)
    running = {"status": "running", "epoch": 1, "attempt": 1, "lease_owner": "me", "lease_until": at(30)}
    story.change("task", task | running, 1, ME)
    story.change("job", job | {"status": "running"}, 1, ME)
    story.change("job", job | {"status": "cancel_requested"}, 2.05)
    stopped = {"status": "cancelled", "epoch": 1, "attempt": 1, "lease_owner": None, "lease_until": None}
    story.change("task", task | stopped, 2.5, ME)
    story.change("job", job | {"status": "cancelled"}, 2.5, ME)


def _take_back(story: Story) -> None:
    """Drawn, waited; cancelled; claimed again, put back, acknowledged."""
    job = {"id": "undone", "pipeline": UNDOING_WORKFLOW, "status": "pending", "grace_seconds": 30}
    task = task_row("undone", "pending", job_id="undone")
    story.change("job", job, 0, xact="f")
    story.change("task", task, 0, xact="f")
    story.hint("task-undone", 0, "f", gone_at=0.2)
    running = {"status": "running", "lease_owner": "me", "lease_until": at(30)}
    story.change("task", task | running | {"epoch": 1, "attempt": 1}, 1, ME)
    story.change("job", job | {"status": "running"}, 1, ME)
    call = {"id": "drawn", "job_id": "undone", "branch": "", "number": 1, "name": "_drawn", "state": "done", "epoch": 1}
    story.change("call", call, 1.2, ME)
    waiting = {"status": "waiting", "epoch": 1, "journaled": True}
    story.change("task", task | waiting, 1.4, ME, "suspended")
    _step_of_workflow(story)
    story.change("job", job | {"status": "cancel_requested"}, 2, xact="g")
    story.hint("task-undone", 2, "g", gone_at=2.2)
    story.change("task", task | waiting | running | {"epoch": 2, "attempt": 1}, 2.3, ME)
    story.change("call", call | {"id": "back", "number": 2, "name": UNDO_CALL, "epoch": 2}, 2.4, ME)
    story.change("task", task | waiting | {"status": "cancelled", "epoch": 2, "attempt": 1}, 2.5, ME)
    story.change("job", job | {"status": "cancelled"}, 2.5, ME)


def _step_of_workflow(story: Story) -> None:
    """Claimed by the suspension that makes it, and done."""
    step = task_row("step", "running", job_id="undone", contained=True, epoch=1, attempt=1)
    story.change("task", step | {"lease_owner": "me", "lease_until": at(30)}, 1.4, ME, "suspended")
    story.change("task", step | {"status": "succeeded"}, 1.6, ME)


def _operate(story: Story) -> None:
    """The operation's job, the job that it retries, and a call of its step."""
    for status, seconds in (("pending", 0.0), ("running", 0.5), ("failed", 1.0), ("pending", 2.2)):
        again = {"id": "again", "status": status, "created_at": at(0), "finished_at": at(1)}
        story.change("job", again, seconds)
    job, task = {"id": "bulk", "status": "pending"}, task_row("bulk", "pending", job_id="bulk")
    story.change("job", job, 2.0, xact="e")
    story.change("task", task, 2.0, xact="e")
    story.hint("task-bulk", 2.0, "e", gone_at=2.2)
    running = {"status": "running", "epoch": 1, "attempt": 1, "lease_owner": "me", "lease_until": at(30)}
    story.change("task", task | running, 3, ME)
    story.change("job", job | {"status": "running"}, 3, ME)
    call = {"id": "call", "job_id": "bulk", "branch": "", "number": 1, "state": "open", "epoch": 1}
    story.change("call", call, 3.2, ME)
    story.change("call", call | {"state": "done"}, 3.4, ME)
    story.change("task", task | {"status": "succeeded", "epoch": 1, "attempt": 1}, 4, ME)
    story.change("job", job | {"status": "succeeded"}, 4, ME)


def _terms() -> Terms:
    steps = {("short", "first"), ("short", "second")}
    return Terms(
        4.0, 0.5, 20, 2, dict.fromkeys(steps, 5), {("short", "second"): ("first",)}, frozenset(steps),
        {("short", "first"): "first.txt"},
    )  # fmt: skip


def _events() -> list[dict[str, Any]]:
    said = [
        ("submitted", "pending", None, None, None),
        ("claimed", "running", "first", "running", 1),
        ("completed", "running", "first", "succeeded", 1),
        ("claimed", "running", "second", "running", 1),
        ("completed", "succeeded", "second", "succeeded", 1),
    ]
    stopped = [
        {
            "job_id": name, "seq": seq, "tenant_id": "red", "kind": kind, "job_status": status, "step": name,
            "task_id": f"task-{name}", "task_status": status, "epoch": epoch, "data": None,
        }
        for name, epoch in (("waited", 0), ("ran", 1), ("undone", 2))
        for seq, (kind, status) in enumerate((("submitted", "pending"), ("cancelled", "cancelled")), 1)
    ]  # fmt: skip
    whole = [
        {
            "job_id": "job", "seq": seq, "tenant_id": "red", "kind": kind, "job_status": job, "step": step,
            "task_id": step and f"task-{step}", "task_status": task, "epoch": epoch,
        }
        for seq, (kind, job, step, task, epoch) in enumerate(said, 1)
    ]  # fmt: skip
    operated = [
        {
            "job_id": "bulk", "seq": seq, "tenant_id": "red", "kind": kind, "job_status": status, "step": "bulk",
            "task_id": task, "task_status": status, "epoch": 1,
        }
        for seq, (kind, status, task) in enumerate(
            (("submitted", "pending", None), ("claimed", "running", "task-bulk"),
             ("completed", "succeeded", "task-bulk")), 1)
    ]  # fmt: skip
    step = {
        "job_id": "undone", "seq": 2, "tenant_id": "red", "kind": "completed", "job_status": "running", "step": "step",
        "task_id": "task-step", "task_status": "succeeded", "epoch": 1, "data": None,
    }  # fmt: skip
    stopped[-1]["seq"] = 3
    return [*whole, *stopped[:-1], step, stopped[-1], *operated]


def _journal() -> list[dict[str, Any]]:
    return [
        {"what": what, "run": f"run-{step}", "task": f"task-{step}", "step": step, "process": ME, "at": T0 + seconds}
        for what, step, seconds in (
            ("begin", "first", 1.1), ("end", "first", 1.9), ("begin", "second", 3.1), ("end", "second", 3.9),
            ("begin", "ran", 1.1), ("tick", "ran", 1.6), ("tick", "ran", 2.0), ("stop", "ran", 2.3),
        )
    ]  # fmt: skip


def _hint_records() -> list[HintRecord]:
    records = []
    for task, start in (
        ("task-first", 0.0),
        ("task-second", 2.0),
        ("task-ran", 0.0),
        ("task-waited", 0.0),
        ("task-bulk", 2.0),
        ("task-undone", 0.0),
        ("task-undone", 2.0),
    ):
        records += [
            HintRecord("api-0.0", HintEvent.PUBLISHED, task, T0 + start + 0.05),
            HintRecord("api-0.0", HintEvent.CONFIRMED, task, T0 + start + 0.1, T0 + start + 0.05),
            HintRecord(ME, HintEvent.DELIVERED, task, T0 + start + 0.9),
            HintRecord(ME, HintEvent.ACKED, task, T0 + start + 2.1, T0 + start + 0.9),
        ]
    return records


def recast(history: History, index: int, **after: Any) -> None:
    """Give change `index` another row than it left."""
    change = history.changes[index]
    assert change.after is not None
    history.changes[index] = replace(change, after=change.after | after)
