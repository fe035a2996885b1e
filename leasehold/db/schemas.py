"""Reads the Alembic revision of a database, and whether the database is behind this release, for `/readyz` and the
self-check.

Here a schema is a set of tables with its own revisions, not a namespace of PostgreSQL. A database has the platform's
schema, and a schema for each kind of work that has its own tables. Each schema has a table of its own that stores the
current revision. The revisions are parsed from their files, because importing alembic would cost every API process ten
megabytes.
"""

from __future__ import annotations

import ast
import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

import leasehold
from leasehold.db.database import Connection
from leasehold.domain.errors import DeclarationError


@dataclass(frozen=True, slots=True)
class Schema:
    """The migrations of one schema. `versions`: the folder of the Alembic revisions. `table`: the table that stores the
    current revision.
    """

    name: str
    versions: Path
    table: str


#: The platform's own schema.
CORE = Schema("leasehold", Path(leasehold.__file__).parent / "migrations" / "versions", "alembic_version")


@dataclass(frozen=True, slots=True)
class Revisions:
    """All revisions of a schema, and the newest."""

    all: frozenset[str]
    head: str


@dataclass(frozen=True, slots=True)
class SchemaState:
    """`revision`: the revision of a schema in a database; None before the first migration. `head`: the newest revision
    in this release. `behind`: `leasehold migrate` must run. `newer`: a newer release has migrated the schema.
    """

    revision: str | None
    behind: bool
    newer: bool
    head: str


async def state_of(connection: Connection, schema: Schema) -> SchemaState:
    """The state of the schema in a database. A revision that this release does not know counts as newer. A later
    release may migrate while processes of this release still run.
    """
    revisions = await asyncio.to_thread(known_revisions, schema.versions)
    revision: str | None = None
    if await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", schema.table):
        revision = await connection.fetchval(f"SELECT version_num FROM {schema.table}")
    is_older = revision in revisions.all and revision != revisions.head
    is_newer = revision is not None and revision not in revisions.all
    return SchemaState(revision, revision is None or is_older, is_newer, revisions.head)


#: A thread holds this lock while it parses a file. With older releases of Python, `ast.parse` sometimes raises
#: SystemError if two threads parse at the same time (python/cpython#106905). A readiness check would then fail for no
#: reason.
_parse_lock = Lock()


@cache
def known_revisions(folder: Path) -> Revisions:
    """The revisions in the folder. Raises DeclarationError if there is not exactly one newest revision."""
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
    """The module-level constants (`name = constant`). The module is parsed, but not run."""
    constants: dict[str, object] = {}
    text = path.read_text()
    with _parse_lock:
        body = ast.parse(text).body
    for node in body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        constants |= {target.id: node.value.value for target in targets if isinstance(target, ast.Name)}
    return constants
