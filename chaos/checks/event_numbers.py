"""Judges I20: the events of a job are numbered without gaps, and a client that resumes gets each event once."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History


def i20(history: History) -> Iterator[Observation]:
    """Event numbers are gap-free per job; a client that resumes sees each event once, in order, up to the last one."""
    for job in history.jobs:
        numbers = [event["seq"] for event in history.events_of.get(job["id"], [])]
        is_gap_free = numbers == list(range(1, len(numbers) + 1)) and job["event_seq"] == len(numbers)
        sentence = f"job {job['id']} counts {job['event_seq']} events and has {numbers}"
        yield observed("numbers of a job", sentence, good=is_gap_free and bool(numbers))
    for job_id, pieces in history.streams.items():
        yield from _check_stream(history, job_id, pieces)


def _check_stream(history: History, job_id: str, pieces: list[tuple[int, list[int]]]) -> Iterator[Observation]:
    for cursor, numbers in pieces:
        sentence = f"a client that resumed the events of job {job_id} after {cursor} saw {numbers}"
        yield observed("resumption", sentence, good=numbers == list(range(cursor + 1, cursor + 1 + len(numbers))))
    received = sorted(number for _, numbers in pieces for number in numbers)
    event_numbers = [event["seq"] for event in history.events_of.get(job_id, [])]
    yield observed(
        "stream",
        f"a client that followed job {job_id} saw {received} of its events {event_numbers}",
        good=received == event_numbers and bool(event_numbers),
    )
