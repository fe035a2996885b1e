"""`leasehold doctor --reconcile` compares PostgreSQL's rows with the store's objects. Run it after a restore.

Backups of PostgreSQL and of the store are not from the same moment. An object is orphaned if the restored database
lacks the row of its owner, such as its job. `--apply` deletes orphaned objects. If a row names an object that the store
lacks, the command only lists the object, and changes no row.

Most keys have the id of their owner after a prefix (`jobs/ID/`, and prefixes that the kinds of work declare). The id
contains the time at which the owner was made. For other keys, a row names the whole key, and the store has the time at
which the object was written. The command leaves young objects and objects of a young owner alone, because their row may
not be committed yet. Keys of another form do not belong to the platform, and are never deleted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from leasehold.db.database import Connection, connected
from leasehold.db.job_reads import LIVES
from leasehold.domain.errors import LeaseholdError
from leasehold.domain.ids import instant_of
from leasehold.domain.kind import NamedObjects, Objects
from leasehold.domain.registry import Pipelines
from leasehold.domain.sentences import counted
from leasehold.pipelines import kinds_of
from leasehold.settings import Settings
from leasehold.storage import ObjectStore, Stored

#: Objects that are younger than this, and objects of younger owners, are left alone.
YOUNG = timedelta(hours=1)
#: How many rows or objects are read at a time.
_BATCH = 1000
#: How many requests are sent to the store at once.
_AT_ONCE = 16
#: How many examples a finding has at most.
EXAMPLES = 20

# The outputs that rows name. Outputs of jobs past their retention are left out, because their objects may be deleted
# already. (After a restore, there are rows of jobs whose retention has ended since the backup.) $1 and $2: the task and
# the name of the last row that was read. $3: at most this many rows are returned.
_OUTPUTS = f"""
SELECT o.task_id, o.name, o.key, o.size FROM output o JOIN job j ON j.id = o.job_id AND {LIVES}
WHERE (o.task_id, o.name) > ($1, $2) ORDER BY o.task_id, o.name LIMIT $3
"""
# The ids among $1 that belong to a job or an upload. An upload counts as well, because its row exists before the row of
# its job.
_JOBS = """
SELECT id FROM job WHERE id = ANY($1::uuid[])
UNION SELECT owner.id FROM unnest($1::uuid[]) AS owner(id) WHERE EXISTS (
    SELECT 1 FROM upload u WHERE u.key = 'jobs/' || owner.id || '/input/')
"""


class SuspiciousBucket(LeaseholdError):
    """More objects are orphaned than owned, or the installation is a cell (one of several installations that divide the
    tenants among them). In either case another installation may also use the bucket.
    """


class InRecovery(LeaseholdError):
    """The PostgreSQL server still replays WAL, or it is a standby. So rows that are missing may still arrive."""


@dataclass(slots=True)
class Finding:
    """Objects of one sort: their number, their bytes, and the keys of the first objects."""

    count: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, key: str, size: int) -> None:
        self.count += 1
        self.bytes += size
        if len(self.examples) < EXAMPLES:
            self.examples.append(key)


@dataclass(slots=True)
class Reconciliation:
    """The result. `rows`: rows that name an object. `objects`: objects in the store. `missing`: rows whose object the
    store lacks, or has in another size. `owned`: objects whose owner has a row. `orphaned`: objects whose owner has no
    row. `young`: objects without a row that are too young to be orphaned. `deleted`: orphaned objects that are deleted
    by now.
    """

    rows: int = 0
    objects: int = 0
    owned: int = 0
    young: int = 0
    deleted: int = 0
    missing: Finding = field(default_factory=Finding)
    orphaned: Finding = field(default_factory=Finding)


async def reconcile(settings: Settings, *, apply: bool, even_so: bool = False) -> Reconciliation:
    """Compare rows and objects. `apply`: also delete the orphaned objects. Before the first deletion, raises InRecovery
    and, without `even_so`, SuspiciousBucket.
    """
    result = Reconciliation()
    kinds = kinds_of(Pipelines.from_source(settings.pipelines))
    kind_objects = [kind.objects for kind in kinds if kind.objects is not None]
    sections = [_Section("jobs/", _JOBS), *(_section_of(objects) for objects in kind_objects)]
    store = ObjectStore.from_settings(settings)
    await store.open()
    try:
        async with connected(settings, "reconcile") as connection:
            await _check_rows(connection, store, kind_objects, result)
            async for batch in _orphaned_objects(connection, store, sections, result):
                for key, size in batch:
                    result.orphaned.add(key, size)
            if not apply or not result.orphaned.count:
                return result
            await _refuse_in_recovery(connection)
            if not even_so:
                _refuse_suspicious_bucket(settings, result)
            # The store is read again, because the first reading kept only examples. The second reading gets a new
            # Reconciliation that nobody reads, so that nothing is counted twice.
            async for batch in _orphaned_objects(connection, store, sections, Reconciliation()):
                await store.delete(*(key for key, _ in batch))
                result.deleted += len(batch)
    finally:
        await store.close()
    return result


async def _refuse_in_recovery(connection: Connection) -> None:
    if await connection.fetchval("SELECT pg_is_in_recovery()"):
        raise InRecovery(
            "PostgreSQL is in recovery, so that rows may be missing which still come: nothing was deleted. "
            "Apply it when `SELECT pg_is_in_recovery()` is false"
        )


def _refuse_suspicious_bucket(settings: Settings, result: Reconciliation) -> None:
    orphans = counted(result.orphaned.count, "object has", "objects have")
    if settings.cell:
        raise SuspiciousBucket(
            f"{orphans} no row in this database, that of cell {settings.cell}: "
            f"do other cells have the bucket {settings.s3_bucket}, too? --even-so deletes them nevertheless"
        )
    if result.orphaned.count > result.owned:
        owned = counted(result.owned, "has", "have")
        raise SuspiciousBucket(
            f"{orphans} no row in this database, and {owned} one: is "
            f"the bucket {settings.s3_bucket} another installation's, too? --even-so deletes them nevertheless"
        )


@dataclass(frozen=True, slots=True)
class _Section:
    """The objects below `prefix`. `owners`: an SQL query that takes owners in the array `$1`, and returns those that
    have a row (column `id`). `pattern`: the form of the keys, if rows name whole keys (NamedObjects). Then each
    object's key counts as its owner. If `pattern` is None, the owner is the id after the prefix.
    """

    prefix: str
    owners: str
    pattern: re.Pattern[str] | None = None

    def owner_of(self, key: str) -> UUID | str | None:
        """The owner of the object with this key. Returns None if the platform did not make this key."""
        if self.pattern is not None:
            return key if self.pattern.fullmatch(key) else None
        return _id_in(key)


def _section_of(objects: Objects | NamedObjects) -> _Section:
    pattern = re.compile(objects.pattern) if isinstance(objects, NamedObjects) else None
    return _Section(objects.prefix, objects.owners, pattern)


async def _check_rows(
    connection: Connection, store: ObjectStore, kind_objects: Sequence[Objects | NamedObjects], result: Reconciliation
) -> None:
    """Ask the store for the object of each row. Count the rows and the missing objects in `result`."""
    request_limit = asyncio.Semaphore(_AT_ONCE)

    async def check(key: str, size: int | None) -> None:
        async with request_limit:
            stored = await store.head(key)
        result.rows += 1
        if stored is None or (size is not None and stored.size != size):
            result.missing.add(key, size or 0)

    last_task, last_name = UUID(int=0), ""
    while rows := await connection.fetch(_OUTPUTS, last_task, last_name, _BATCH):
        await asyncio.gather(*(check(row["key"], row["size"]) for row in rows))
        last_task, last_name = rows[-1]["task_id"], rows[-1]["name"]
    for objects in kind_objects:
        last_id: UUID | str = "" if isinstance(objects, NamedObjects) else UUID(int=0)
        while rows := await connection.fetch(objects.keys, last_id, _BATCH):
            await asyncio.gather(*(check(row["key"], None) for row in rows))
            last_id = rows[-1]["id"]


async def _orphaned_objects(
    connection: Connection, store: ObjectStore, sections: Sequence[_Section], result: Reconciliation
) -> AsyncIterator[list[tuple[str, int]]]:
    """Yield the orphaned objects in batches of (key, size). Count in `result` all objects, the owned and the young
    ones.
    """
    for section in sections:
        batch: list[tuple[UUID | str, Stored]] = []
        async for stored in store.list(section.prefix):
            owner = section.owner_of(stored.key)
            result.objects += 1
            if owner is not None:
                batch.append((owner, stored))
            if len(batch) == _BATCH:
                yield await _orphaned_of_batch(connection, section.owners, batch, result)
                batch = []
        yield await _orphaned_of_batch(connection, section.owners, batch, result)


async def _orphaned_of_batch(
    connection: Connection, owners_query: str, batch: Sequence[tuple[UUID | str, Stored]], result: Reconciliation
) -> list[tuple[str, int]]:
    rows = await connection.fetch(owners_query, list({owner for owner, _ in batch}))
    owners_with_row = {row["id"] for row in rows}
    young_after = datetime.now(UTC) - YOUNG
    orphaned = []
    for owner, stored in batch:
        if owner in owners_with_row:
            result.owned += 1
            continue
        made_at = instant_of(owner) if isinstance(owner, UUID) else stored.modified_at
        if made_at is None or made_at > young_after:
            result.young += 1
        else:
            orphaned.append((stored.key, stored.size))
    return orphaned


def _id_in(key: str) -> UUID | None:
    """The owner's id in the key: a UUIDv7 in its canonical form. Returns None if the platform did not make this key."""
    try:
        id_text = key.split("/")[1]
        owner = UUID(id_text)
        instant_of(owner)  # raises if the id is no UUIDv7
    except (ValueError, IndexError, OverflowError):
        return None
    return owner if str(owner) == id_text else None
