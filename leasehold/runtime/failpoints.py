"""Named points where a test may make a process die, stop, hang or fail: `LEASEHOLD_FAILPOINTS=name:act[:n],...`.

`act` is kill (SIGKILL to itself), stop (SIGSTOP: a zombie once it goes on), sleep (blocks the thread for a minute) or
raise; it happens the `n`-th time the point is reached (1 unless said), once. Unset, a point costs one comparison.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass

from leasehold.domain.errors import DeclarationError, LeaseholdError

#: Every point there is, and where it lies.
POINTS = {
    "after_hint": "worker: a hint arrived, nothing was claimed",
    "after_claim": "worker: the claim is committed",
    "after_intent": "worker: the intent to buy a generation is committed, nothing is ordered",
    "after_purchase": "worker: the provider took the order, nothing is committed",
    "after_download": "worker: the inputs are on disk",
    "mid_process": "worker: the child was given the work",
    "mid_upload": "worker: some outputs are stored, the primary is not",
    "after_upload": "worker: all outputs are stored, nothing is committed",
    "after_commit": "worker: the settlement is committed, the hint not acknowledged",
    "before_relay": "relay: rows are taken, nothing is published",
    "after_publish": "announcer: the broker confirmed, the rows are still there",
    "after_submit": "API: the job is committed, the client not answered",
}
_ACTS = ("kill", "stop", "sleep", "raise")
_SLEEP_SECONDS = 60.0
_MOMENT_SECONDS = 0.02


class FailpointReached(LeaseholdError):
    """What an armed `raise` raises."""


@dataclass
class _Armed:
    act: str
    countdown: int


_armed: dict[str, _Armed] = {}


def arm(spec: str) -> None:
    """Replace what is armed by `spec`. Raises DeclarationError for a point or an act that does not exist."""
    _armed.clear()
    for part in filter(None, (item.strip() for item in spec.split(","))):
        name, _, rest = part.partition(":")
        act, _, count = rest.partition(":")
        if name not in POINTS or act not in _ACTS or not (count or "1").isdigit():
            raise DeclarationError(
                f"no such failpoint: {part!r}; name one of {', '.join(POINTS)} and {', '.join(_ACTS)}"
            )
        _armed[name] = _Armed(act, int(count or "1"))


def reach(name: str) -> None:
    """This code reached point `name`."""
    if _armed:
        _reach(name)


def reach_during(name: str) -> None:
    """Point `name` lies in the middle of what this coroutine now waits for: reach it in a moment."""
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
        case _:
            raise FailpointReached(name)
