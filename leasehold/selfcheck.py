"""Checks what PostgreSQL, the broker and the store can guarantee. A worker runs the checks when it starts, and
`leasehold doctor` runs them on demand.

Each check returns findings: the state of one part of the installation, and what this state means for the platform's
guarantees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from leasehold.db.database import Connection, is_direct
from leasehold.db.schemas import CORE, Schema, state_of
from leasehold.domain.errors import StoreError
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings

if TYPE_CHECKING:  # `leasehold dev` uses a Finding, and must load neither a broker's nor a store's client
    from leasehold.broker.base import Broker
    from leasehold.storage.store import ObjectStore

#: The oldest supported version: PostgreSQL 15, as `server_version_num` counts versions.
OLDEST_POSTGRES = 150_000
#: From PostgreSQL 16 on, a grant says whether the role inherits its rights. In earlier versions the role itself says
#: so.
GRANTS_INHERIT = 160_000


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of a `part` (database, broker, store, ...). `ok` is False if a guarantee does not hold,
    and an operator must act. `found`: the state of the part. `meaning`: what this state means for the guarantees.
    """

    part: str
    ok: bool
    found: str
    meaning: str


async def check_database(
    connection: Connection, settings: Settings, schemas: Sequence[Schema] = (CORE,)
) -> list[Finding]:
    """Check PostgreSQL: its version, writes and durability, the schema, the role's rights, and advisory locks.

    In the query, `tail` is the number of bytes of the WAL that the most advanced standby does not have yet. `role` is
    the database role of this process. `owns` is whether this role has the rights of the schema's owner.
    """
    row = await connection.fetchrow(
        "SELECT current_setting('server_version_num')::int AS number, current_setting('server_version') AS version,"
        " pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' AS read_only,"
        " current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit,"
        " current_setting('full_page_writes') AS full_page_writes,"
        " current_setting('synchronous_standby_names') AS standby_names,"
        " (SELECT count(*) FROM pg_stat_replication) AS standbys,"
        " CASE WHEN NOT pg_is_in_recovery() THEN"
        " (SELECT min(pg_wal_lsn_diff(pg_current_wal_lsn(), flush_lsn)) FROM pg_stat_replication) END AS tail,"
        " pg_has_role('pg_read_all_stats', 'USAGE') AS reads_stats, current_user::text AS role,"
        " (SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('task')) AS owns"
    )
    assert row is not None
    has_own_session = bool(settings.database_direct_url.get_secret_value()) or await is_direct(connection)
    return [
        Finding("database", row["number"] >= OLDEST_POSTGRES, f"PostgreSQL {row['version']}", "15 to 18 are supported"),
        Finding(
            "database",
            not row["read_only"],
            "read-only" if row["read_only"] else "accepts writes",
            "a demoted or read-only server can neither accept nor settle anything",
        ),
        _check_durability({name: row[name] for name in ("fsync", "synchronous_commit", "full_page_writes")}),
        _check_replication(
            row["standby_names"],
            row["synchronous_commit"],
            row["standbys"],
            row["tail"],
            reads_tail=row["reads_stats"],
        ),
        *[await _check_schema(connection, schema) for schema in schemas],
        _check_rights(owns_schema=bool(row["owns"])),
        _check_sight(row["role"], row["number"], sees_all=row["reads_stats"]),
        _check_presence(settings, has_own_session=has_own_session),
    ]


def _check_durability(values: Mapping[str, str]) -> Finding:
    """`values`: the settings of PostgreSQL that must not be off."""
    return Finding(
        "database",
        "off" not in values.values(),
        ", ".join(f"{name} {value}" for name, value in values.items()),
        "with any of them off, a crash of the machine may lose commits that clients got an answer for",
    )


def _check_rights(*, owns_schema: bool) -> Finding:
    if owns_schema:
        meaning = "its password also allows changing the schema; LEASEHOLD_DATABASE_APP_ROLE separates the two"
        return Finding("role", True, "may change the schema", meaning)
    return Finding("role", True, "reads and writes rows", "its password does not allow changing the schema")


def _check_sight(role: str, version: int, *, sees_all: bool) -> Finding:
    """Whether the role sees what sessions of other roles do. The platform's guarantees do not need this, but operators
    want to know it.
    """
    if sees_all:
        return Finding("role", True, "sees the sessions of all roles", "metrics and console tell who is in the way")
    grant = f"GRANT pg_read_all_stats TO {role}" + (" WITH INHERIT TRUE" if version >= GRANTS_INHERIT else "")
    return Finding(
        "role",
        True,
        "sees its own sessions only",
        "metrics and console do not tell whose transaction keeps vacuum from its work, nor slow statements of others; "
        f"{grant} changes that",
    )


def _check_presence(settings: Settings, *, has_own_session: bool) -> Finding:
    """Whether presence works. Presence means that a lock of the worker's database session shows that the worker is
    alive. Behind a pooler the lock shows nothing, because several clients use one session.
    """
    return Finding(
        "presence",
        has_own_session or not settings.presence,
        "own session" if has_own_session else "behind a pooler",
        "tasks of a dead worker are taken over within a second"
        if has_own_session and settings.presence
        else "tasks of a dead worker wait until their leases end; LEASEHOLD_PRESENCE=false accepts that",
    )


#: Maps a value of `synchronous_commit` to what a synchronous standby has done with a commit when PostgreSQL
#: acknowledges the commit.
_STANDBY_HAS = {
    "remote_apply": "has applied it",
    "on": "has it on its disk",
    "remote_write": "has it in memory: the loss of both machines at once loses it",
}


def _check_replication(
    standby_names: str, synchronous_commit: str, standbys: int, tail: Decimal | None, *, reads_tail: bool
) -> Finding:
    """Find what a failover can lose, in the words of the table in docs/operations/failover.md. `tail`: the bytes of the
    WAL that the most advanced standby does not have yet; None: there is no standby, or this role may not read the
    number. `reads_tail`: whether this role may read that number.
    """
    if standby_names and synchronous_commit in _STANDBY_HAS:
        found = f"quorum, {synchronous_commit}" if "ANY " in standby_names.upper() else synchronous_commit
        meaning = (
            "a failover loses nothing acknowledged: when a commit is answered, a standby "
            f"{_STANDBY_HAS[synchronous_commit]}"
        )
    elif standby_names or standbys:
        if tail is not None:
            loss_now = f": now {tail:,} bytes of the log"
        elif standbys and not reads_tail:
            loss_now = "; how many bytes of the log, only members of pg_read_all_stats see"
        else:
            loss_now = ""
        found, meaning = "asynchronous", f"a failover loses the last commits, also acknowledged ones{loss_now}"
    else:
        found, meaning = "none", "if this server's disk is lost, only a backup has what was acknowledged"
    return Finding("replication", True, found, meaning)


async def _check_schema(connection: Connection, schema: Schema) -> Finding:
    state = await state_of(connection, schema)
    found = "not migrated" if state.revision is None else f"at {state.revision}, but {state.head} is needed"
    part = "database" if schema is CORE else f"schema of {schema.name}"
    return Finding(part, not state.behind, found if state.behind else "migrated", "run leasehold migrate")


def check_broker(broker: Broker, settings: Settings) -> list[Finding]:
    """Check the broker: its connection, product and version, and the queue type."""
    if not broker.delivers_hints:
        return [Finding("broker", True, "none", "workers poll the database: a little slower, with the same guarantees")]
    properties = broker.describe()
    version = f"{properties.get('product') or 'AMQP'} {properties.get('version') or ''}".strip()
    return [
        Finding(
            "broker",
            broker.connected,
            version if broker.connected else "not connected",
            "without it the API still accepts work, and workers find it by polling, a few seconds later",
        ),
        Finding(
            "broker",
            True,
            f"{settings.amqp_queue_type} queues",
            "use classic on one node, quorum on three; workers find the task of a lost hint by polling either way",
        ),
        Finding(
            "broker",
            True,
            "consumer_timeout is the server's (30 minutes unless set)",
            "a step may run longer: its lease is renewed, and the worker drops the redelivered hint as a duplicate",
        ),
    ]


async def check_store(store: ObjectStore) -> list[Finding]:
    """Check the store: whether it answers, accepts writes, and honours If-None-Match."""
    if store.is_absent:
        return [Finding("store", True, "none", "only runs without files work: no pictures, conversions or generations")]
    try:
        is_conditional = await store.probe()
    except StoreError as error:
        return [Finding("store", False, str(error), "steps with objects are tried again until the store answers")]
    return [
        Finding(
            "store",
            True,
            "honours If-None-Match" if is_conditional else "ignores If-None-Match",
            "two writers cannot overwrite one another"
            if is_conditional
            else "a HEAD comes before each put; two writers at once are harmless because steps' bytes are reproducible",
        )
    ]


async def check_all(
    acquire: Callable[[], AbstractAsyncContextManager[Connection]],
    broker: Broker,
    store: ObjectStore,
    settings: Settings,
    schemas: Sequence[Schema] = (CORE,),
) -> list[Finding]:
    """Run all checks. A part that does not answer is a finding, not an error."""
    findings: list[Finding] = []
    try:
        async with acquire() as connection:
            findings += await check_database(connection, settings, schemas)
    except TRY_AGAIN as error:
        findings.append(Finding("database", False, f"no answer ({type(error).__name__})", "nothing works without it"))
    findings += check_broker(broker, settings)
    findings += await check_store(store)
    return findings


def as_log(findings: list[Finding]) -> dict[str, Any]:
    """The findings as fields of one log line."""
    return {
        "wrong": [f"{finding.part}: {finding.found}; {finding.meaning}" for finding in findings if not finding.ok],
        "found": [f"{finding.part}: {finding.found}" for finding in findings if finding.ok],
    }
