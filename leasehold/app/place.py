"""Finds the file and line of a function, with which every DeclarationError of an app begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from typing import Any

from leasehold.domain.errors import DeclarationError


def place_of(function: Callable[..., Any]) -> str:
    """`file:line` of the function; the file is relative to the current folder if it lies there."""
    code = getattr(unwrap(function), "__code__", None)
    if code is None:
        return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    path = Path(code.co_filename)
    return f"{os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path}:{code.co_firstlineno}"


def declaration_error(function: Callable[..., Any], sentence: str) -> DeclarationError:
    """The error for a function that is declared wrongly."""
    return DeclarationError(f"{place_of(function)}: {sentence}")
