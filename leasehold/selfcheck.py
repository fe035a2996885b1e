"""What the parts we were given can promise: looked at when a worker starts, by `leasehold doctor`, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from leasehold.broker.base import Broker
from leasehold.db.database import Connection, is_direct
from leasehold.db.schemas import CORE, Schema, state_of
from leasehold.domain.errors import StoreError
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

OLDEST_POSTGRES = 150_000


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok` False: a promise does not hold until somebody acts. `meaning`: what it is worth to the promises."""

    part: str
    ok: bool
    found: str
    meaning: str


async def check_database(
    connection: Connection, settings: Settings, schemas: Sequence[Schema] = (CORE,)
) -> list[Finding]:
    """Its version, whether it takes writes and keeps them, and whether sessions are our own."""
    row = await connection.fetchrow(
        "SELECT current_setting('server_version_num')::int AS number, current_setting('server_version') AS version,"
        " pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' AS read_only,"
        " current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit,"
        " current_setting('full_page_writes') AS full_page_writes,"
        " (SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('task')) AS owns"
    )
    assert row is not None
    durable = "off" not in (row["fsync"], row["synchronous_commit"], row["full_page_writes"])
    direct = await is_direct(connection)
    return [
        Finding("database", row["number"] >= OLDEST_POSTGRES, f"PostgreSQL {row['version']}", "15 to 18 are supported"),
        Finding(
            "database",
            not row["read_only"],
            "read-only" if row["read_only"] else "takes writes",
            "a demoted or read-only server can neither accept nor settle anything",
        ),
        Finding(
            "database",
            durable,
            ", ".join(f"{name} {row[name]}" for name in ("fsync", "synchronous_commit", "full_page_writes")),
            "with any of them off, a commit that was answered may be lost with the machine",
        ),
        *[await _check_schema(connection, schema) for schema in schemas],
        Finding(
            "role",
            True,
            "may change the schema" if row["owns"] else "reads and writes rows",
            "who has its password can change the schema, too; LEASEHOLD_DATABASE_APP_ROLE keeps the two apart"
            if row["owns"]
            else "who has its password cannot change the schema",
        ),
        Finding(
            "presence",
            direct or not settings.presence,
            "own session" if direct else "behind a pooler",
            "takeover from a dead worker within a second"
            if direct and settings.presence
            else "takeover from a dead worker only when its lease has passed; set LEASEHOLD_PRESENCE=false to agree",
        ),
    ]


async def _check_schema(connection: Connection, schema: Schema) -> Finding:
    state = await state_of(connection, schema)
    found = "not migrated" if state.found is None else f"at {state.found}, but {state.head} is needed"
    part = "database" if schema is CORE else f"schema of {schema.name}"
    return Finding(part, not state.behind, found if state.behind else "migrated", "run leasehold migrate")


def check_broker(broker: Broker, settings: Settings) -> list[Finding]:
    """What is at the other end, as far as it tells."""
    if settings.broker == "postgres":
        return [Finding("broker", True, "none", "workers look into the database; a little slower, nothing less sure")]
    said = broker.describe()
    version = f"{said.get('product') or 'AMQP'} {said.get('version') or ''}".strip()
    return [
        Finding(
            "broker",
            broker.connected,
            version if broker.connected else "not connected",
            "without it work is accepted and found by looking, a few seconds slower",
        ),
        Finding(
            "broker",
            True,
            f"{settings.amqp_queue_type} queues",
            "classic on one node, quorum on three; a lost hint is found by looking either way",
        ),
        Finding(
            "broker",
            True,
            "consumer_timeout is the server's (30 minutes unless set)",
            "a step may run longer: its lease goes on, and the redelivered hint is dropped as a duplicate",
        ),
    ]


async def check_store(store: ObjectStore) -> list[Finding]:
    """Whether it answers, takes writes, and refuses to overwrite when told so."""
    if store.is_absent:
        return [
            Finding("store", True, "none", "runs work; pictures, conversions, generations and steps with files do not")
        ]
    try:
        conditional = await store.probe()
    except StoreError as error:
        return [
            Finding("store", False, str(error), "steps that read or write objects are tried again until it answers")
        ]
    return [
        Finding(
            "store",
            True,
            "honours If-None-Match" if conditional else "ignores If-None-Match",
            "two writers cannot overwrite one another"
            if conditional
            else "a HEAD comes before each put; reproducible bytes carry the promise",
        )
    ]


async def check_all(
    lend: Callable[[], AbstractAsyncContextManager[Connection]],
    broker: Broker,
    store: ObjectStore,
    settings: Settings,
    schemas: Sequence[Schema] = (CORE,),
) -> list[Finding]:
    """Everything; a part that is away is a finding, not an error."""
    findings: list[Finding] = []
    try:
        async with lend() as connection:
            findings += await check_database(connection, settings, schemas)
    except TRY_AGAIN as error:
        findings.append(Finding("database", False, f"away ({type(error).__name__})", "nothing works without it"))
    findings += check_broker(broker, settings)
    findings += await check_store(store)
    return findings


def as_log(findings: list[Finding]) -> dict[str, Any]:
    """For one line of a log."""
    return {
        "wrong": [f"{f.part}: {f.found}; {f.meaning}" for f in findings if not f.ok],
        "found": [f"{f.part}: {f.found}" for f in findings if f.ok],
    }
