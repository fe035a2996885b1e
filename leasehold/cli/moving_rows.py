"""Handles the rows of a tenant that moves to another cell. It refuses changes to them, copies them to the new cell, and
deletes them in the old cell. It also finds the prefixes of the tenant's objects. moving.py calls this module.

Triggers in the old cell's database refuse the changes. The triggers exist only while a tenant moves, so without a move
no write is slower. CREATE TRIGGER waits until it has a lock on the table. So when its transaction commits, all earlier
transactions that wrote to the table have ended, and all later writes call the trigger.

The new cell first gets copies in tables of the move (`moving_...`), which no worker and no request reads. Later one
transaction inserts the copies into the real tables, so that the new cell has all rows of the tenant, or none.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import asyncpg

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict
from leasehold.runtime.gather import gather_or_cancel
from leasehold.transitions import moves
from leasehold.transitions.moves import DUE, POSTPONED_BY, is_postponed

#: Tables that do not move, because their rows belong to the cell. The rows of the audit form chains in their cell, so
#: they stay, too. Exception: the rows of `event` do move. In the new cell they become rows of `kept_event`
#: (`source_query`).
CELL_TABLES = frozenset({"tenant_move", "audit", "audit_chain", "outbox", "outbox_batch", "worker", "quarantine",
                   "leadership", "rate_bucket", "paused_queue", "event", "known_handler"})  # fmt: skip
#: Tables to which a client's read request writes, too. Changes to them are not refused, because the clients of a tenant
#: that moves may still read.
_WRITTEN_BY_READS = frozenset({"download"})
#: The only columns of an API key whose changes are refused. The column with the key's last use may change, because
#: requests write it, at most once a minute.
_KEY_COLUMNS = "revoked_at, expires_at, scopes"
_LOCK_TRIES = 60  # each waits up to a second for a lock; after a failed try comes a pause of half a second
#: The errors after which `_run_locking` tries again.
_LOCK_ERRORS = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)

# Each table of the schema with its columns. Partitions, Alembic's tables and the tables of moves are left out.
_TABLES = """
SELECT c.relname AS name,
       array_agg(a.attname::text ORDER BY a.attname)
           FILTER (WHERE a.attidentity = '' AND a.attgenerated = '') AS columns,
       array_agg(a.attname::text) FILTER (WHERE a.attidentity <> '') AS identity_columns
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND NOT c.relispartition
  AND NOT starts_with(c.relname, 'alembic_version') AND NOT starts_with(c.relname, 'moving_')
GROUP BY c.relname
"""
# The first column of each foreign key (`child`), and the column to which it refers (`parent`).
_FOREIGN_KEYS = """
SELECT f.conrelid::regclass::text AS child, a.attname AS child_column, f.confrelid::regclass::text AS parent,
       b.attname AS parent_column
FROM pg_constraint f
JOIN pg_attribute a ON a.attrelid = f.conrelid AND a.attnum = f.conkey[1]
JOIN pg_attribute b ON b.attrelid = f.confrelid AND b.attnum = f.confkey[1]
WHERE f.contype = 'f' AND f.connamespace = current_schema()::regnamespace
"""


@dataclass(frozen=True, slots=True)
class MovedTable:
    """A table whose rows move. `condition`: SQL that is true for the rows of the table `t` that belong to the tenant
    `$1`. `columns`: all columns without identity and generated columns, which the new cell fills in itself.
    `order_column`: the identity column, if there is one; the new cell numbers the rows again, in the order of this
    column. `has_tenant`: whether the table has the column `tenant_id`.
    """

    name: str
    columns: Sequence[str]
    condition: str
    order_column: str | None
    has_tenant: bool

    def select_list(self) -> str:
        """SQL: the columns to copy. In the copy, a due time that the move has postponed has its earlier value again.
        `DUE` maps the name of a table to its column of due times.
        """
        columns = {column: f't."{column}"' for column in self.columns}
        if self.name in DUE:
            column = DUE[self.name]
            earlier = f"t.{column} - interval '{POSTPONED_BY}'"
            columns[column] = f"CASE WHEN {is_postponed(self.name)} THEN {earlier} ELSE t.{column} END AS {column}"
        return ", ".join(columns.values())

    def column_list(self) -> str:
        return ", ".join(f'"{column}"' for column in self.columns)


async def moved_tables(connection: Connection) -> list[MovedTable]:
    """All tables with rows of tenants: tables with the column `tenant_id`, and tables that refer to such a table. A
    table comes after the tables to which its foreign keys refer.
    """
    table_rows = {row["name"]: row for row in await connection.fetch(_TABLES) if row["name"] not in CELL_TABLES}
    foreign_keys = [key for key in await connection.fetch(_FOREIGN_KEYS) if key["child"] in table_rows]
    parents_first = TopologicalSorter[str]({name: set() for name in table_rows})
    for key in foreign_keys:
        if key["child"] != key["parent"]:
            parents_first.add(key["child"], key["parent"])
    tables: dict[str, MovedTable] = {}
    for name in parents_first.static_order():
        if name not in table_rows:  # a table of CELL_TABLES to which a foreign key refers
            continue
        row = table_rows[name]
        has_tenant = "tenant_id" in row["columns"]
        condition = _SPECIAL_CONDITIONS.get(name)
        if condition is None:
            condition = "t.tenant_id = $1" if has_tenant else _condition_by_parent(foreign_keys, tables, name)
        if condition is not None:
            order = row["identity_columns"][0] if row["identity_columns"] else None
            tables[name] = MovedTable(name, row["columns"], condition, order, has_tenant)
    return list(tables.values())


# Name of a table -> its condition (MovedTable), for tables whose rows the general rule of `moved_tables` would not
# find.
_SPECIAL_CONDITIONS = {
    # `gate` has the concurrency limits, and `gate_job` the jobs at each limit. A job may wait at limits that all
    # tenants share (`*`). These limits move with the job.
    "gate": "t.tenant_id = $1 OR (t.tenant_id = '*' AND EXISTS (SELECT 1 FROM gate_job g JOIN job j ON j.id = g.job_id"
    " WHERE g.tenant_id = '*' AND g.key = t.key AND j.tenant_id = $1))",
    "gate_job": "t.job_id IN (SELECT id FROM job WHERE tenant_id = $1)",
    # Rows of `output` from before migration 0008 have no tenant.
    "output": "t.task_id IN (SELECT id FROM task WHERE tenant_id = $1)",
}


def _condition_by_parent(
    foreign_keys: Sequence[asyncpg.Record], tables: dict[str, MovedTable], name: str
) -> str | None:
    """SQL: the condition that the parent row belongs to the tenant. None: no parent table has rows of tenants."""
    for key in foreign_keys:
        parent = tables.get(key["parent"])
        if key["child"] == name and parent is not None:
            if parent.has_tenant:  # the condition begins with a column of `t`, but in this SQL the parent is `p`
                parent_condition = parent.condition.replace("t.", "p.", 1)
            else:  # only the parent table `tail` (of logs) has no `tenant_id`; its key is the id of a job
                parent_condition = f'p."{key["parent_column"]}" IN (SELECT id FROM job WHERE tenant_id = $1)'
            return (
                f't."{key["child_column"]}" IN'
                f' (SELECT p."{key["parent_column"]}" FROM "{parent.name}" p WHERE {parent_condition})'
            )
    return None


def source_query(table: MovedTable, *, digest: bool = False) -> str:
    """SQL that selects the tenant's rows as the new cell gets them. With `digest`, the SQL selects only the number of
    these rows and the sum of their hashes.
    """
    from_clause, condition = f'"{table.name}" t', table.condition
    if table.name == "kept_event":
        # The table `event` has a partition for each day, and the new cell may lack the partition of an old day. So in
        # the new cell, the rows of both `event` and `kept_event` become rows of `kept_event`. The other events of a job
        # need no copy, because in each cell the view `history` derives them from the rows of jobs and tasks.
        both_tables = " UNION ALL ".join(
            f"SELECT {table.column_list()} FROM {name}" for name in ("event", "kept_event")
        )
        from_clause = f"({both_tables}) AS t JOIN job j ON j.id = t.job_id"
        condition = "t.tenant_id = $1"
    rows = f"SELECT {table.select_list()} FROM {from_clause} WHERE {condition}"
    if digest:
        return _digest_of(f"({rows}) AS t", table)
    return rows + (f' ORDER BY t."{table.order_column}"' if table.order_column else "")


def _digest_of(from_clause: str, table: MovedTable) -> str:
    # SQL: the number of the rows, and the sum of their hashes. The sum does not depend on the order of the rows.
    columns = ", ".join(f't."{column}"' for column in table.columns)
    return (
        f"SELECT count(*) AS rows, coalesce(sum(hashtextextended(ROW({columns})::text, 0)::numeric), 0)::text AS hash"
        f" FROM {from_clause}"
    )


# --- refusing changes of the tenant


def _move_prefix(tenant: str) -> str:
    """The prefix of the names of the move's triggers and tables. It has a hash of the tenant, because a name in
    PostgreSQL has at most 63 bytes.
    """
    return f"moving_{hashlib.sha256(tenant.encode()).hexdigest()[:16]}_"


# The function of the triggers `begins` and `continues`, which `hold_new_work` creates. The statement that settles a
# step may also make another task of the job `running`, so that the worker goes on with the job. This function leaves
# that task without a lease, as if the worker had no room for it. The settlement reads the row that the function
# returns, so it writes a hint in place of the claim. Afterwards the trigger `postpones` postpones the task, because
# PostgreSQL calls triggers in the order of their names.
_LEAVE = """
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    NEW.status := 'pending';
    NEW.started_at := NULL;
    IF TG_OP = 'UPDATE' THEN
        NEW.started_at := OLD.started_at;
        IF OLD.status = 'waiting' THEN
            NEW.status := 'waiting';
        END IF;
    END IF;
    NEW.lease_owner := NULL;
    NEW.lease_until := NULL;
    NEW.epoch := NEW.epoch - 1;
    NEW.attempt := NEW.attempt - 1;
    RETURN NEW;
END
$body$
"""
# SQL: whether an UPDATE of a task lets a worker go on with the job. The condition is false for the claim of a due task,
# because such a claim changes no `blocked` task, and does not change `news`. (`news` counts the ended steps and the
# signals of a workflow.) Until the due times are postponed, workers may still claim due tasks. The trigger `continues`
# does not undo these claims. The claimed steps run, and the move's stage `drain` (moving.py) waits for them.
_GOES_ON = "NEW.status = 'running' AND (OLD.status = 'blocked' OR (OLD.status = 'waiting' AND NEW.news > OLD.news))"


async def hold_new_work(connection: Connection, tenant: str) -> None:
    """Refuse new jobs, and postpone all due times. From then on workers only finish the running steps. They claim no
    due step, and do not go on from a finished step to the next step of its job.
    """
    prefix, tenant_literal = _move_prefix(tenant), await _literal(connection, tenant)
    is_due = "NEW.status IN ('pending', 'retry', 'waiting')"
    leave = _leave_function(tenant)
    await _run_locking(
        connection,
        [
            _LEAVE.format(name=leave),
            # The table `job` comes first, because a submission locks it before `task`. The other order could deadlock.
            (
                f'CREATE OR REPLACE TRIGGER "{prefix}inserts" BEFORE INSERT ON job FOR EACH ROW'
                f" WHEN (NEW.tenant_id = {tenant_literal}) EXECUTE FUNCTION refuse_while_moving()"
            ),
            (
                f'CREATE OR REPLACE TRIGGER "{prefix}begins" BEFORE INSERT ON task FOR EACH ROW'
                f" WHEN (NEW.tenant_id = {tenant_literal} AND NEW.status = 'running') EXECUTE FUNCTION {leave}()"
            ),
            (
                f'CREATE OR REPLACE TRIGGER "{prefix}continues" BEFORE UPDATE ON task FOR EACH ROW'
                f" WHEN (NEW.tenant_id = {tenant_literal} AND {_GOES_ON}) EXECUTE FUNCTION {leave}()"
            ),
            (
                f'CREATE OR REPLACE TRIGGER "{prefix}postpones" BEFORE INSERT OR UPDATE ON task FOR EACH ROW'
                f" WHEN (NEW.tenant_id = {tenant_literal} AND {is_due}) EXECUTE FUNCTION postpone_task_while_moving()"
            ),
            (
                f'CREATE OR REPLACE TRIGGER "{prefix}postpones" BEFORE INSERT OR UPDATE ON schedule FOR EACH ROW'
                f" WHEN (NEW.tenant_id = {tenant_literal}) EXECUTE FUNCTION postpone_schedule_while_moving()"
            ),
        ],
    )
    await moves.postpone(connection, tenant)


def _leave_function(tenant: str) -> str:
    """SQL: the name of the function `_LEAVE`. Each move has its own function, because the end of a move drops it."""
    return f'"{_move_prefix(tenant)}leaves"'


async def refuse_writes(connection: Connection, tenant: str, tables: Sequence[MovedTable]) -> None:
    """Refuse each change of the tenant's rows. Only the connections of workers and of this command may still change
    the rows. The triggers' function (migration 0040) recognises these connections by their `application_name`.
    """
    prefix, tenant_literal = _move_prefix(tenant), await _literal(connection, tenant)
    statements = []
    for table in tables:
        if not table.has_tenant or table.name in _WRITTEN_BY_READS:
            continue
        update = f"UPDATE OF {_KEY_COLUMNS}" if table.name == "api_key" else "UPDATE"
        statements += [
            (
                f'CREATE OR REPLACE TRIGGER "{prefix}writes" BEFORE INSERT OR {update} ON "{table.name}" FOR EACH ROW'
                f" WHEN (NEW.tenant_id = {tenant_literal}) EXECUTE FUNCTION refuse_while_moving()"
            ),
            (
                f'CREATE OR REPLACE TRIGGER "{prefix}deletes" BEFORE DELETE ON "{table.name}" FOR EACH ROW'
                f" WHEN (OLD.tenant_id = {tenant_literal}) EXECUTE FUNCTION refuse_while_moving()"
            ),
        ]
    await _run_locking(connection, statements)


async def release(connection: Connection, tenant: str) -> None:
    """Undo `hold_new_work` and `refuse_writes`. Call this in a transaction."""
    for row in await connection.fetch(
        "SELECT tgname AS name, tgrelid::regclass::text AS on_table"
        " FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid"
        " WHERE starts_with(tgname, $1) AND NOT tgisinternal AND c.relnamespace = current_schema()::regnamespace"
        " ORDER BY 2, 1",
        _move_prefix(tenant),
    ):
        await connection.execute(f'DROP TRIGGER "{row["name"]}" ON {row["on_table"]}')
    await connection.execute(f"DROP FUNCTION IF EXISTS {_leave_function(tenant)}()")
    await moves.resume(connection, tenant)


async def count_running_steps(connection: Connection, tenant: str) -> int:
    return int(
        await connection.fetchval("SELECT count(*) FROM task WHERE tenant_id = $1 AND status = 'running'", tenant)
    )


async def _literal(connection: Connection, tenant: str) -> str:
    """The tenant as an SQL literal, because the definition of a trigger takes no parameters."""
    return str(await connection.fetchval("SELECT quote_literal($1::text)", tenant))


async def _run_locking(connection: Connection, statements: Sequence[str]) -> None:
    """Run the statements, each of which locks a table, in one transaction. If a statement waits for its lock for a
    second, roll back, let other transactions through, and try again. Raises Conflict `tables_in_use` after _LOCK_TRIES.
    """
    for _ in range(_LOCK_TRIES):
        try:
            async with connection.transaction():
                await connection.execute("SET LOCAL lock_timeout = '1s'")
                for statement in statements:
                    await connection.execute(statement)
        except _LOCK_ERRORS:
            await asyncio.sleep(0.5)
        else:
            return
    raise Conflict("tables_in_use", "Other transactions hold locks on the tables for too long. Run the command again.")


# --- copying


async def copy_rows(source: Connection, target: Connection, tenant: str, tables: Sequence[MovedTable]) -> int:
    """Copy the tenant's rows, as one snapshot shows them, into the tables of the move. Then compare each copy with its
    original. Returns the number of rows.

    Raises Conflict `copy_differs` if a copy differs from its original.
    """
    await drop_copies(target, tenant)
    total = 0
    async with _snapshot(source):
        for table in tables:
            staging = _staging_table(tenant, table)
            await target.execute(f'CREATE TABLE {staging} (LIKE "{table.name}")')
            if table.order_column:  # the copy keeps the order of the rows in `moving_place`, and drops the old numbers
                await target.execute(
                    f'ALTER TABLE {staging} ADD COLUMN moving_place bigserial, DROP COLUMN "{table.order_column}"'
                )
            await _pipe(source, target, source_query(table), tenant, staging, table.columns)
            original = await source.fetchrow(source_query(table, digest=True), tenant)
            copy = await target.fetchrow(_digest_of(f"{staging} t", table))
            if original is None or copy is None or tuple(original) != tuple(copy):
                raise Conflict("copy_differs", f"The copy of the table {table.name} differs. Run the command again.")
            total += original["rows"]
    return total


@asynccontextmanager
async def _snapshot(source: Connection) -> AsyncIterator[None]:
    """A transaction that reads one snapshot. If the block raises an error, roll back, and raise the same error. If the
    ROLLBACK fails, close the connection, so that PostgreSQL rolls back. The ROLLBACK fails after a COPY that was
    cancelled, because asyncpg mistakes the next piece that arrives for the end of the COPY.
    """
    transaction = source.transaction(isolation="repeatable_read", readonly=True)
    await transaction.start()
    try:
        yield
    except BaseException:
        try:
            await transaction.rollback()
        except Exception:  # noqa: BLE001 - the error of the block counts
            source.terminate()
        raise
    await transaction.commit()


def _staging_table(tenant: str, table: MovedTable) -> str:
    """The quoted name of the move's table that gets the copies of this table's rows."""
    return f'"{_move_prefix(tenant)}{table.name}"'


async def _pipe(
    source: Connection, target: Connection, query: str, tenant: str, staging: str, columns: Sequence[str]
) -> None:
    """Copy the rows of `query` from the source into the target's table `staging`. At most 16 pieces of the copy are in
    memory at once.
    """
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue(16)
    write_ended = asyncio.Event()  # set when the write has ended, or when the connection to the target is lost

    async def read() -> None:
        await source.copy_from_query(query, tenant, output=pieces.put)
        await pieces.put(None)  # only without an error: None ends the copy as complete

    async def pieces_until_end() -> AsyncIterator[bytes]:
        while (piece := await pieces.get()) is not None:
            yield piece

    async def write() -> None:
        await target.copy_to_table(staging.strip('"'), source=pieces_until_end(), columns=list(columns))
        write_ended.set()

    async def watch() -> None:
        """Raise ConnectionError if the connection is lost. Without this check, asyncpg would wait for ever to send the
        next piece.
        """
        await write_ended.wait()
        if target.is_closed():
            raise ConnectionError("the connection to the other cell's database was lost")

    def end_watch(_connection: Any) -> None:
        write_ended.set()

    target.add_termination_listener(end_watch)
    try:
        await gather_or_cancel((read(), write(), watch()))
    finally:
        target.remove_termination_listener(end_watch)


async def take_over(target: Connection, tenant: str, tables: Sequence[MovedTable]) -> None:
    """Insert the copies as the tenant's rows, and drop the tables of the move. Call this in a transaction."""
    for table in tables:
        staging, columns = _staging_table(tenant, table), table.column_list()
        order = " ORDER BY moving_place" if table.order_column else ""
        # The new cell may have the limits that all tenants share (`*`) already.
        on_conflict = " ON CONFLICT (tenant_id, key) DO NOTHING" if table.name == "gate" else ""
        await target.execute(
            f'INSERT INTO "{table.name}" ({columns}) SELECT {columns} FROM {staging}{order}{on_conflict}'
        )
        await target.execute(f"DROP TABLE {staging}")


async def drop_copies(target: Connection, tenant: str) -> None:
    """Drop the tables of the move."""
    for row in await target.fetch(
        "SELECT quote_ident(relname) AS name FROM pg_class WHERE relnamespace = current_schema()::regnamespace"
        " AND relkind = 'r' AND starts_with(relname, $1)",
        _move_prefix(tenant),
    ):
        await target.execute(f"DROP TABLE {row['name']}")


# Locks the limits that all tenants share (`*`) and at which the tenant has jobs. The statements that admit jobs lock
# these rows of `gate` in the same order, so no deadlock can arise.
_LOCK_SHARED_LIMITS = """
SELECT 1 FROM gate t WHERE t.tenant_id = '*' AND EXISTS (
    SELECT 1 FROM gate_job g JOIN job j ON j.id = g.job_id
    WHERE g.tenant_id = '*' AND g.key = t.key AND j.tenant_id = $1)
ORDER BY t.tenant_id COLLATE "C", t.key COLLATE "C" FOR NO KEY UPDATE
"""
# Removes the jobs of the tenant $1 from all limits that all tenants share.
_LEAVE_SHARED_LIMITS = """
DELETE FROM gate_job g USING job j WHERE g.job_id = j.id AND g.tenant_id = '*' AND j.tenant_id = $1
"""


async def leave_shared_limits(connection: Connection, tenant: str) -> None:
    """Remove the tenant's jobs from the concurrency limits that all tenants share (`*`). In the old cell these jobs
    never end. They would count at these limits until `leasehold cells move --clean` deletes them, and jobs of other
    tenants would wait. Call this in a transaction, after the switch.
    """
    await connection.fetch(_LOCK_SHARED_LIMITS, tenant)
    await connection.execute(_LEAVE_SHARED_LIMITS, tenant)


async def first_table_with_rows(connection: Connection, tenant: str, tables: Sequence[MovedTable]) -> str | None:
    """The name of the first table that has rows of the tenant; None if there is none."""
    for table in tables:
        if table.has_tenant and await connection.fetchval(
            f'SELECT EXISTS (SELECT 1 FROM "{table.name}" WHERE tenant_id = $1)', tenant
        ):
            return table.name
    return None


async def delete_rows(connection: Connection, tenant: str, tables: Sequence[MovedTable]) -> None:
    """Delete the tenant's rows. Call this in a transaction."""
    for table in reversed(tables):
        # Other tenants still use the limits that all tenants share (`*`).
        condition = "t.tenant_id = $1" if table.name == "gate" else table.condition
        await connection.execute(f'DELETE FROM "{table.name}" t WHERE {condition}', tenant)
    # `tables` lacks `event`, because in the new cell its rows are rows of `kept_event`.
    await connection.execute("DELETE FROM event WHERE tenant_id = $1", tenant)


# --- objects


#: The names of columns that have keys of objects.
_OBJECT_COLUMNS = frozenset({"key", "original_key", "backup"})
#: Columns with a name of _OBJECT_COLUMNS, but without keys of the platform's store. They have texts of clients, or keys
#: in another store, to which a conversion was copied.
_NO_OBJECTS = frozenset({("idempotency", "key"), ("gate", "key"), ("gate_job", "key"), ("promoted_object", "key")})


async def object_prefixes(connection: Connection, tenant: str, tables: Sequence[MovedTable]) -> list[str]:
    """The prefixes of the tenant's objects: of its unfinished jobs, of the keys in _OBJECT_COLUMNS, and of the inputs
    of its jobs. The platform made the keys in these columns; none is from a client.
    """
    prefixes = {
        f"jobs/{row['id']}/"
        for row in await connection.fetch("SELECT id FROM job WHERE tenant_id = $1 AND finished_at IS NULL", tenant)
    }
    for table in tables:
        for column in _OBJECT_COLUMNS & set(table.columns):
            if table.has_tenant and (table.name, column) not in _NO_OBJECTS:
                rows = await connection.fetch(
                    f'SELECT t."{column}" AS key FROM "{table.name}" t WHERE {table.condition}', tenant
                )
                prefixes |= {_object_prefix(row["key"]) for row in rows if row["key"]}
    inputs = await connection.fetch(
        "SELECT DISTINCT value AS key FROM job, jsonb_each_text(inputs) WHERE tenant_id = $1", tenant
    )
    return sorted(prefixes | {_object_prefix(row["key"]) for row in inputs})


def _object_prefix(key: str) -> str:
    """The prefix `jobs/ID/` for the key `jobs/ID/step/file`. A key of two parts or less is its own prefix."""
    parts = key.split("/")
    return f"{parts[0]}/{parts[1]}/" if len(parts) > 2 else key  # noqa: PLR2004 - kind, owner, rest
