"""Where the time goes, and what fails."""

from __future__ import annotations

from grafana.describe import FULL, Board, Panel, Row, Variable, exported, percentiles, rate

_P = 'pipeline=~"$pipeline"'

BOARD = Board(
    "leasehold-pipelines",
    "Pipelines",
    "Where the time of a job goes, and what fails.",
    [
        Row("Jobs", [
            Panel("Submitted", "Jobs that clients submitted to the API.", {"{{pipeline}}": rate("leasehold_jobs_submitted_total", "pipeline", _P)}, "ops"),
            Panel("Ended", "By outcome.", {"{{pipeline}} {{outcome}}": rate("leasehold_jobs_finished_total", "pipeline, outcome", _P)}, "ops"),
            Panel("End to end", "From submission to success.", percentiles("leasehold_job_duration_seconds", "pipeline", _P), "s", width=FULL),
        ]),
        Row("Steps", [
            Panel("Attempts", "By how they ended.", {"{{step}} {{outcome}}": rate("leasehold_attempts_total", "pipeline, step, outcome", _P)}, "ops"),
            Panel("Duration of an attempt", "From claim to settlement: download, run, upload, commit.", percentiles("leasehold_attempt_duration_seconds", "pipeline, step", _P), "s"),
            Panel(
                "Share of the time",
                "Seconds of attempts a second, by step: how many slots it keeps busy.",
                {"{{pipeline}} {{step}}": rate("leasehold_attempt_duration_seconds_sum", "pipeline, step", _P)},
            ),
            Panel("Adopted outputs", "Attempts that found a dead predecessor's work already done.", {"{{pipeline}} {{step}}": rate("leasehold_outputs_adopted_total", "pipeline, step", _P)}, "ops"),
        ]),
        Row("What fails", [
            Panel("Retries", "Attempts that failed and come again, by error code.", {"{{step}} {{code}}": rate("leasehold_retries_total", "pipeline, step, code", _P)}, "ops"),
            Panel("Dead letters", "Given up, by error code; a rejected input's code is the client's to mend.", {"{{step}} {{code}}": rate("leasehold_dead_letters_total", "pipeline, step, code", _P)}, "ops", bad=1),
        ]),
        Row("Waiting", [
            Panel("Queue wait", "From when a task could run until its claim; retry and poll tell how late timers are.", percentiles("leasehold_task_wait_seconds", "queue, kind"), "s", warn=1, bad=10),
            Panel("Lateness of schedules", "How long ago the schedule that is latest was due.", {"late": exported("leasehold_schedule_oldest_due_seconds")}, "s", warn=5, bad=60),
        ]),
    ],
    [Variable("pipeline", "leasehold_attempts_total", "pipeline")],
)  # fmt: skip
