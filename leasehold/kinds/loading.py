"""Loads the hooks that a kind of work names by their paths."""

from __future__ import annotations

import importlib
from typing import Any

from leasehold.domain.errors import DeclarationError


def load(path: str) -> Any:
    """The attribute at `path` ("module:attribute"). Raises DeclarationError if it cannot be loaded."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(f"cannot load {path!r}, which a kind of work names: {error}") from error
