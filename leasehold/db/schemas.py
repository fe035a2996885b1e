"""The schemas that a database may hold: the platform's, and one of each kind of work that brings tables of its own.

Each has its own revisions and its own table that says at which one it is, so that neither the platform nor another kind
needs to know of them. Revisions are read from their files: importing alembic would cost every API process ten megabytes
for two strings a file.
"""

from __future__ import annotations

import ast
import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import leasehold
from leasehold.db.database import Connection
from leasehold.domain.errors import DeclarationError


@dataclass(frozen=True, slots=True)
class Schema:
    """`versions`: the folder of its Alembic revisions. `table`: where the database says at which one it is."""

    name: str
    versions: Path
    table: str


CORE = Schema("leasehold", Path(leasehold.__file__).parent / "migrations" / "versions", "alembic_version")


@dataclass(frozen=True, slots=True)
class Revisions:
    all: frozenset[str]
    head: str


@dataclass(frozen=True, slots=True)
class State:
    """`found`: the database's revision; None before the first. `behind`: `leasehold migrate` has to be run."""

    found: str | None
    behind: bool
    head: str


async def state_of(connection: Connection, schema: Schema) -> State:
    """A revision that this release does not know is a newer one's: schemas are widened before the code follows."""
    revisions = await asyncio.to_thread(known_revisions, schema.versions)
    found: str | None = None
    if await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", schema.table):
        found = await connection.fetchval(f"SELECT version_num FROM {schema.table}")
    return State(found, found is None or (found in revisions.all and found != revisions.head), revisions.head)


@cache
def known_revisions(folder: Path) -> Revisions:
    """Raises DeclarationError unless exactly one revision is nobody's predecessor."""
    parents = {}
    for path in folder.glob("*.py"):
        values = _constants(path)
        if isinstance(values.get("revision"), str):
            parents[str(values["revision"])] = values.get("down_revision")
    heads = set(parents) - {str(parent) for parent in parents.values()}
    if len(heads) != 1:
        raise DeclarationError(f"the migrations in {folder} have {len(heads)} heads: {sorted(heads)}")
    return Revisions(frozenset(parents), heads.pop())


def _constants(path: Path) -> dict[str, object]:
    """The module's plain `name = constant` and `name: type = constant` lines; the module is not run."""
    found: dict[str, object] = {}
    for line in ast.parse(path.read_text()).body:
        if not isinstance(line, ast.Assign | ast.AnnAssign) or not isinstance(line.value, ast.Constant):
            continue
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        found |= {target.id: line.value.value for target in targets if isinstance(target, ast.Name)}
    return found
