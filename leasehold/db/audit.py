"""Writes and reads the audit. Call `record` in the transaction of the act: then both are committed, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from leasehold.db.database import Connection
from leasehold.domain.audit import SHARED_CHAIN, Actor, Broken, Chain
from leasehold.domain.ids import new_id

_RECORD = """
-- audit_record
INSERT INTO audit (id, tenant_id, actor_kind, actor, actor_tenant, key_prefix, action, target_kind, target, source_ip,
                   request_id, details)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
"""
_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_UTC_Z
#: The most rows of a chain that one statement reads.
_PIECE = 1000


@dataclass(frozen=True, slots=True)
class Target:
    """The object of an act. `kind`: job, key, queue, limit, ... `tenant_id`: its tenant; `*`: it belongs to no tenant
    alone.
    """

    kind: str
    id: str
    tenant_id: str = SHARED_CHAIN


def text_of(details: Mapping[str, Any]) -> str:
    """The text of `details` that a row stores and its hash covers. An export gives the same text again."""
    return orjson.dumps(details, default=_text_of_other, option=_OPTIONS).decode()


def _text_of_other(value: object) -> str:
    if isinstance(value, UUID):  # asyncpg's subclass
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


async def record(connection: Connection, actor: Actor, action: str, target: Target, **details: Any) -> None:
    """Add the row of an act, in the transaction of the act. `details`: never a secret, a payload or a file name.

    One transaction acts for one tenant: two transactions that write to two chains in different order could deadlock.
    """
    present = {name: value for name, value in details.items() if value is not None}
    await connection.execute(
        _RECORD, new_id(), target.tenant_id, actor.kind, actor.name, actor.tenant_id, actor.key_prefix, action,
        target.kind, target.id, actor.source_ip, actor.request_id,
        text_of(present),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """The rows to read: of one tenant's chain, or of all (None), and with `since` <= at < `until`. None: any."""

    tenant_id: str | None
    actor: str | None = None
    action: str | None = None
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None


_COLUMNS = """id, at, tenant_id, actor_kind, actor, actor_tenant, key_prefix, action, target_kind, target, source_ip,
       request_id, details, seq, encode(previous, 'hex') AS previous, encode(hash, 'hex') AS hash"""


async def page(
    connection: Connection, wanted: AuditFilter, before: tuple[datetime, UUID] | None, limit: int
) -> list[dict[str, Any]]:
    """The rows that match, the newest first."""
    arguments: list[Any] = []
    conditions = ["true"]

    def add(condition: str, *values: Any) -> None:
        if all(value is None for value in values):
            return
        arguments.extend(values)
        numbers = range(len(arguments) - len(values) + 1, len(arguments) + 1)
        conditions.append(condition.format(*(f"${number}" for number in numbers)))

    add("tenant_id = {}", wanted.tenant_id)
    add("actor = {}", wanted.actor)
    add("action = {}", wanted.action)
    add("target = {}", wanted.target)
    add("at >= {}", wanted.since)
    add("at < {}", wanted.until)
    add("(at, id) < ({}, {})", *(before or (None, None)))
    arguments.append(limit)
    where = " AND ".join(conditions)
    # SAFE: the conditions are the literals above.
    rows = await connection.fetch(
        f"SELECT {_COLUMNS} FROM audit WHERE {where} ORDER BY at DESC, id DESC LIMIT ${len(arguments)}", *arguments
    )
    return [dict(row) for row in rows]


_PIECE_OF_CHAIN = f"""
-- audit_piece
SELECT {_COLUMNS} FROM audit WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 ORDER BY seq LIMIT {_PIECE}
"""

_HEADS = """
-- audit_heads
SELECT tenant_id, seq, encode(hash, 'hex') AS hash, first_seq, encode(first_previous, 'hex') AS first_previous
FROM audit_chain WHERE $1::text IS NULL OR tenant_id = $1 ORDER BY tenant_id
"""


async def heads(connection: Connection, tenant_id: str | None = None) -> list[dict[str, Any]]:
    """The head of each chain. Keep the heads elsewhere: a later `verify` then shows whether rows up to them were
    deleted.
    """
    return [dict(row) for row in await connection.fetch(_HEADS, tenant_id)]


async def piece(connection: Connection, head: Mapping[str, Any], after: int) -> list[dict[str, Any]]:
    """At most a thousand rows of a chain after the row `after`, up to the head, the oldest first."""
    rows = await connection.fetch(_PIECE_OF_CHAIN, head["tenant_id"], after, head["seq"])
    return [dict(row) for row in rows]


async def verify(connection: Connection, head: Mapping[str, Any]) -> Broken | None:
    """Recompute the hashes of a chain up to the head. Returns the first row that is not as it was written."""
    return await _check(connection, head, Chain.after(head))


async def verify_newest(connection: Connection, head: Mapping[str, Any], at_most: int) -> Broken | None:
    """As `verify`, for the newest `at_most` rows only. The hash before the first of them is taken from that row."""
    after = head["seq"] - at_most
    if after < head["first_seq"]:
        return await verify(connection, head)
    rows = await piece(connection, {**head, "seq": after + 1}, after)
    previous = rows[0]["previous"] if rows else ""  # without the row the check fails at once
    return await _check(connection, head, Chain(head["tenant_id"], after, previous))


async def _check(connection: Connection, head: Mapping[str, Any], chain: Chain) -> Broken | None:
    while rows := await piece(connection, head, chain.seq):
        for row in rows:
            broken = chain.check(row)
            if broken is not None:
                return broken
    return chain.end(head)


async def forget(connection: Connection, days: int, at_most: int = 5000) -> None:
    """Delete rows that are older than `days`, and at most `at_most` of them. Each chain is cut at its beginning."""
    await connection.execute("SELECT forget_audit($1, $2)", days, at_most)


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for answers of the API and for exports: `details` is an object."""
    return {**row, "details": orjson.loads(row["details"])}
