"""The names that a workflow gives to its steps, signals, functions and patches."""

from __future__ import annotations

#: A name has at most this many characters.
MAX_NAME = 200
#: What `is_name` accepts, as a part of sentences in errors.
NAME_RULE = f"1 to {MAX_NAME} printable characters without # and /"


def is_name(name: str) -> bool:
    """Whether a workflow may give this name. A name has no `#` and no `/`, because these separate the parts of a step's
    name, as in `1.0/deposit#2`.
    """
    return 1 <= len(name) <= MAX_NAME and name.isprintable() and not any(sign in name for sign in "#/")
