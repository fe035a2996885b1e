"""Writes and reads the audit, which records who did what. Each tenant has a chain of rows, linked by their hashes.

Call `record` in the transaction of the act. PostgreSQL then commits both the act and its row, or neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from leasehold.db.database import Connection
from leasehold.domain.audit import SHARED_CHAIN, Actor, BrokenRow, Chain
from leasehold.domain.ids import new_id

_RECORD = """
-- audit_record
INSERT INTO audit (id, tenant_id, actor_kind, actor, actor_tenant, key_prefix, action, target_kind, target, source_ip,
                   request_id, details)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
"""
#: With these options the same details always give the same text. A row's hash covers that text.
_JSON_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_UTC_Z
#: One statement reads at most this many rows of a chain.
_ROWS_PER_READ = 1000


@dataclass(frozen=True, slots=True)
class Target:
    """The object of an act. `kind`: job, key, queue, limit, ... `tenant_id`: the object's tenant; SHARED_CHAIN (`*`) if
    several tenants share the object, or no tenant owns it.
    """

    kind: str
    id: str
    tenant_id: str = SHARED_CHAIN


def details_text(details: Mapping[str, Any]) -> str:
    """The text of `details` that a row stores and its hash covers. An export gives the same text again."""
    return orjson.dumps(details, default=_text_of_uuid, option=_JSON_OPTIONS).decode()


def _text_of_uuid(value: object) -> str:
    if isinstance(value, UUID):  # asyncpg's UUIDs are of a subclass of UUID, which orjson does not encode
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


async def record(connection: Connection, actor: Actor, action: str, target: Target, **details: Any) -> None:
    """Add the row of an act, in the transaction of the act. `details`: never a secret, a payload or a file name. A
    detail that is None is left out.

    All rows of one transaction must be in one tenant's chain, because each row locks its chain. Otherwise two
    transactions that write to the same two chains in opposite order could deadlock.
    """
    details_with_values = {name: value for name, value in details.items() if value is not None}
    await connection.execute(
        _RECORD, new_id(), target.tenant_id, actor.kind, actor.name, actor.tenant_id, actor.key_prefix, action,
        target.kind, target.id, actor.source_ip, actor.request_id,
        details_text(details_with_values),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which rows to read. `tenant_id`: rows of this tenant's chain; None: of all chains. `since`, `until`: rows with
    since <= at < until. A field that is None excludes nothing.
    """

    tenant_id: str | None
    actor: str | None = None
    action: str | None = None
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None


_COLUMNS = """id, at, tenant_id, actor_kind, actor, actor_tenant, key_prefix, action, target_kind, target, source_ip,
       request_id, details, seq, encode(previous, 'hex') AS previous, encode(hash, 'hex') AS hash"""


async def page(
    connection: Connection, audit_filter: AuditFilter, before: tuple[datetime, UUID] | None, limit: int
) -> list[dict[str, Any]]:
    """At most `limit` rows that match, the newest first. `before`: time and id of the previous page's last row."""
    condition, arguments = _condition(audit_filter, before)
    # SAFE: the condition has only literals and the numbers of parameters.
    rows = await connection.fetch(
        f"SELECT {_COLUMNS} FROM audit WHERE {condition} ORDER BY at DESC, id DESC LIMIT ${len(arguments) + 1}",
        *arguments,
        limit,
    )
    return [dict(row) for row in rows]


def _condition(audit_filter: AuditFilter, before: tuple[datetime, UUID] | None) -> tuple[str, list[Any]]:
    """The SQL condition of a page, and the values of its parameters. In a term, each `{}` stands for a parameter. Terms
    without values are left out.
    """
    terms: list[tuple[str, tuple[Any, ...]]] = [
        ("tenant_id = {}", (audit_filter.tenant_id,)),
        ("actor = {}", (audit_filter.actor,)),
        ("action = {}", (audit_filter.action,)),
        ("target = {}", (audit_filter.target,)),
        ("at >= {}", (audit_filter.since,)),
        ("at < {}", (audit_filter.until,)),
        ("(at, id) < ({}, {})", before or (None, None)),
    ]
    conditions, arguments = ["true"], list[Any]()
    for term, values in terms:
        if any(value is not None for value in values):
            first_parameter = len(arguments) + 1
            conditions.append(term.format(*(f"${first_parameter + i}" for i in range(len(values)))))
            arguments.extend(values)
    return " AND ".join(conditions), arguments


# Reads a part of a chain. $1: the tenant. $2: the number of the last row before the part. $3: the number of the chain's
# last row to read; the LIMIT may end the part earlier.
_PART_OF_CHAIN = f"""
-- audit_piece
SELECT {_COLUMNS} FROM audit WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 ORDER BY seq LIMIT {_ROWS_PER_READ}
"""

# $1: the tenant; NULL: all tenants.
_HEADS = """
-- audit_heads
SELECT tenant_id, seq, encode(hash, 'hex') AS hash, first_seq, encode(first_previous, 'hex') AS first_previous
FROM audit_chain WHERE $1::text IS NULL OR tenant_id = $1 ORDER BY tenant_id
"""


async def heads(connection: Connection, tenant_id: str | None = None) -> list[dict[str, Any]]:
    """The head of each chain: the number (`seq`) and the hash of its last row. `first_seq`: the number of its first
    row. `first_previous`: the hash of the row before the first row. An operator may keep the heads outside of the
    database, and later call `verify` with an old head. The result shows whether somebody has changed or deleted rows up
    to that head.
    """
    return [dict(row) for row in await connection.fetch(_HEADS, tenant_id)]


async def read_part(connection: Connection, head: Mapping[str, Any], after: int) -> list[dict[str, Any]]:
    """At most _ROWS_PER_READ rows of a chain, the oldest first: those with numbers above `after`, up to the head."""
    rows = await connection.fetch(_PART_OF_CHAIN, head["tenant_id"], after, head["seq"])
    return [dict(row) for row in rows]


async def verify(connection: Connection, head: Mapping[str, Any]) -> BrokenRow | None:
    """Recompute the hashes of a chain up to the head. Returns the first row that was changed or is missing; None: the
    chain is intact. Rows that retention has deleted since `head` was read are not missing.
    """
    return await _check(connection, head, Chain.from_head(head))


async def verify_newest(connection: Connection, head: Mapping[str, Any], at_most: int) -> BrokenRow | None:
    """Do the same as `verify`, but check only the newest `at_most` rows. Each row has the hash of the row before it. In
    the first of the checked rows, this hash is not checked, because the row before it is not read.
    """
    after = head["seq"] - at_most  # the number of the row before the first that is checked
    if after < head["first_seq"]:
        return await verify(connection, head)
    first_rows = await read_part(connection, {**head, "seq": after + 1}, after)  # one row, or none if it is missing
    previous = first_rows[0]["previous"] if first_rows else ""  # the check below reports a missing row
    return await _check(connection, head, Chain(head["tenant_id"], after, previous))


async def _check(connection: Connection, head: Mapping[str, Any], chain: Chain) -> BrokenRow | None:
    # Check the rows after `chain`, one part after the other, up to the head. If rows are missing because retention has
    # deleted them meanwhile, go on at the oldest row that is left.
    while chain.seq < head["seq"]:
        rows = await read_part(connection, head, chain.seq)
        if not rows or rows[0]["seq"] > chain.seq + 1:
            beginning = await _new_beginning(connection, chain)
            if beginning is None:
                return chain.check(rows[0]) if rows else chain.check_end(head)
            if beginning.seq > head["seq"]:
                return None  # retention has deleted all rows up to the head
            chain = beginning
            continue
        for row in rows:
            broken_row = chain.check(row)
            if broken_row is not None:
                return broken_row
    return chain.check_end(head)


async def _new_beginning(connection: Connection, chain: Chain) -> Chain | None:
    """If retention has deleted the next row to check, return a Chain that goes on at the oldest row that is left.
    Returns None if retention has not deleted the row, because then the row is missing.

    The table `audit_chain` has the beginning of each chain. Only `forget_audit` and the owner of the schema can change
    this beginning, and `forget_audit` deletes no row of the last 30 days.
    """
    for head in await heads(connection, chain.tenant_id):
        if head["first_seq"] > chain.seq + 1:
            return Chain.from_head(head)
    return None


async def forget(connection: Connection, days: int, at_most: int = 5000) -> bool:
    """Delete rows that are older than `days`. The database's function `forget_audit` finds the oldest `at_most` such
    rows of all chains. In each chain that has one of these rows, it deletes at most `at_most` rows. So in sum it may
    delete more than `at_most` rows. Returns whether more rows may have to be deleted.
    """
    deleted: int = await connection.fetchval("SELECT forget_audit($1, $2)", days, at_most)
    return deleted >= at_most


def as_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in the form of the API's answers and of exports: `details` is an object instead of JSON text."""
    return {**row, "details": orjson.loads(row["details"])}
