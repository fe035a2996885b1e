"""Finds the file and line of a function, or of the code that calls it. The text of every DeclarationError of an app
begins with this file and line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import currentframe, unwrap
from pathlib import Path
from types import FrameType
from typing import Any

from leasehold.domain.errors import DeclarationError

#: The name of the platform's package.
_PLATFORM = __name__.partition(".")[0]


def location_of(function: Callable[..., Any]) -> str:
    """The function's `file:line`. The file is relative to the current folder if it lies there. An object without Python
    code, such as a class, gets its module and name instead.
    """
    code = getattr(unwrap(function), "__code__", None)
    if code is None:
        return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    return _location(code.co_filename, code.co_firstlineno)


def location_of_caller(frame: FrameType | None) -> str:
    """The `file:line` of the code that called the frame's function."""
    caller = None if frame is None else frame.f_back
    return "?" if caller is None else _location(caller.f_code.co_filename, caller.f_lineno)


def module_of_caller(frame: FrameType | None) -> str:
    """The name of the module whose code called the frame's function."""
    caller = None if frame is None else frame.f_back
    return "" if caller is None else str(caller.f_globals.get("__name__", ""))


@contextmanager
def declared_at(function: Callable[..., Any]) -> Iterator[None]:
    """`with declared_at(function):` puts the function's file and line before the text of each DeclarationError."""
    try:
        yield
    except DeclarationError as error:
        raise declaration_error(function, str(error)) from error


class PlaceOfCaller:
    """`with PlaceOfCaller():` puts the file and line of the user's code before the text of each DeclarationError. The
    line is that of the innermost frame outside of the platform's package.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, DeclarationError):
            frame = currentframe()
            while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PLATFORM:
                frame = frame.f_back
            place = "?" if frame is None else _location(frame.f_code.co_filename, frame.f_lineno)
            raise DeclarationError(f"{place}: {error}") from None


def _location(file: str, line: int) -> str:
    path = Path(file)
    return f"{os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path}:{line}"


def declaration_error(function: Callable[..., Any], sentence: str) -> DeclarationError:
    """The error for a function that is declared wrongly. Its text begins with the function's file and line."""
    return DeclarationError(f"{location_of(function)}: {sentence}")
