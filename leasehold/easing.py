"""How often something is done that reads all that has gone through since the last vacuum, and so may take long."""

from __future__ import annotations


def pause_after(took: float, *, share: float, least: float, most: float) -> float:
    """Seconds to the next time, for it to be `share` of the time: at least `least`, but never more than `most`."""
    return min(max(least, took / share), most)
