"""Tasks that live in somebody else's service."""

from __future__ import annotations

from grafana.describe import Board, Panel, Row, exported, percentiles, rate

_P = 'pipeline="generation"'

BOARD = Board(
    "leasehold-generation",
    "Generation",
    "Tasks that live in somebody else's service for minutes to a day.",
    [
        Row("Tasks", [
            Panel("By status", "In the words of the API.", {"{{kind}} {{status}}": exported("leasehold_generation_tasks", "kind, status")}),
            Panel("Load of a server", "Tasks that a server has under way; three at most by default.", {"{{server_id}}": exported("leasehold_generation_server_tasks", "server_id")}),
            Panel("Jobs ended", "By outcome.", {"{{outcome}}": rate("leasehold_jobs_finished_total", "outcome", _P)}, "ops"),
            Panel("End to end", "From submission to success: mostly the provider's time.", percentiles("leasehold_job_duration_seconds", "", _P), "s"),
        ]),
        Row("Providers", [
            Panel("Requests", "By provider, operation and outcome.", {"{{provider}} {{operation}} {{outcome}}": rate("leasehold_generation_provider_requests_total", "provider, operation, outcome")}, "reqps"),
            Panel("Duration of a request", "By provider.", percentiles("leasehold_generation_provider_request_duration_seconds", "provider"), "s"),
            Panel("Lateness of polls", "From when a poll was due until its claim.", percentiles("leasehold_task_wait_seconds", "queue", 'kind="poll"'), "s", warn=2, bad=30),
            Panel("Steps", "Attempts by how they ended.", {"{{step}} {{outcome}}": rate("leasehold_attempts_total", "step, outcome", _P)}, "ops"),
        ]),
    ],
)  # fmt: skip
