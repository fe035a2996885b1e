"""Declares the alerts and their severities. `build` writes the rules of Prometheus from them.

The alerts of an objective compare burn rates over two windows (Site Reliability Workbook, chapter 5). A high rate over
the long window means that the problem is serious. A high rate over the short window means that the problem has not
ended. A rate over few events says little, so an alert also needs LEAST_EVENTS bad events in the long window: in an
installation that has a request a minute, one error would be a high rate. A counter of an alert must exist at 0
before its first event, with all labels that the alert reads: `increase()` does not count the event with which a counter
appears. Severity `page`: an operator must act now.
Severity `ticket`: an operator must act on the next working day. Every alert names its runbook in
docs/operations/runbooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Prometheus records the burn rates of every objective over these windows.
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
RUNBOOKS = "docs/operations/runbooks"
#: The least number of bad events for an alert of an objective.
LEAST_EVENTS = 10
#: The least number of failed requests to the store within five minutes: those of one download, which is tried thrice.
LEAST_STORE_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Objective:
    """A goal for the share of bad events. `ratio`: PromQL of the share, with WINDOW in place of the window.
    `bad_events`: PromQL of their number, likewise. `budget`: the share that is allowed. `pages`: whether an operator
    can do something at night about a high share.
    """

    name: str
    alert: str
    budget: float
    ratio: str
    bad_events: str
    summary: str
    runbook: str
    pages: bool = True

    def record(self, window: str) -> str:
        """The name of the recorded series."""
        return f"leasehold:{self.name}:ratio_rate{window}"


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. `lasts`: for how long the expression must be true before the alert fires."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    runbook: str


_JOBS = "leasehold_job_outcomes_total"
_HTTP = "leasehold_http_request_duration_seconds_count"
_HTTP_ERRORS = "leasehold_http_server_errors_total"
_STARTS = "leasehold_task_wait_seconds"
# When somebody resumes a queue, its tasks start late on purpose.
_UNLESS_LATELY_PAUSED = "unless on (queue) max by (queue) (max_over_time(leasehold_queue_paused[WINDOW])) == 1"
_STORE = "leasehold_store_request_duration_seconds_count"
_STORE_FAILED = f'{_STORE}{{outcome=~"unavailable|refused"}}'
_API = 'leasehold_build_info{role="api"}'
# Without probes and scrapes: they come every few seconds, also to a process that drains and answers them with 503.
_OF_CLIENTS = 'route!~"/(livez|readyz|metrics)"'
OBJECTIVES = (
    Objective(
        "job_failures",
        "LeaseholdJobsFailing",
        0.01,
        f'(sum(rate({_JOBS}{{outcome=~"failed|expired"}}[WINDOW])) or vector(0))'
        f' / sum(rate({_JOBS}{{outcome!="rejected"}}[WINDOW]))',
        f'sum(increase({_JOBS}{{outcome=~"failed|expired"}}[WINDOW]))',
        "More jobs fail than the objective of 99 % allows",
        "jobs-failing",
        # Jobs also fail because of a tenant's handler, external worker, limit, or address of a webhook, about which an
        # operator can do nothing. What is the platform's fault pages by its cause: LeaseholdStoreAway,
        # LeaseholdTakeoverStorm, LeaseholdQueueWaiting.
        pages=False,
    ),
    Objective(
        "late_starts",
        "LeaseholdStartsLate",
        0.01,
        f'1 - sum(rate({_STARTS}_bucket{{kind="new",le="10.0"}}[WINDOW]) {_UNLESS_LATELY_PAUSED})'
        f' / sum(rate({_STARTS}_count{{kind="new"}}[WINDOW]) {_UNLESS_LATELY_PAUSED})',
        f'sum(increase({_STARTS}_count{{kind="new"}}[WINDOW]) {_UNLESS_LATELY_PAUSED})'
        f' - sum(increase({_STARTS}_bucket{{kind="new",le="10.0"}}[WINDOW]) {_UNLESS_LATELY_PAUSED})',
        "More than 1 % of tasks start later than 10 s after they could",
        "starts-late",
    ),
    Objective(
        "api_errors",
        "LeaseholdApiErrors",
        0.001,
        f"(sum(rate({_HTTP_ERRORS}[WINDOW])) or vector(0)) / sum(rate({_HTTP}{{{_OF_CLIENTS}}}[WINDOW]))",
        f"sum(increase({_HTTP_ERRORS}[WINDOW]))",
        "More requests end in a 5xx than the objective of 99.9 % allows",
        "api-errors",
    ),
)

# Severity -> (burn rate, long window, short window). With the first burn rate, the long window uses up 2 % of the
# budget of 30 days; with the second 5 %, and with the third and the fourth 10 %.
_BURNS = {"page": ((14.4, "1h", "5m"), (6.0, "6h", "30m")), "ticket": ((3.0, "1d", "2h"), (1.0, "3d", "6h"))}

#: A selector without the queues of external workers: their tasks may wait for long on purpose.
NOT_EXTERNAL = 'queue!~"ext:.*"'
_UNLESS_PAUSED = "unless max by (queue) (leasehold_queue_paused) == 1"
ALERTS = (
    Alert(
        "LeaseholdLeasesStuck", "max(leasehold_lease_overdue_oldest_seconds) > 60", "2m", "page",
        "Leases ended over a minute ago, and no worker takes their tasks over", "leases-stuck",
    ),
    Alert(
        "LeaseholdQueueWaiting",
        f"max by (queue) (leasehold_queue_oldest_due_seconds{{{NOT_EXTERNAL}}}) > 300 {_UNLESS_PAUSED}",
        "5m", "page",
        "The oldest task of queue {{ $labels.queue }} could have run five minutes ago", "queue-waiting",
    ),
    Alert(
        "LeaseholdQueueWithoutWorkers",
        f'max by (queue) (leasehold_queue_tasks{{state="due",{NOT_EXTERNAL}}}) > 0'
        f" and max by (queue) (leasehold_queue_workers) == 0 {_UNLESS_PAUSED}",
        "2m", "page",
        "Tasks wait in queue {{ $labels.queue }}, and no worker serves it", "queue-without-workers",
    ),
    Alert(
        "LeaseholdTasksWithoutCode", "max by (queue) (leasehold_queue_tasks_without_code) > 0", "10m", "ticket",
        "Tasks of queue {{ $labels.queue }} wait for code that no worker of the queue has", "tasks-without-code",
    ),
    Alert(
        # Not the answer to one question, which may be missing alone: LeaseholdQuestionUnanswered tells of that.
        "LeaseholdSilent", "absent(leasehold_exporter_leads == 1)", "2m", "page",
        "No process exports the metrics of the database: none runs, none reaches it, or none is scraped", "silent",
    ),
    Alert(
        "LeaseholdQuestionUnanswered", "sum by (question) (increase(leasehold_exporter_refused_total[15m])) > 3", "5m",
        "ticket",
        "The exporter gets no answer to its question {{ $labels.question }}: what it tells is missing, also to alerts",
        "question-unanswered",
    ),
    Alert(
        "LeaseholdDatabaseAway", "sum(1 - leasehold_database_up) > 0", "1m", "page",
        "{{ $value }} processes have no database", "database-away",
    ),
    Alert(
        # Where no API has run within a day, there is none on purpose: programs may submit by the database alone.
        "LeaseholdApiAway", f"absent({_API}) and on () count(count_over_time({_API}[1d]))", "2m", "page",
        "No process of the API reports: none runs, or none is scraped", "api-away",
    ),
    Alert(
        # By operation: a store that is full serves all but puts. `left` is no outcome of the store: its caller gave up.
        # A request that fails now and then may be the only one within five minutes.
        "LeaseholdStoreAway",
        f"sum by (operation) (rate({_STORE_FAILED}[5m]))"
        f' / sum by (operation) (rate({_STORE}{{outcome!="left"}}[5m])) > 0.5'
        f" and sum by (operation) (increase({_STORE_FAILED}[5m])) >= {LEAST_STORE_FAILURES}",
        "5m", "page",
        "The object store does not serve most of the requests of the operation {{ $labels.operation }}", "store-away",
    ),
    Alert(
        "LeaseholdTakeoverStorm",
        "sum(rate(leasehold_leases_taken_over_total[5m])) + sum(rate(leasehold_leases_expired_total[5m])) > 0.2",
        "5m", "page",
        "Leases are taken over all the time: workers die, or lose the database", "takeover-storm",
    ),
    Alert(
        "LeaseholdOutboxNotDraining", "max(leasehold_outbox_oldest_seconds) > 60", "5m", "ticket",
        "Hints wait in the outbox for over a minute; work goes on, slower", "outbox-not-draining",
    ),
    Alert(
        "LeaseholdBrokerAway", "sum(1 - leasehold_broker_up) > 0", "5m", "ticket",
        "{{ $value }} processes have no broker; work goes on, slower", "broker-away",
    ),
    Alert(
        "LeaseholdDeadLettersGrowing", "sum by (pipeline) (increase(leasehold_pipeline_dead_letters_total[1h])) > 10",
        "5m", "ticket",
        "More than ten tasks of pipeline {{ $labels.pipeline }} failed for good within an hour", "dead-letters-growing",
    ),
    Alert(
        "LeaseholdChildrenCrash", "sum by (how) (increase(leasehold_child_crashes_total[30m])) > 5", "5m", "ticket",
        "Child processes die ({{ $labels.how }}), more than five within half an hour", "children-crash",
    ),
    Alert(
        # One task is put off for up to five minutes, after a minute without a child: five times within half an hour.
        "LeaseholdStepsWithoutChild",
        "sum by (pipeline) (increase(leasehold_attempts_without_child_total[30m])) > 3", "5m", "ticket",
        "Isolated steps of pipeline {{ $labels.pipeline }} are put off: no child process can be started for them",
        "steps-without-child",
    ),
    Alert(
        "LeaseholdScheduleLate", "max(leasehold_schedule_oldest_due_seconds) > 60", "2m", "page",
        "A schedule should have fired over a minute ago", "schedule-late",
    ),
    Alert(
        "LeaseholdRetentionLate", "max(leasehold_retention_oldest_due_seconds) > 3600", "1h", "ticket",
        "Jobs expire faster than retention deletes them: one should be gone for over an hour", "retention-late",
    ),
    Alert(
        "LeaseholdDutyFails", "sum by (duty) (increase(leasehold_duty_errors_total[15m])) > 3", "5m", "ticket",
        "The duty {{ $labels.duty }} of a worker keeps failing, not because of an outage", "duty-fails",
    ),
    Alert(
        "LeaseholdUnitsStuck", "sum by (duty) (increase(leasehold_units_stuck_total[1h])) > 0", "0m", "ticket",
        "Something in the duty {{ $labels.duty }} failed five times in a row", "duty-fails",
    ),
    Alert(
        "LeaseholdTableBloat",
        'max by (table) (leasehold_table_rows{kind="dead"}) > 20000'
        ' and max by (table) (leasehold_table_rows{kind="dead"}) > 0.5'
        ' * max by (table) (leasehold_table_rows{kind="live"})',
        "15m", "ticket",
        "Table {{ $labels.table }} has more dead rows than vacuum removes", "database-bloat",
    ),
    Alert(
        "LeaseholdSnapshotHeld", "max(leasehold_database_snapshot_oldest_seconds) > 60", "5m", "ticket",
        "A transaction has been open for over a minute: vacuum cannot work", "database-bloat",
    ),
    Alert(
        "LeaseholdReplicaLeft", "count(avg_over_time(leasehold_replica_serves[10m]) < 0.9)", "5m", "ticket",
        "{{ $value }} API processes leave the standby for the primary: it is away, or too far behind", "replica-left",
    ),
    Alert(
        "LeaseholdReplicaLags", "max(leasehold_replica_lag_seconds * leasehold_replica_serves) > 60", "5m", "ticket",
        "Lists are read from a standby that is over a minute behind", "replica-left",
    ),
    Alert(
        "LeaseholdTargetDown", 'up{job=~"leasehold.*"} == 0', "2m", "ticket",
        "{{ $labels.instance }} is not scraped", "target-down",
    ),
)  # fmt: skip


def burn_alerts(objective: Objective) -> list[Alert]:
    """The page, unless the objective has none, and the ticket of an objective."""
    return [
        Alert(
            objective.alert + ("Fast" if severity == "page" else "Slow"),
            " or ".join(
                f"({objective.record(long)} > {burn * objective.budget:g}"
                f" and {objective.record(short)} > {burn * objective.budget:g}"
                f" and {objective.bad_events.replace('WINDOW', long)} >= {LEAST_EVENTS})"
                for burn, long, short in burns
            ),
            "1m" if severity == "page" else "15m",
            severity,
            objective.summary,
            objective.runbook,
        )
        for severity, burns in _BURNS.items()
        if objective.pages or severity == "ticket"
    ]


def all_alerts() -> list[Alert]:
    return [*(alert for objective in OBJECTIVES for alert in burn_alerts(objective)), *ALERTS]


def annotations_of(alert: Alert) -> dict[str, str]:
    return {"summary": alert.summary, "runbook_url": f"{RUNBOOKS}/{alert.runbook}.md"}


def rules() -> Mapping[str, Any]:
    """Prometheus's rule file."""
    return {"groups": [_records(objective) for objective in OBJECTIVES] + [_group("leasehold", all_alerts())]}


def _records(objective: Objective) -> dict[str, Any]:
    return {
        "name": f"leasehold-{objective.name.replace('_', '-')}",
        "rules": [
            {"record": objective.record(window), "expr": objective.ratio.replace("WINDOW", window)}
            for window in WINDOWS
        ],
    }


def _group(name: str, alerts: Sequence[Alert]) -> dict[str, Any]:
    return {
        "name": name,
        "rules": [
            {
                "alert": alert.name,
                "expr": alert.expression,
                "for": alert.lasts,
                "labels": {"severity": alert.severity},
                "annotations": annotations_of(alert),
            }
            for alert in alerts
        ],
    }
