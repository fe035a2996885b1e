"""The tests of the alerts, for `promtool test rules`: each alert fires in its case, and none fires on a healthy day.

Series have promtool's notation: `0+60x1440` begins at 0 and grows by 60 in each of 1440 samples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana.alerts import all_alerts, annotations_of

_WAIT = 'leasehold_task_wait_seconds_{}{{kind="new",queue="default"{}}}'
_WAIT_RESUMED = 'leasehold_task_wait_seconds_{}{{kind="new",queue="resumed"{}}}'
_SERVES = 'leasehold_replica_serves{instance="api",part="requests"}'
_LAG = 'leasehold_replica_lag_seconds{instance="api",part="requests"}'
_HTTP = 'leasehold_http_request_duration_seconds_count{{code="{}",method="GET",route="/media/{{media_id}}"}}'
_HTTP_ERRORS = "leasehold_http_server_errors_total"
_STORE = 'leasehold_store_request_duration_seconds_count{{operation="{}",outcome="{}"}}'
_PROBE = 'leasehold_http_request_duration_seconds_count{{code="{}",method="GET",route="/{}"}}'


@dataclass(frozen=True, slots=True)
class Case:
    """The alert fires at the time `at` with `labels`. `series` replace the series of the healthy day with the same
    names. `when`: what the case is about, if the alert has several.
    """

    alert: str
    at: str
    series: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    value: str = ""  # stands for {{ $value }} in the summary
    when: str = ""


#: All series on a day on which nothing is wrong, with a sample for each minute.
HEALTHY: Mapping[str, str] = {
    'leasehold_job_outcomes_total{outcome="succeeded"}': "0+600x1440",
    'leasehold_job_outcomes_total{outcome="rejected"}': "0+60x1440",
    'leasehold_job_outcomes_total{outcome="failed"}': "0+1x1440",
    _WAIT.format("bucket", ',le="10.0"'): "0+1000x1440",
    _WAIT.format("count", ""): "0+1001x1440",
    # Somebody has paused this queue, and resumes it after 100 minutes: all that waited starts late.
    _WAIT_RESUMED.format("bucket", ',le="10.0"'): "0+0x1440",
    _WAIT_RESUMED.format("count", ""): "0x100 9000+9000x30 279000x1310",
    'leasehold_queue_paused{queue="resumed"}': "1x100 0x1340",
    _HTTP.format(200): "0+10000x1440",
    _HTTP_ERRORS: "0+1x1440",
    # Probes and scrapes, which are no requests of clients: a process that drains or waits for a migration is not ready.
    _PROBE.format(200, "metrics"): "0+1000000x1440",
    _PROBE.format(503, "readyz"): "0+20000x1440",
    'leasehold_lease_overdue_oldest_seconds{queue="default"}': "0 1 0 2x1437",
    'leasehold_queue_oldest_due_seconds{queue="default"}': "2+0x1440",
    'leasehold_queue_tasks{queue="default",state="due"}': "50+0x1440",
    'leasehold_queue_workers{queue="default"}': "2+0x1440",
    'leasehold_queue_paused{queue="default"}': "0+0x1440",
    # While a deployment is under way, a new task may come before the workers that know it.
    'leasehold_queue_tasks_without_code{queue="default"}': "_x60 5x5 _x1374",
    'leasehold_queue_oldest_due_seconds{queue="paused"}': "0+60x1440",
    'leasehold_queue_paused{queue="paused"}': "1+0x1440",
    'leasehold_queue_tasks{queue="paused",state="due"}': "5+0x1440",
    'leasehold_queue_workers{queue="paused"}': "0+0x1440",
    'leasehold_queue_oldest_due_seconds{queue="ext:robots"}': "0+60x1440",
    'leasehold_queue_paused{queue="ext:robots"}': "0+0x1440",
    'leasehold_queue_tasks{queue="ext:robots",state="due"}': "5+0x1440",
    'leasehold_queue_workers{queue="ext:robots"}': "0+0x1440",
    # A leader that ends, and another.
    'leasehold_exporter_leads{instance="worker"}': "1x700 0x740",
    'leasehold_exporter_leads{instance="api"}': "0x700 1x740",
    # Now and then a statement takes too long. One that always does has no answer: the hour 10 is without "backlog".
    'leasehold_exporter_refused_total{question="backlog"}': " ".join(f"{2 * n}x59" for n in range(24)),
    "leasehold_jobs_unfinished": "70x590 _x20 70x830",
    'leasehold_database_up{instance="worker"}': "1+0x1440",
    'leasehold_broker_up{instance="worker",broker="amqp"}': "1+0x1440",
    "leasehold_leases_taken_over_total": "0+1x1440",
    "leasehold_leases_expired_total": "0+1x1440",
    "leasehold_outbox_oldest_seconds": "0.1+0x1440",
    'leasehold_pipeline_dead_letters_total{pipeline="media"}': "0 1 1 2x1437",
    'leasehold_child_crashes_total{how="SIGKILL"}': "0 0 1x1438",
    # One zygote died, and started again.
    'leasehold_attempts_without_child_total{pipeline="media"}': "0 0 2x1438",
    "leasehold_schedule_oldest_due_seconds": "0.4+0x1440",
    # Now and then a job may go that had to stay for longer than its retention.
    "leasehold_retention_oldest_due_seconds": "30+0x300 90000 30+0x1139",
    'leasehold_duty_errors_total{duty="retention"}': "0 0 1x1438",
    'leasehold_units_stuck_total{duty="schedules"}': "1+0x1440",
    'leasehold_table_rows{table="task",kind="dead"}': "15000+0x1440",
    'leasehold_table_rows{table="task",kind="live"}': "100000+0x1440",
    "leasehold_database_snapshot_oldest_seconds": "5+0x1440",
    _SERVES: "1+0x1440",
    _LAG: "0.9+0x1440",
    'leasehold_replica_serves{instance="api-2",part="requests"}': "1x700 0 1x738",
    'leasehold_replica_lag_seconds{instance="api-2",part="requests"}': "0.9+0x1440",
    'leasehold_build_info{role="api",instance="api"}': "1+0x1440",
    _STORE.format("put", "ok"): "0+900x1440",
    _STORE.format("put", "unavailable"): "0+100x1440",
    _STORE.format("put", "refused"): "0+0x1440",
    _STORE.format("get", "ok"): "0+900x1440",
    _STORE.format("get", "unavailable"): "0+0x1440",
    _STORE.format("get", "refused"): "0+0x1440",
    _STORE.format("readiness", "missing"): "0+36x1440",
    _STORE.format("readiness", "unavailable"): "0+0x1440",
    _STORE.format("readiness", "refused"): "0+0x1440",
    'up{job="leasehold-worker",instance="worker"}': "1+0x1440",
}


def _every_sixth_minute() -> str:
    """The samples of a counter that grows by 1 every six minutes."""
    return " ".join(f"{n}x5" for n in range(240))


#: A request, a job and a start a minute, and nine bad ones of each from the hour on.
_NINE_FROM_THE_HOUR_ON = "0x60 1+1x8 9x1371"
_FEW_EVENTS: Mapping[str, str] = {
    'leasehold_job_outcomes_total{outcome="succeeded"}': "0+1x1440",
    'leasehold_job_outcomes_total{outcome="failed"}': _NINE_FROM_THE_HOUR_ON,
    _WAIT.format("bucket", ',le="10.0"'): "0+1x60 60+0x8 61+1x1371",
    _WAIT.format("count", ""): "0+1x1440",
    _HTTP.format(200): "0+1x1440",
    _HTTP_ERRORS: _NINE_FROM_THE_HOUR_ON,
    # One request in four minutes, and it fails.
    _STORE.format("list", "unavailable"): " ".join(f"{n}x3" for n in range(360)),
    # Without the deployment of the healthy day: promtool remembers its last sample for five minutes.
    'leasehold_queue_tasks_without_code{queue="default"}': "_x1440",
}
#: The first 500 events of a process, within a moment. `_x10 500x1430`, a counter that its first event makes, would show
#: no increase: tests/telemetry/test_processes.py sees that each is there at 0.
_FIRST_500 = "0x10 500x1430"
#: A store that serves nothing, and of which nobody wants anything.
_STORE_SILENT: Mapping[str, str] = {name: "0+0x1440" for name in HEALTHY if name.startswith("leasehold_store_")}
_FAILED = 'leasehold_job_outcomes_total{outcome="failed"}'
CASES = (
    Case("LeaseholdJobsFailingSlow", "3h", {_FAILED: "0+32x1440"}),  # 5 % of jobs fail, 5 times the budget
    Case(
        "LeaseholdJobsFailingSlow",
        "40m",
        {
            **{name: "0x1440" for name in HEALTHY if name.startswith("leasehold_job_outcomes")},
            'leasehold_job_outcomes_total{outcome="failed"}': _FIRST_500,
        },
        when="the first 500 jobs of a process fail at once",
    ),
    Case("LeaseholdStartsLateFast", "70m", {_WAIT.format("bucket", ',le="10.0"'): "0+700x1440"}),
    Case("LeaseholdStartsLateSlow", "3h", {_WAIT.format("bucket", ',le="10.0"'): "0+960x1440"}),
    Case("LeaseholdApiErrorsFast", "70m", {_HTTP_ERRORS: "0+300x1440"}),
    Case("LeaseholdApiErrorsSlow", "3h", {_HTTP_ERRORS: "0+40x1440"}),
    Case(
        "LeaseholdApiErrorsFast",
        "40m",
        {
            _HTTP.format(200): "0+100x1440",
            _HTTP_ERRORS: "0x30 500x1410",
        },
        when="the first 500 errors of a process come at once",
    ),
    Case("LeaseholdLeasesStuck", "10m", {'leasehold_lease_overdue_oldest_seconds{queue="default"}': "0+60x1440"}),
    Case(
        "LeaseholdQueueWaiting",
        "30m",
        {'leasehold_queue_oldest_due_seconds{queue="default"}': "0+60x1440"},
        {"queue": "default"},
    ),
    Case(
        "LeaseholdQueueWithoutWorkers",
        "5m",
        {'leasehold_queue_workers{queue="default"}': "0+0x1440"},
        {"queue": "default"},
    ),
    Case(
        "LeaseholdTasksWithoutCode",
        "30m",
        {'leasehold_queue_tasks_without_code{queue="default"}': "3+0x1440"},
        {"queue": "default"},
    ),
    Case(
        "LeaseholdSilent", "10m", {name: "0+0x1440" for name in HEALTHY if "exporter_leads" in name}, when="no leader"
    ),
    Case(
        "LeaseholdSilent", "10m", {name: "1 _x1439" for name in HEALTHY if "exporter_leads" in name}, when="no process"
    ),
    Case(
        "LeaseholdQuestionUnanswered",
        "30m",
        {'leasehold_exporter_refused_total{question="backlog"}': "0+1x1440"},
        {"question": "backlog"},
    ),
    Case("LeaseholdDatabaseAway", "5m", {'leasehold_database_up{instance="worker"}': "0+0x1440"}, value="1"),
    Case(
        "LeaseholdApiAway",
        "20m",
        {'leasehold_build_info{role="api",instance="api"}': "1x5 _x1434"},
        {"role": "api"},
    ),
    Case(
        "LeaseholdStoreAway",
        "20m",
        {_STORE.format("put", "unavailable"): "0+1000x1440"},
        {"operation": "put"},
        when="it answers with errors",
    ),
    Case(
        "LeaseholdStoreAway",
        "20m",
        {
            **_STORE_SILENT,
            # Callers give up sooner than the request: a probe whose client is gone, a cancelled attempt.
            _STORE.format("get", "left"): "0+36x1440",
            _STORE.format("get", "unavailable"): "0+6x1440",
        },
        {"operation": "get"},
        when="it is silent",
    ),
    Case(
        "LeaseholdStoreAway",
        "20m",
        {**_STORE_SILENT, _STORE.format("readiness", "unavailable"): "0+12x1440"},
        {"operation": "readiness"},
        when="it is silent, and only probes ask",
    ),
    Case(
        "LeaseholdStoreAway",
        "20m",
        {
            _STORE.format("put", "ok"): "0+0x1440",
            _STORE.format("put", "unavailable"): "0+60x1440",
            _STORE.format("get", "ok"): "0+60x1440",
        },
        {"operation": "put"},
        when="it stores nothing more",
    ),
    Case(
        "LeaseholdStoreAway",
        "20m",
        {
            **_STORE_SILENT,
            _STORE.format("get", "refused"): "0+6x1440",
        },
        {"operation": "get"},
        when="it refuses the credentials",
    ),
    Case("LeaseholdTakeoverStorm", "20m", {"leasehold_leases_expired_total": "0+30x1440"}),
    Case("LeaseholdOutboxNotDraining", "10m", {"leasehold_outbox_oldest_seconds": "0+60x1440"}),
    Case("LeaseholdBrokerAway", "10m", {'leasehold_broker_up{instance="worker",broker="amqp"}': "0+0x1440"}, value="1"),
    Case(
        "LeaseholdDeadLettersGrowing",
        "70m",
        {'leasehold_pipeline_dead_letters_total{pipeline="media"}': "0+1x1440"},
        {"pipeline": "media"},
    ),
    Case(
        "LeaseholdDeadLettersGrowing",
        "30m",
        {
            'leasehold_pipeline_dead_letters_total{pipeline="media"}': _FIRST_500,
        },
        {"pipeline": "media"},
        when="the first 500 of a process come at once",
    ),
    Case(
        "LeaseholdChildrenCrash",
        "40m",
        {'leasehold_child_crashes_total{how="SIGKILL"}': "0+1x1440"},
        {"how": "SIGKILL"},
    ),
    Case(
        "LeaseholdStepsWithoutChild",
        "2h",
        # One task, again and again: a minute without a child, and then a pause of five.
        {'leasehold_attempts_without_child_total{pipeline="media"}': _every_sixth_minute()},
        {"pipeline": "media"},
    ),
    Case("LeaseholdScheduleLate", "10m", {"leasehold_schedule_oldest_due_seconds": "0+60x1440"}),
    Case("LeaseholdRetentionLate", "130m", {"leasehold_retention_oldest_due_seconds": "0+60x1440"}),
    Case(
        "LeaseholdDutyFails",
        "30m",
        {'leasehold_duty_errors_total{duty="retention"}': "0+1x1440"},
        {"duty": "retention"},
    ),
    Case(
        "LeaseholdUnitsStuck",
        "20m",
        {'leasehold_units_stuck_total{duty="schedules"}': "0x10 1x1430"},
        {"duty": "schedules"},
    ),
    Case(
        "LeaseholdTableBloat",
        "2h",
        {'leasehold_table_rows{table="task",kind="dead"}': "0+1000x1440"},
        {"table": "task"},
    ),
    Case("LeaseholdSnapshotHeld", "15m", {"leasehold_database_snapshot_oldest_seconds": "0+60x1440"}),
    # Reads leave the standby again and again, for two minutes of nine.
    Case("LeaseholdReplicaLeft", "30m", {_SERVES: " ".join(["0x1 1x6"] * 160)}, value="1"),
    Case("LeaseholdReplicaLags", "15m", {_LAG: "0+20x1440"}),
    Case(
        "LeaseholdTargetDown",
        "5m",
        {'up{job="leasehold-worker",instance="worker"}': "0+0x1440"},
        {"job": "leasehold-worker", "instance": "worker"},
    ),
)


def tests(rule_file: str) -> Mapping[str, Any]:
    """The content of promtool's test file."""
    return {
        "rule_files": [rule_file],
        "evaluation_interval": "1m",
        "tests": [
            *(_test_of(case) for case in CASES),
            _test_of_no_alert("nothing fires on half a healthy day", _series({}), ("10m", "2h", "10h", "12h")),
            _test_of_no_alert(
                "nothing fires where no API and no store is used", _series_of_workers_alone(), ("10m", "2h")
            ),
            _test_of_no_alert("a few bad events among few fire nothing", _series(_FEW_EVENTS), ("70m", "90m", "2h")),
        ],
    }


def _series(replaced: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in {**HEALTHY, **replaced}.items()]


def _test_of(case: Case) -> dict[str, Any]:
    alert = next(alert for alert in all_alerts() if alert.name == case.alert)
    annotations = annotations_of(alert)
    summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: case.labels[label[1]], annotations["summary"])
    annotations["summary"] = summary.replace("{{ $value }}", case.value)
    expected = {"exp_labels": {"severity": alert.severity, **case.labels}, "exp_annotations": annotations}
    return {
        "name": f"{case.alert} fires" + (f": {case.when}" if case.when else ""),
        "interval": "1m",
        "input_series": _series(case.series),
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": [expected]}],
    }


def _series_of_workers_alone() -> list[dict[str, str]]:
    """Programs submit by the database, and no step has files."""
    of_others = ("leasehold_http_", "leasehold_store_", "leasehold_replica_", "leasehold_build_info")
    return [series for series in _series({}) if not series["series"].startswith(of_others)]


def _test_of_no_alert(name: str, series: list[dict[str, str]], moments: Sequence[str]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [
            {"eval_time": moment, "alertname": alert.name, "exp_alerts": []}
            for moment in moments
            for alert in all_alerts()
        ],
    }
