"""The statements of `leasehold.transitions` by name, in the final text that PostgreSQL receives. `leasehold sql` prints
them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

import leasehold.transitions as room

#: The first line of a named statement. Group 1 is the name.
_NAME = re.compile(r"\s*-- ([a-z_]+)\n")


def statements() -> dict[str, str]:
    """Every named statement in the modules of this package (`room`), sorted by name. The first line of a named
    statement is `-- name`.
    """
    texts: dict[str, str] = {}
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, str) and (name := _NAME.match(value)):
                texts[name[1]] = value.strip() + "\n"
    return dict(sorted(texts.items()))
