"""The sizes of all measurements: how many jobs, requests and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """`runs`: the runs of each figure. The other fields are the sizes of one run."""

    runs: int = 3
    peers: tuple[str, ...] = ("celery", "dramatiq", "taskiq", "procrastinate", "pgqueuer", "dbos")
    jobs: int = 20_000
    warm_up_jobs: int = 500
    finished: tuple[int, ...] = (10_000, 1_000_000)  # finished jobs: a claim must cost the same beside each number
    claims: int = 1000  # of one growth run, 16 tasks each
    finished_beside: int = 200_000  # finished jobs in the table, for `tables`
    choice_minutes: float = 3  # of `tables`: autovacuum visits each database once a minute
    under_snapshot: int = 100_000  # jobs that are done while a session holds an old snapshot
    steady_minutes: float = 60
    steady_windows: int = 12  # of that time, each with a figure of its own
    steady_rate: float = 50.0  # jobs a second, in each of two installations
    paced_jobs: int = 200
    paced_rate: float = 20.0  # jobs a second
    picture_width: int = 4000
    picture_height: int = 3000
    picture_rounds: int = 5  # pictures of one run
    pictures: int = 40  # of one run of the platform, when pictures a second are counted
    small_picture_width: int = 900  # 217 kB
    small_picture_height: int = 675
    small_pictures: int = 200
    pictures_seconds: float = 10.0  # of one run of a library
    settle_seconds: float = 5.0  # after the start, until the first housekeeping and the first connections are over
    idle_seconds: float = 20.0
    waiting: int = 1000  # external workers that wait for a task
    requests_seconds: float = 10.0
    requests_at_once: int = 16
    model_width: int = 64  # 64 is ResNet-50: 102 MB
    model_images: int = 16
    workflow_steps: int = 6400  # of one run of sdk, in 64 workflows, or in one ctx.gather
    workflow_calls: int = 1000  # of the workflow that resumes
    asleep: int = 100_000  # workflows that sleep
    woken: int = 5000  # further workflows, which wake
    wake_lead_seconds: float = 30.0  # until the first of them wakes: all sleep by then
    wake_pause_seconds: float = 10.0  # between wakes at twice the goal's rate and wakes at the goal's rate
    generations: int = 100_000  # that wait for their next poll
    polls_a_second: float = 200.0
    generation_seconds: float = 60.0  # of orders and queries, from the first poll on
    generation_head_start: float = 30.0  # seconds until the first poll is due: a worker is up by then
    model_downloads: int = 3  # of the float model, in turns from the API and from the store
    attacks: tuple[str, ...] = ()  # of hostile; (): all
    hostile_seconds: float = 10.0  # of each attack
