"""Lists the database schemas of an installation: the platform's, and those of kinds of work that have their own tables
and migrations. `leasehold migrate`, `/readyz` and the self-check use this list.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from leasehold.db.schemas import CORE, Schema
from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind


def schemas_of(kinds: Iterable[Kind]) -> tuple[Schema, ...]:
    """The platform's schema, then the schemas of `kinds`. The order matters: tables of kinds may refer to tables of the
    platform.

    Raises DeclarationError if a package of migrations does not exist.
    """
    return (CORE, *(_schema(kind.name, kind.migrations) for kind in kinds if kind.migrations is not None))


def _schema(name: str, package: str) -> Schema:
    try:
        spec = find_spec(package)
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DeclarationError(f"the kind {name} has its migrations in {package}: there is no such package")
    return Schema(name, Path(spec.submodule_search_locations[0]), f"{CORE.table}_{name}")
