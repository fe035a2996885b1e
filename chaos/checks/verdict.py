from __future__ import annotations


class NotApplicable(Exception):
    """The history holds nothing that the invariant is about; the message says why."""
