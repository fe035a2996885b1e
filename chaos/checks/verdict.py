"""What a check says: one `Seen` for each thing that it looked at. So no verdict is good because nothing was there."""

from __future__ import annotations

from typing import NamedTuple


class Seen(NamedTuple):
    """One observation. `what`: the kind of thing that was looked at (checks/floors.py says how many a run must have).
    `wrong`: the evidence of a violation, as a sentence; "" when the thing is as it should be.
    """

    what: str
    wrong: str = ""


def seen(what: str, wrong: str, *, good: bool) -> Seen:
    """As `Seen`: `wrong` counts unless the thing is good."""
    return Seen(what, "" if good else wrong)


class NotApplicable(Exception):
    """The plan has nothing that the invariant is about; the message says why. Never for a history without it."""
