"""Makes the plan that `leasehold migrate --plan` shows: each pending revision, its statements, and which reads and
writes must wait for the locks of the statements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from leasehold.db.database import Connection
from leasehold.db.schemas import Schema, state_of
from leasehold.db.upgrading.locks import Effect, ForeignKey, SchemaTables
from leasehold.db.upgrading.rendering import Rendered, render

#: SQL: the indexes that the connection sees, except PostgreSQL's own. Each row has the index's table, and whether the
#: index is valid.
_INDEXES = """
SELECT i.relname AS name, t.relname AS "table", x.indisvalid AS valid
FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
WHERE pg_table_is_visible(i.oid) AND t.relnamespace NOT IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace)
"""
#: SQL: the tables that the connection sees. `parent`: the table of which this table is a partition, or NULL.
_TABLES = """
SELECT c.relname AS name, p.relname AS parent, greatest(c.reltuples, 0)::bigint AS rows,
    pg_total_relation_size(c.oid) AS bytes
FROM pg_class c LEFT JOIN pg_inherits h ON h.inhrelid = c.oid LEFT JOIN pg_class p ON p.oid = h.inhparent
WHERE c.relkind IN ('r', 'p') AND pg_table_is_visible(c.oid) AND c.relnamespace <> 'pg_catalog'::regnamespace
ORDER BY 1
"""
#: SQL: the foreign keys, each with its table, its columns and the table to which it refers (`other`).
_FOREIGN_KEYS = """
SELECT t.relname AS "table", k.conname AS name, other.relname AS other,
    ARRAY(SELECT a.attname FROM pg_attribute a WHERE a.attrelid = t.oid AND a.attnum = ANY(k.conkey)) AS columns
FROM pg_constraint k JOIN pg_class t ON t.oid = k.conrelid JOIN pg_class other ON other.oid = k.confrelid
WHERE k.contype = 'f' AND k.conparentid = 0 AND pg_table_is_visible(t.oid)
"""


@dataclass(frozen=True, slots=True)
class PlannedStatement:
    """A statement of a revision. PostgreSQL holds the statement's locks until the end of the transaction.
    `scanned_under_locks`: the tables that this statement, or a later statement of the transaction, scans or rewrites
    while the locks are held.
    """

    statement: str
    effect: Effect
    scanned_under_locks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a table, as PostgreSQL last estimated it."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlannedRevision:
    """A pending revision. `narrows`: why older code may fail after the revision; empty if the revision only adds.
    `beside_old_code`: what the revision's docstring says about older code that still runs. `transactions`: the
    revision's statements, by transaction.
    """

    schema: str
    revision: str
    title: str
    beside_old_code: str
    transactions: tuple[tuple[PlannedStatement, ...], ...]

    @property
    def statements(self) -> Iterator[PlannedStatement]:
        return (statement for transaction in self.transactions for statement in transaction)

    @property
    def narrows(self) -> tuple[str, ...]:
        return tuple(planned.effect.narrows for planned in self.statements if planned.effect.narrows)

    @property
    def phase(self) -> str:
        """`expand`: the previous release's code still works after the revision. `contract`: that code may fail."""
        return "contract" if self.narrows else "expand"


@dataclass(frozen=True, slots=True)
class Plan:
    """The pending revisions of all schemas, and the size of each table by its name."""

    revisions: tuple[PlannedRevision, ...]
    sizes: dict[str, Size]


async def plan_of(connection: Connection, schemas: Sequence[Schema], target: str = "head") -> Plan:
    """Make the plan for a database, without writing to it. `target`: a revision of the first schema (the platform's),
    or `head`, which means the newest revisions of all schemas. With `head`, a schema that a newer release has migrated
    is left out. Raises alembic's CommandError for an unknown revision.
    """
    indexes = await connection.fetch(_INDEXES)
    tables = await connection.fetch(_TABLES)
    schema_tables = await tables_of(connection)
    validity_by_index = {row["name"]: row["valid"] for row in indexes}
    planned_revisions: list[PlannedRevision] = []
    for number, schema in enumerate(schemas):
        is_platform = number == 0
        # Any target other than `head` is a revision of the platform's schema alone.
        if not is_platform and target != "head":
            break
        state = await state_of(connection, schema)
        if state.newer and target == "head":
            continue
        folder: Path | None = None if is_platform else schema.versions
        pending = render(state.revision, target, versions=folder, indexes=validity_by_index)
        planned_revisions.extend(_plan_revision(schema.name, rendered, schema_tables) for rendered in pending)
    return Plan(tuple(planned_revisions), {row["name"]: Size(row["rows"], row["bytes"]) for row in tables})


async def tables_of(connection: Connection) -> SchemaTables:
    """The tables of the database, with their indexes, partitions and foreign keys, for the rules of locks.py."""
    indexes = await connection.fetch(_INDEXES)
    foreign_keys = [
        ForeignKey(row["table"], row["name"], frozenset(row["columns"]), row["other"])
        for row in await connection.fetch(_FOREIGN_KEYS)
    ]
    return SchemaTables(
        {row["name"]: row["table"] for row in indexes}, _partitions(await connection.fetch(_TABLES)), foreign_keys
    )


def _partitions(tables: Sequence[asyncpg.Record]) -> dict[str, list[str]]:
    """{partitioned table: its partitions}."""
    partitions: dict[str, list[str]] = {}
    for row in tables:
        if row["parent"] is not None:
            partitions.setdefault(row["parent"], []).append(row["name"])
    return partitions


def _plan_revision(schema: str, rendered: Rendered, schema_tables: SchemaTables) -> PlannedRevision:
    schema_tables.begin_revision()
    transactions = tuple(_plan_transaction(statements, schema_tables) for statements in rendered.transactions)
    return PlannedRevision(schema, rendered.revision, rendered.title, rendered.beside_old_code, transactions)


def _plan_transaction(statements: Sequence[str], schema_tables: SchemaTables) -> tuple[PlannedStatement, ...]:
    effects = [schema_tables.apply(statement) for statement in statements]
    planned_statements = []
    for number, statement in enumerate(statements):
        tables = [lock.table for effect in effects[number:] for lock in effect.locks if lock.work]
        planned_statements.append(PlannedStatement(statement, effects[number], tuple(dict.fromkeys(tables))))
    return tuple(planned_statements)
