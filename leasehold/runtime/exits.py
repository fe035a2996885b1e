"""Describes how a child process ended, for error messages."""

from __future__ import annotations

import signal


def describe_exit(status: int) -> str:
    """How a process ended. `status`: its exit status, or the negative number of the signal that killed it."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-status}"
