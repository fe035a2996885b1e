"""Is it healthy, and should anybody get up?"""

from __future__ import annotations

from grafana.alerts import NOT_EXTERNAL
from grafana.describe import Board, Panel, Row, exported, number, percentiles, rate

_NOW = Row(
    "Now",
    [
        number("Firing alerts", "How many alerts fire; the list is in Prometheus.", 'count(ALERTS{alertname=~"Leasehold.+",alertstate="firing"}) or vector(0)', warn=1, bad=3),
        number(
            "Job success, 1 h",
            "Of the jobs that could have succeeded, how many did. Rejected inputs do not count. Promised: 99 %.",
            "1 - leasehold:job_failures:ratio_rate1h",
            "percentunit",
            warn=0.995,
            bad=0.99,
            low_is_bad=True,
        ),
        number(
            "Started in time, 1 h",
            "Tasks that started within 10 s of when they could. Promised: 99 %.",
            "1 - leasehold:late_starts:ratio_rate1h",
            "percentunit",
            warn=0.995,
            bad=0.99,
            low_is_bad=True,
        ),
        number(
            "API success, 1 h",
            "Requests that were not answered by a 5xx, without probes. Promised: 99.9 %.",
            "1 - leasehold:api_errors:ratio_rate1h",
            "percentunit",
            warn=0.9995,
            bad=0.999,
            low_is_bad=True,
        ),
        number("Oldest due task", "How long the oldest task that could run has waited, without those of external workers.", exported("leasehold_queue_oldest_due_seconds", where=NOT_EXTERNAL), "s", warn=60, bad=300),
        number("Dead letters", "Failed tasks that wait for somebody to replay them.", exported("leasehold_dead_letters"), warn=1, bad=100),
        number("Workers", "Workers that serve.", exported("leasehold_workers", where='state="serving"'), bad=1, low_is_bad=True),
        number("Overdue leases", "Leases that have passed and that nobody took over: the sweeper should have.", "sum(max by (queue) (leasehold_leases_overdue))", warn=1, bad=5),
        number("Unfinished jobs", "Jobs under way, counted up to 10,000.", exported("leasehold_jobs_unfinished")),
        number("Outbox, oldest", "Hints that wait to be published; work goes on meanwhile, slower.", exported("leasehold_outbox_oldest_seconds"), "s", warn=10, bad=60),
        number("Processes without a database", "Workers and API processes whose last contact failed.", "sum(1 - leasehold_database_up)", bad=1),
        number("Processes without a broker", "Work goes on: workers poll the database.", "sum(1 - leasehold_broker_up)", warn=1),
    ],
)  # fmt: skip

_WORK = Row(
    "Work",
    [
        Panel("Jobs ended", "By outcome. Rejected: the input's fault; failed: the handler's, or ours.", {"{{outcome}}": rate("leasehold_job_outcomes_total", "outcome")}, "ops"),
        Panel("Job duration", "From submission to success.", percentiles("leasehold_job_duration_seconds", "pipeline"), "s"),
        Panel("Waiting tasks", "Due, for later, and running, by queue.", {"{{queue}} {{state}}": exported("leasehold_queue_tasks", "queue, state")}),
        Panel("Jobs held at limits", "By the kind of the limit. They are in no queue yet. Growing: more comes than the limit lets through.", {"{{limit}}": exported("leasehold_jobs_held", "limit")}),
        Panel("Longest wait at a limit", "Of a job that a limit holds. Who fills it: the console's page of limits.", {"{{limit}}": exported("leasehold_job_held_oldest_seconds", "limit")}, "s"),
        Panel("Time until a task starts", "From when it could run until it was claimed.", percentiles("leasehold_task_wait_seconds", "queue", 'kind="new"'), "s", warn=1, bad=10),
    ],
)  # fmt: skip

_BURN = Row(
    "Error budgets",
    [
        Panel(
            "Burn rate of the budget",
            "1 spends it exactly; 14.4 for an hour spends 2 % of a month's. Of starts and of the API that wakes somebody up.",
            {
                "jobs, 5 m": "leasehold:job_failures:ratio_rate5m / 0.01",
                "jobs, 1 h": "leasehold:job_failures:ratio_rate1h / 0.01",
                "starts, 5 m": "leasehold:late_starts:ratio_rate5m / 0.01",
                "starts, 1 h": "leasehold:late_starts:ratio_rate1h / 0.01",
                "API, 5 m": "leasehold:api_errors:ratio_rate5m / 0.001",
                "API, 1 h": "leasehold:api_errors:ratio_rate1h / 0.001",
            },
            warn=1,
            bad=14.4,
        ),
        Panel("Running versions", "Two of a role at once: a deployment is under way.", {"{{role}} {{version}}": "count by (role, version) (leasehold_build_info)"}),
    ],
)  # fmt: skip

BOARD = Board("leasehold-overview", "Overview", "Is it healthy, and should anybody get up?", [_NOW, _WORK, _BURN])
