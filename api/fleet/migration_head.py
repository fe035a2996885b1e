"""Which schema revisions this release knows, read from the revisions' files: importing alembic would cost every
API process ten megabytes for two strings a file.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import leasehold
from leasehold.domain.errors import DeclarationError

_VERSIONS = Path(leasehold.__file__).parent / "migrations" / "versions"


@dataclass(frozen=True, slots=True)
class Revisions:
    all: frozenset[str]
    head: str


def known_revisions(folder: Path = _VERSIONS) -> Revisions:
    """Raises DeclarationError unless exactly one revision is nobody's predecessor."""
    parents = {}
    for path in folder.glob("*.py"):
        values = _constants(path)
        if isinstance(values.get("revision"), str):
            parents[str(values["revision"])] = values.get("down_revision")
    heads = set(parents) - {str(parent) for parent in parents.values()}
    if len(heads) != 1:
        raise DeclarationError(f"the migrations have {len(heads)} heads: {sorted(heads)}")
    return Revisions(frozenset(parents), heads.pop())


def _constants(path: Path) -> dict[str, object]:
    """The module's plain `name = constant` lines; the module is not run."""
    return {
        target.id: line.value.value
        for line in ast.parse(path.read_text()).body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
