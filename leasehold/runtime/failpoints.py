"""Failpoints: named points in the code where a test makes the process die, stop, hang or fail.

The setting is `LEASEHOLD_FAILPOINTS=name:act[:n],...`.
- `name` is one of POINTS, or `commit.NAME`. NAME is an API operation such as `createRun`, or the name of a connection
  to PostgreSQL. Each commit of that operation or connection reaches the point (leasehold/db/commit_points.py).
- `act` is kill (the process sends itself SIGKILL), stop (SIGSTOP; if the process stays stopped for long, it loses its
  leases), sleep (blocks the thread for a minute) or raise (raises FailpointReached).
- The act happens once, when the process reaches the point for the `n`-th time (the first time without `n`).

Without the setting a point costs one comparison.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass

from leasehold.domain.errors import DeclarationError, LeaseholdError

#: Point -> the part of the platform that reaches the point, and what has and has not happened by then. A hint is a
#: message that names a task. Each hint has a row in the outbox until the broker has confirmed the hint. The announcer
#: publishes hints right after the commit that wrote them. The relay publishes the hints that the announcer left.
POINTS = {
    "after_hint": "worker: a hint arrived, nothing was claimed for it yet",
    "after_claim": "worker: the claim is committed",
    "after_intent": "worker: the intent to buy a generation is committed, nothing is ordered",
    "after_purchase": "worker: the provider took the order, nothing is committed",
    "after_download": "worker: the inputs are on disk",
    "mid_process": "worker: the child was given the work",
    "mid_upload": "worker: some outputs are stored, the primary output is not",
    "after_upload": "worker: all outputs are stored, nothing is committed",
    "after_commit": "worker: the settlement is committed, the hint not acknowledged",
    "mid_batch": "worker: a batch of a bulk operation has acted on its jobs, nothing of that is committed",
    "after_batch": "worker: the batch and the note about it are committed, the next one is not begun",
    "before_relay": "relay: rows are taken, nothing is published",
    "after_publish": "announcer: the broker confirmed, the rows are still there",
}
#: The prefix of the points after commits.
COMMIT = "commit."
_COMMIT_POINT = re.compile(r"commit\.[A-Za-z_]+")
_COUNT = r"[1-9][0-9]*"  # the `n` of a setting
_ACTS = ("kill", "stop", "sleep", "raise")
_SLEEP_SECONDS = 60.0
_MOMENT_SECONDS = 0.02  # the delay of `reach_during`


class FailpointReached(LeaseholdError):
    """The error of the act `raise`."""


@dataclass
class _Armed:
    """An armed failpoint. It acts when the process has reached it `countdown` more times."""

    act: str
    countdown: int


#: The name of a point -> its armed failpoint.
_armed: dict[str, _Armed] = {}


def arm(spec: str) -> None:
    """Arm the failpoints of `spec`, and no others. Raises DeclarationError for an unknown point or act."""
    armed: dict[str, _Armed] = {}
    for part in filter(None, (item.strip() for item in spec.split(","))):
        name, _, act_and_count = part.partition(":")
        act, _, count = act_and_count.partition(":")
        if not _exists(name) or act not in _ACTS or not re.fullmatch(_COUNT, count or "1"):
            raise _unknown(part)
        armed[name] = _Armed(act, int(count or "1"))
    _armed.clear()
    _armed.update(armed)


def check(point: str) -> None:
    """Check that the point exists, and arm nothing. Raises DeclarationError for an unknown point."""
    if not _exists(point):
        raise _unknown(point)


def _exists(point: str) -> bool:
    return point in POINTS or _COMMIT_POINT.fullmatch(point) is not None


def _unknown(part: str) -> DeclarationError:
    return DeclarationError(
        f"no such failpoint: {part!r}; points are {', '.join(POINTS)}, {COMMIT}NAME; acts are {', '.join(_ACTS)}"
    )


def has_commit_points() -> bool:
    """Whether a failpoint `commit.NAME` is armed."""
    return any(name.startswith(COMMIT) for name in _armed)


def reach(name: str) -> None:
    """Let the failpoint `name` act, if it is armed. The code calls this at each point."""
    if _armed:
        _reach(name)


def reach_during(name: str) -> None:
    """Do the same as `reach`, but a moment later, in the middle of the operation that the caller awaits next. With the
    act `raise`, the error does not reach the caller, because the event loop only logs it.
    """
    if _armed:
        asyncio.get_running_loop().call_later(_MOMENT_SECONDS, _reach, name)


def _reach(name: str) -> None:
    armed = _armed.get(name)
    if armed is None:
        return
    armed.countdown -= 1
    if armed.countdown:
        return
    match armed.act:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(_SLEEP_SECONDS)
        case _:  # "raise"
            raise FailpointReached(name)
