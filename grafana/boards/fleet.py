"""Workers, their leases, takeovers and drains."""

from __future__ import annotations

from grafana.describe import FULL, Board, Panel, Row, exported, percentiles, quantile, rate

BOARD = Board(
    "leasehold-fleet",
    "Fleet",
    "Workers, their leases, takeovers and drains.",
    [
        Row("Workers", [
            Panel("Registered workers", "Silent ones were not seen for three renewals.", {"{{state}}": exported("leasehold_workers", "state")}),
            Panel("Workers of a queue", "None, and its tasks wait.", {"{{queue}}": exported("leasehold_queue_workers", "queue")}, bad=1, low_is_bad=True),
            Panel("Paused queues", "1 while somebody has paused the queue: its tasks wait.", {"{{queue}}": exported("leasehold_queue_paused", "queue")}),
            Panel("Tasks without code", "They wait for a worker with their code: those of the queue lack it. Normal only while a deployment is under way.", {"{{queue}}": exported("leasehold_queue_tasks_without_code", "queue")}, warn=1),
            Panel("Busy slots", "Of those for all tenants. More are busy where tenants beyond these have one of the reserve.", {"busy": 'sum(leasehold_worker_slots{state="busy"})', "all": 'sum(leasehold_worker_slots{state="all"})', "and the reserve": 'sum(leasehold_worker_slots{state=~"all|reserve"})'}),
            Panel("Draining", "Workers that take nothing new because they stop.", {"{{instance}}": "leasehold_worker_draining"}),
            Panel("Memory", "Resident, of each process; its children are not in it.", {"{{instance}}": 'process_resident_memory_bytes{job=~"leasehold.*"}'}, "bytes"),
            Panel("CPU", "Cores that each process keeps busy.", {"{{instance}}": 'rate(process_cpu_seconds_total{job=~"leasehold.*"}[$__rate_interval])'}),
        ]),
        Row("Leases", [
            Panel("Held", "By each worker.", {"{{instance}}": "leasehold_leases_held"}),
            Panel("Longest attempt", "How long the oldest attempt of a queue has been running.", {"{{queue}}": exported("leasehold_lease_oldest_seconds", "queue")}, "s"),
            Panel("Lost, taken over, expired", "A worker that dies gives one of each a task; a storm is a fleet that dies.", {
                "lost": rate("leasehold_leases_lost_total"),
                "taken over": rate("leasehold_leases_taken_over_total"),
                "ended by the sweeper": rate("leasehold_leases_expired_total"),
            }, "ops"),
            Panel("Zombie writes refused", "Settlements of a lease that was somebody else's: they changed nothing.", {"refused": rate("leasehold_zombie_writes_refused_total")}, "ops"),
            Panel("Overdue leases", "Passed, and nobody took them: the sweeper is not at work.", {
                "{{queue}}": exported("leasehold_leases_overdue", "queue"),
            }, bad=1),
            Panel("Overdue since", "Age of the oldest of them.", {"{{queue}}": exported("leasehold_lease_overdue_oldest_seconds", "queue")}, "s", bad=60),
        ]),
        Row("Statements", [
            Panel("Claim, poll, settle, renew", "Round trips of the batched statements, p99.", {"{{statement}}": quantile(0.99, "leasehold_statement_duration_seconds", "statement")}, "s", warn=0.05, bad=0.5),
            Panel("How tasks were found", "By a hint, or by a poll: retries, snoozed tasks, and tasks whose hint was lost.", {"{{found_by}}": rate("leasehold_claims_total", "found_by")}, "ops"),
        ]),
        Row("Object store", [
            Panel("Requests", "By operation and outcome; `there already` is a put that another attempt had made.", {"{{operation}} {{outcome}}": rate("leasehold_store_request_duration_seconds_count", "operation, outcome")}, "reqps"),
            Panel("Duration of a request", "With the transfer of its bytes, p99.", {"{{operation}}": quantile(0.99, "leasehold_store_request_duration_seconds", "operation")}, "s"),
        ]),
        Row("Child processes", [
            Panel("Crashes", "By signal; out_of_memory is the step's own limit, SIGKILL often the system's. Without a child: none could be started for a step.", {"{{how}}": rate("leasehold_child_crashes_total", "how"), "without a child: {{pipeline}}": rate("leasehold_attempts_without_child_total", "pipeline")}, "ops"),
            Panel("Memory peak of a run", "By step.", percentiles("leasehold_child_memory_peak_bytes", "pipeline, step"), "bytes"),
            Panel("Versions", "What runs where.", {"{{instance}} {{version}} python {{python}}": "leasehold_build_info"}, width=FULL),
        ]),
    ],
)  # fmt: skip
