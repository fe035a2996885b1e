"""Finding what a hook of a declaration names."""

from __future__ import annotations

import importlib
from typing import Any

from leasehold.domain.errors import DeclarationError


def load(path: str) -> Any:
    """What `path` ("module:attribute") names. Raises DeclarationError when there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(f"cannot load {path!r}, which a kind of work names: {error}") from error
