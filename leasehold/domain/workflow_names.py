"""The names that a workflow gives to its steps, signals, functions and patches."""

from __future__ import annotations

#: Characters in the longest name.
MAX_NAME = 200
#: What `is_name` accepts, as a part of sentences in errors.
NAME_RULE = f"1 to {MAX_NAME} printable characters without # and /"


def is_name(name: str) -> bool:
    """Whether a workflow may give this name. `#` and `/` divide the names of steps (`1.0/deposit#2`)."""
    return 1 <= len(name) <= MAX_NAME and name.isprintable() and not any(sign in name for sign in "#/")
