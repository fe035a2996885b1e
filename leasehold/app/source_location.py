"""Finds the file and line of a function, with which every DeclarationError of an app begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Any

from leasehold.domain.errors import DeclarationError


def location_of(function: Callable[..., Any]) -> str:
    """`file:line` of the function; the file is relative to the current folder if it lies there. For an object without
    Python code, such as a class: its module and name.
    """
    code = getattr(unwrap(function), "__code__", None)
    if code is None:
        return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    return _location(code.co_filename, code.co_firstlineno)


def location_of_caller(frame: FrameType | None) -> str:
    """`file:line` of the frame's caller."""
    caller = None if frame is None else frame.f_back
    return "?" if caller is None else _location(caller.f_code.co_filename, caller.f_lineno)


def _location(file: str, line: int) -> str:
    path = Path(file)
    return f"{os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path}:{line}"


def declaration_error(function: Callable[..., Any], sentence: str) -> DeclarationError:
    """The error for a function that is declared wrongly."""
    return DeclarationError(f"{location_of(function)}: {sentence}")
