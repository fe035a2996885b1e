"""Checks the types of the options that the user's program sets. If the program is not checked by a type checker,
nothing else checks these types before the options are used.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeGuard

from leasehold.domain.errors import DeclarationError
from leasehold.domain.sentences import with_article


def is_whole(value: object) -> TypeGuard[int]:
    """Whether the value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def time_sentence(name: str, value: object) -> str:
    """The error's sentence about a value that is not a timedelta. `name`: the option's name, perhaps after the name of
    its owner, as in `Retry.delay` or `step resize: timeout`.
    """
    seconds = value if is_whole(value) or isinstance(value, float) else 60
    option = name.rpartition(".")[2].rpartition(" ")[2]
    return f"{name} is a timedelta, not {value!r}: write {option}=timedelta(seconds={seconds})"


def check_time(name: str, value: object) -> None:
    """Raises DeclarationError unless the value is a timedelta. `name`: as for `time_sentence`."""
    if not isinstance(value, timedelta):
        raise DeclarationError(time_sentence(name, value))


def check_whole(name: str, value: object) -> None:
    """Raises DeclarationError if the value is not an int, or is a bool."""
    if not is_whole(value):
        raise DeclarationError(f"{name} is a whole number, not {value!r}")


def check_text(name: str, value: object, example: str) -> None:
    """Raises DeclarationError unless the value is a str. `example`: a value that the program might write instead."""
    if not isinstance(value, str):
        text = str(value) if is_whole(value) else example
        raise DeclarationError(f"{name} is a str, not {value!r}: write {name}={text!r}")


def check_kind(name: str, value: object, kind: type, example: str) -> None:
    """Raises DeclarationError unless the value is a `kind`. `example`: code that the program might write instead."""
    if not isinstance(value, kind):
        raise DeclarationError(f"{name} is {with_article(kind.__name__)}, not {value!r}: write {name}={example}")
