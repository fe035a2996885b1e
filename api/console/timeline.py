"""Makes the timeline of a job for the job's page: for each step, bars for its waits and attempts. The bars are made
from the job's ledger, which records what the workers did with the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from leasehold.api.console.graph import needs_of
from leasehold.db.job_reads import Row
from leasehold.domain.ids import instant_of

#: The width of the whole timeline, and the smallest width of a bar, in units of the drawing.
WIDTH = 1000
_MIN_WIDTH = 3
#: At most this many steps are drawn.
MAX_LINES = 60
#: The kinds of ledger entries that begin an attempt. `taken_over` also ends the previous attempt. An entry `replayed`
#: neither begins nor ends an attempt. It records that the failed job was retried, so its step waits again.
_CLAIMS = frozenset({"claimed", "taken_over"})
#: A kind of ledger entry that ends an attempt -> the CSS class of the attempt's bar, and a word for people.
_ENDS = {
    "completed": ("ok", "succeeded"),
    "fanned_out": ("ok", "fanned out"),
    "failed": ("no", "failed"),
    "retried": ("no", "failed, to be tried again"),
    "lost": ("lost", "lost with its worker"),
    "taken_over": ("lost", "lost with its worker"),
    "released": ("off", "released"),
    "parked": ("ok", "snoozed"),
    "suspended": ("ok", "suspended"),
    "cancelled": ("off", "cancelled"),
}
#: The kinds of ledger entries that end a step while no worker runs it. After such an entry the step does not wait any
#: more.
_STOPS = frozenset({"cancelled", "skipped"})
#: The kinds of ledger entries by which a worker ends its own attempt. _ENDS has three further kinds. Another worker
#: writes `lost` and `taken_over`. The worker itself, another worker or the API writes `cancelled`.
WRITTEN_BY_WORKERS = _ENDS.keys() - {"lost", "taken_over", "cancelled"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One wait or one attempt. `x`, `width`: in units of the drawing, in which the time of the whole job is WIDTH units
    long. `shade`: the CSS class. `words`: the title.
    """

    x: int
    width: int
    shade: str
    words: str


@dataclass(slots=True)
class Line:
    """The line of one step. `seconds`: the time of all its attempts together."""

    step: str
    bars: list[Bar] = field(default_factory=list)
    seconds: float = 0.0
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """`seconds`: the time from the job's creation to its end, or to now. `more`: the number of steps that are not
    drawn.
    """

    lines: Sequence[Line]
    seconds: float
    more: int


class _Scale:
    """Turns times into bars. `start`: when the job was created. `end`: when it ended, or the present time."""

    def __init__(self, start: datetime, end: datetime) -> None:
        self._start = start
        self.seconds = max((end - start).total_seconds(), 0.001)

    def bar(self, start: datetime, end: datetime, shade: str, words: str) -> Bar:
        x = round(WIDTH * max(0.0, (start - self._start).total_seconds()) / self.seconds)
        width = round(WIDTH * max(0.0, (end - start).total_seconds()) / self.seconds)
        width = max(width, _MIN_WIDTH)
        return Bar(min(x, WIDTH - width), width, shade, words)


def timeline(
    job: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    ledger: Sequence[Mapping[str, Any]],
    tasks: Sequence[Row],
    now: datetime,
    *,
    is_cut: bool = False,
) -> Timeline:
    """The bars of all steps. `tasks`: which steps each step needs (`job_reads.step_links`). `is_cut`: the ledger lacks
    earlier entries. The first wait of each step is then unknown, and has no bar.
    """
    ready_at = {} if is_cut else _ready_times(job, steps[:MAX_LINES], ledger, tasks)
    scale = _Scale(job["created_at"], job.get("finished_at") or now)
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in ledger:
        entries.setdefault(entry.get("step", ""), []).append(entry)
    lines = [
        _line(step, entries.get(step["id"], []), ready_at.get(step["id"]), scale, now) for step in steps[:MAX_LINES]
    ]
    return Timeline(lines, scale.seconds, max(0, len(steps) - MAX_LINES))


def _ready_times(
    job: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    ledger: Sequence[Mapping[str, Any]],
    tasks: Sequence[Row],
) -> dict[str, datetime]:
    """When the first wait of each step began. The first wait begins when all steps that the step needs have succeeded.
    A part of a fan-out (one of the tasks into which a step was split), and a step of a workflow, waits from its
    creation on. The result has no time for a step that is still blocked.
    """
    needs = needs_of(tasks)
    created_at = {task["step"]: instant_of(task["id"]) for task in tasks if task["parent_id"] is not None}
    completed_at = {entry.get("step", ""): entry["at"] for entry in ledger if entry["kind"] == "completed"}
    ready_at = {}
    for step in steps:
        name = step["id"]
        needed_steps = needs.get(name, ())
        if name in created_at:
            ready_at[name] = created_at[name]
        elif all(need in completed_at for need in needed_steps):
            ready_at[name] = max((completed_at[need] for need in needed_steps), default=job["created_at"])
    return ready_at


def _line(
    step: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    ready_at: datetime | None,
    scale: _Scale,
    now: datetime,
) -> Line:
    """The bars of one step. `ready_at`: when its first wait began; None: unknown, or the step is still blocked."""
    line = Line(step["id"])
    # The claim of the attempt under way; None: the step waits, or has ended.
    claim: Mapping[str, Any] | None = None
    waits_from = ready_at
    # An entry ends the attempt under way (the step then waits), begins an attempt, or does both. There are two further
    # sorts of entries. `replayed` begins a wait. An entry of _STOPS ends a wait, if no attempt is under way.
    # (`cancelled` is in _ENDS and in _STOPS: it ends the attempt under way or, without one, the wait.)
    for entry in entries:
        ended_claim = claim if entry["kind"] in _ENDS else None
        if ended_claim is not None:
            shade, word = _ENDS[entry["kind"]]
            _add_attempt(line, scale, ended_claim, entry["at"], shade, word)
            claim, waits_from = None, entry["at"]
        if entry["kind"] in _CLAIMS:
            # A takeover ends an attempt and begins the next at the same instant, so the step has not waited.
            if waits_from is not None and entry["kind"] != "taken_over":
                line.bars.append(scale.bar(waits_from, entry["at"], "wait", "waited"))
            claim = entry
        elif entry["kind"] == "replayed":
            waits_from = entry["at"]
        elif entry["kind"] in _STOPS and ended_claim is None:
            if waits_from is not None:
                line.bars.append(scale.bar(waits_from, entry["at"], "wait", f"waited until it was {entry['kind']}"))
            waits_from = None
    if claim is not None and step["state"] == "running":
        _add_attempt(line, scale, claim, now, "run", "running")
    elif claim is None and waits_from is not None and step["state"] in ("pending", "retry", "waiting"):
        line.bars.append(scale.bar(waits_from, now, "wait", "waits"))
    return line


def _add_attempt(line: Line, scale: _Scale, claim: Mapping[str, Any], end: datetime, shade: str, word: str) -> None:
    line.attempts += 1
    line.seconds += max(0.0, (end - claim["at"]).total_seconds())
    worker = f", worker {claim['worker']}" if "worker" in claim else ""
    words = f"attempt {line.attempts} {word}: epoch {claim.get('epoch')}{worker}"
    line.bars.append(scale.bar(claim["at"], end, shade, words))
