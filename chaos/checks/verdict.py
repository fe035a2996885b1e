"""The result of a check: one `Observation` for each thing that the check compared. A check without observations proves
nothing: its verdict is not `ok`.
"""

from __future__ import annotations

from typing import NamedTuple


class Observation(NamedTuple):
    """`what`: the kind of the thing that was compared (checks/floors.py: how many of a kind a run must have). `wrong`:
    the evidence of a violation, as a sentence; "" if the thing is right.
    """

    what: str
    wrong: str = ""


def observed(what: str, wrong: str, *, good: bool) -> Observation:
    """The observation of a thing. `wrong`: the evidence against it, which counts only if the thing is not good."""
    return Observation(what, "" if good else wrong)


class NotApplicable(Exception):
    """The run cannot have the things that the invariant is about; the message says why. A check does not raise this
    because such things are missing from the history: then the verdict is `not observed`.
    """
