"""`leasehold cells move` moves a tenant from this cell to another, while both cells work.

The table `tenant_move` of the old cell stores the stage of the move. If a command was killed, the next command goes on
from this stage. The stages:

- drain: the old cell refuses new jobs of the tenant, and its workers claim no task of the tenant. The command waits
  until the tenant's running steps have ended.
- copy: the old cell refuses each change of the tenant's rows. The command copies the rows as one snapshot shows them,
  into tables of the move in the new cell's database. Then it copies the objects. It compares each copy with its
  original.
- switch: one transaction inserts the copies of the rows into the real tables of the new cell.
- moved: the old cell still refuses changes, until `clean` deletes the tenant's rows and objects in the old cell.

The row of the old cell in `tenant_move` has the direction `out`. After the switch the new cell has a row, too, with the
direction `in` and the stage `live`.

No step runs in both cells, because before the switch the new cell has no row of the tenant, and after the drain no
worker of the old cell claims a task of the tenant.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import asyncpg
import orjson
from pydantic_settings import DotEnvSettingsSource

from leasehold.cli.moving_rows import (
    MovedTable,
    copy_rows,
    count_running_steps,
    delete_rows,
    drop_copies,
    first_table_with_rows,
    hold_new_work,
    leave_shared_limits,
    moved_tables,
    object_prefixes,
    refuse_writes,
    release,
    take_over,
)
from leasehold.cli.running import command_actor, environment
from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import Connection, connected
from leasehold.db.poolers import refuse_shared_sessions
from leasehold.domain.errors import Conflict, Invalid, NotFound, StoreError
from leasehold.domain.ids import new_id
from leasehold.domain.sentences import counted
from leasehold.limits.uploads import remove_below
from leasehold.runtime.gather import gather_or_cancel
from leasehold.schedules import declared
from leasehold.security.cells import parse
from leasehold.security.sealing import Sealing, Unsealable
from leasehold.settings import Settings, as_variables
from leasehold.storage import ObjectStore, Stored
from leasehold.storage.s3 import PutRefused

#: One statement of a move may take this many seconds. This is long, because a large tenant has large tables.
_STATEMENT_SECONDS = 24 * 3600.0
_POLL_SECONDS = 0.5  # between two checks whether running steps have ended
_COPIES_AT_ONCE = 16  # objects
# Settings of this command's two connections. The platform's own planner settings suit statements that find few rows. A
# move reads whole tables, so these settings replace them.
_SESSION = """
SET TimeZone = 'UTC'; SET idle_in_transaction_session_timeout = 0; SET enable_seqscan = on; SET enable_hashjoin = on;
SET enable_mergejoin = on; SET enable_material = on; SET join_collapse_limit = 8; SET plan_cache_mode = auto
"""
# $1 tenant, $2 the old cell, $3 the new cell, $4 direction, $5 stage. If the tenant has a row of an earlier move, this
# replaces the row.
_WRITE_MOVE = """
INSERT INTO tenant_move (tenant_id, from_cell, to_cell, direction, stage) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (tenant_id) DO UPDATE SET from_cell = $2, to_cell = $3, direction = $4, stage = $5,
    started_at = clock_timestamp()
"""
# In the new cell: delete the row that the switch wrote. $1 tenant, $2 the old cell.
_FORGET_SWITCH = "DELETE FROM tenant_move WHERE tenant_id = $1 AND from_cell = $2 AND direction = 'in'"
# The secrets of webhooks and callbacks, and the credentials that clients gave for their generations. A generation that
# has succeeded does not need its credential any more. Any other generation still needs it, because the generation may
# go on, be retried, or be withdrawn (cancelled at its provider).
_SECRETS = """
SELECT secrets FROM webhook WHERE tenant_id = $1 UNION ALL SELECT secrets FROM callback_secret WHERE tenant_id = $1
UNION ALL SELECT ARRAY[convert_to(credential, 'UTF8')] FROM (
    SELECT coalesce(params ->> 'credential', params #>> '{order,params,credential}') AS credential FROM job
    WHERE tenant_id = $1 AND pipeline IN ('generation', 'generation_withdrawal') AND status <> 'succeeded'
) AS sealed WHERE credential IS NOT NULL
"""
# The keys of objects that clients may still upload to the store. A key that ends with `/` is left out, because it is
# the prefix of the files of a form. Clients send forms to the API, and not to the store. The old cell's API refuses
# late forms, so the old store has no files of such forms.
_EXPECTED_UPLOADS = "SELECT key FROM upload WHERE tenant_id = $1 AND open AND right(key, 1) <> '/' ORDER BY key"
# How many uploads clients may still make, and until when. The URL of an upload counts as expired only a minute after it
# has expired, because clocks differ.
_OPEN_UPLOADS = """
SELECT count(*) AS uploads, max(writable_until) + interval '1 minute' AS last_until FROM upload
WHERE tenant_id = $1 AND open AND writable_until + interval '1 minute' > clock_timestamp()
"""
# A command takes this lock in both databases. So only one command at a time moves a tenant, and the command notices if
# both databases are the same.
_LOCK_MOVE = "SELECT pg_try_advisory_lock(hashtextextended('leasehold cells move ' || $1, 0))"


@dataclass(frozen=True, slots=True)
class Move:
    """A move that a command requests. `to`: the new cell. `maps`: files with the map of cells, which the command
    changes after the switch. `drain_seconds`: how long the command waits for running steps.
    """

    tenant: str
    to: str
    maps: tuple[Path, ...] = ()
    drain_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class _Cells:
    """The old cell (`source`) and the new cell (`target`) of a move, with open connections and stores. `tables`: the
    tables with rows of tenants. `source_name`: the old cell's name. `shares_store`: no object is copied or deleted,
    because both cells have the same bucket, or the old cell has no bucket.
    """

    source: Connection
    target: Connection
    source_store: ObjectStore
    target_store: ObjectStore
    tables: list[MovedTable]
    source_name: str
    shares_store: bool


def target_settings(path: Path) -> Settings:
    """The settings of the other cell, from a file of lines `LEASEHOLD_NAME=value`. A setting that the file does not
    name comes from this process's environment, or from the `.env` of the current folder. Exception: the database's
    settings come only from the file.

    Raises Invalid `bad_target` for a file that cannot be used. The error shows no value of the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Invalid("bad_target", f"{path}: {getattr(error, 'strerror', None) or 'no text'}.") from None
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().startswith("LEASEHOLD_"):
            raise Invalid("bad_target", f"{path}: line {number} is not LEASEHOLD_NAME=value.")
        variables[name.strip()] = value.strip().strip("\"'")
    if not variables.keys() & {"LEASEHOLD_DATABASE_URL", "LEASEHOLD_DATABASE_URL_FILE"}:
        raise Invalid("bad_target", f"{path}: it names no LEASEHOLD_DATABASE_URL.")
    with _environment_of(variables):
        return environment(env_file=None)


@contextmanager
def _environment_of(variables: dict[str, str]) -> Iterator[None]:
    """Within the block, this process has the environment of the other cell: its own environment, the settings in
    `.env`, and `variables`. This cell's database settings are left out. `variables` replace settings of the same name,
    even if the one variable is NAME and the other is NAME_FILE.
    """
    saved_environment = dict(os.environ)
    try:
        os.environ.update({name: value for name, value in _settings_of_folder().items() if name not in os.environ})
        for name in list(os.environ):
            setting = name.removesuffix("_FILE")
            if name.startswith("LEASEHOLD_DATABASE_") or {setting, f"{setting}_FILE"} & variables.keys():
                del os.environ[name]
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved_environment)


def _settings_of_folder() -> dict[str, str]:
    """The settings in the `.env` of the current folder, except those for which the environment has NAME_FILE."""
    variables = Settings.without_files(DotEnvSettingsSource(Settings).env_vars)
    names = as_variables(dict.fromkeys(Settings.model_fields, ""))
    return {name.upper(): value for name, value in variables.items() if value is not None and name.upper() in names}


@asynccontextmanager
async def _open_cells(settings: Settings, other_settings: Settings, move: Move) -> AsyncIterator[_Cells]:
    """Yields the two cells of the move. Raises Invalid or Conflict, before any change, if the tenant cannot move
    between these cells.
    """
    _check_cell_names(settings, other_settings, move)
    # The lock of the move belongs to a session of PostgreSQL, so no other client may share this session. `direct()`
    # gives the URL of PostgreSQL itself. If this URL leads to a pooler that shares sessions, `refuse_shared_sessions`
    # raises an error.
    settings, other_settings = (
        each.direct().model_copy(update={"database_timeout": _STATEMENT_SECONDS}) for each in (settings, other_settings)
    )
    await refuse_shared_sessions(settings)
    await refuse_shared_sessions(other_settings)
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(connected(settings, "cells"))
        target = await stack.enter_async_context(connected(other_settings, "cells"))
        for connection, sentence in (
            (source, f"Another command moves {move.tenant} now."),
            (target, "The two cells have the same database, or another command moves the tenant now."),
        ):
            await connection.execute(_SESSION)
            if not await connection.fetchval(_LOCK_MOVE, move.tenant):
                raise Conflict("move_in_progress", sentence)
        if await _revisions(source) != await _revisions(target):
            raise Conflict("schemas_differ", "The schemas of the two cells differ: run `leasehold migrate` of one release in both.")  # fmt: skip  # noqa: E501
        stores = source_store, target_store = (
            ObjectStore.from_settings(settings),
            ObjectStore.from_settings(other_settings),
        )
        for store in stores:
            await store.open()
            stack.push_async_callback(store.close)
        shares_store = source_store.is_absent or await _is_one_bucket(source_store, target_store)
        tables = await moved_tables(source)
        yield _Cells(source, target, source_store, target_store, tables, settings.cell, shares_store)


def _check_cell_names(settings: Settings, other_settings: Settings, move: Move) -> None:
    """Raises Invalid if the move does not lead from the cell of `settings` to the cell of `other_settings`."""
    if not settings.cell:
        raise Invalid("no_cell", "This installation is not a cell: set LEASEHOLD_CELL.")
    if move.to == settings.cell:
        raise Invalid("same_cell", f"The tenant lives in cell {move.to} already: name another cell.")
    if other_settings.cell != move.to:
        raise Invalid(
            "bad_target", f"The settings of the other cell are those of cell {other_settings.cell}, not {move.to}."
        )


async def _is_one_bucket(store: ObjectStore, other_store: ObjectStore) -> bool:
    """Whether both stores are the same bucket, which may have two addresses. In one bucket, an object that the command
    deletes for one cell is gone for both cells. Raises Conflict `target_store` if the other store accepts no objects.
    """
    key = f"probe/move-{new_id()}"
    await store.put(key, b"?", content_type="text/plain", metadata={})
    try:
        if await other_store.head(key) is not None:
            return True
    except StoreError as error:
        raise _store_conflict(error) from error
    finally:
        await store.delete(key)
    try:  # find an error of the store now, because later the old cell already refuses the tenant's requests
        await other_store.put(key, b"?", content_type="text/plain", metadata={})
        await other_store.delete(key)
    except StoreError as error:
        raise _store_conflict(error) from error
    return False


def _store_conflict(error: StoreError) -> Conflict:
    return Conflict("target_store", f"The store of the other cell takes no objects ({error}): mend its settings first.")


async def _revisions(connection: Connection) -> list[tuple[str, str]]:
    """The revision of each schema of the cell. Raises Conflict for a schema that is too old for moves."""
    tables = await connection.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"
        " AND starts_with(relname, 'alembic_version') ORDER BY 1"
    )
    revisions = [
        (row["relname"], await connection.fetchval(f'SELECT version_num FROM "{row["relname"]}"')) for row in tables
    ]
    if not await connection.fetchval("SELECT to_regclass('tenant_move') IS NOT NULL"):
        raise Conflict("schemas_differ", "A cell has no table tenant_move yet: run `leasehold migrate` in both.")
    return revisions


async def move_tenant(settings: Settings, other_settings: Settings, move: Move) -> dict[str, Any]:
    """Move the tenant, or go on with a move that was interrupted. Returns a report of the move.

    Raises NotFound for an unknown tenant, and Conflict if the new cell has rows of the tenant. Raises Conflict
    `still_running` if the tenant's running steps do not end in time. The move then stays in the stage `drain`.
    """
    for path in move.maps:
        _map_with_tenant(path, move)  # check now: a wrong map must not end the command after the switch
    async with _open_cells(settings, other_settings, move) as cells:
        stage = await _begin_or_resume(cells, other_settings, settings, move)
        objects = 0
        if stage == "drain":
            await hold_new_work(cells.source, move.tenant)
            await _drain(cells, move)
            await refuse_writes(cells.source, move.tenant, cells.tables)
            await _set_stage(cells, move, "copy")
            stage = "copy"
        if stage == "copy":
            await copy_rows(cells.source, cells.target, move.tenant, cells.tables)
            objects = await _copy_objects(cells, move)
            await _set_stage(cells, move, "switch")
            stage = "switch"
        if stage == "switch":
            await _switch(cells, move)
            await _set_stage(cells, move, "moved")
        for path in move.maps:
            _change_map(path, move)
        objects += await _copy_late_uploads(cells, move)
        return {
            "tenant": move.tenant,
            "from": cells.source_name,
            "to": move.to,
            "stage": "moved",
            "objects": objects,
            "maps": [str(path) for path in move.maps],
        }


async def _begin_or_resume(cells: _Cells, other_settings: Settings, settings: Settings, move: Move) -> str:
    """The stage of the tenant's present move. If the tenant has no move, check the cells, and begin a move with the
    stage `drain`. Raises the errors of `_check_seals`, and NotFound and Conflict as `move_tenant` documents them.
    Raises Conflict `move_in_progress` if the tenant already moves to another cell.

    Raises Conflict `earlier_move_not_cleaned` if the tenant came from a third cell, and `clean` has not run there. That
    `clean` needs this cell's row of the earlier move, and the row of the new move would replace it.
    """
    row = await _move_row(cells.source, move.tenant)
    if row is not None and row["direction"] == "out":
        if row["to_cell"] != move.to:
            raise Conflict("move_in_progress", f"The tenant moves to cell {row['to_cell']} already: --abort ends that.")
        return str(row["stage"])
    if await first_table_with_rows(cells.source, move.tenant, cells.tables) is None:
        raise NotFound("tenant_unknown", f"Cell {cells.source_name} has no rows of a tenant {move.tenant}.")
    if (name := await first_table_with_rows(cells.target, move.tenant, cells.tables)) is not None:
        raise Conflict("target_has_tenant", f"Cell {move.to} has rows of {move.tenant} already, in the table {name}.")
    # Exception: if the tenant moves back to the cell from which it came, nothing is left to clean in that cell, because
    # the check above has found no rows in it.
    if row is not None and row["from_cell"] != move.to:
        before = row["from_cell"]
        raise Conflict(
            "earlier_move_not_cleaned",
            f"{move.tenant} came from cell {before}, and that move is not cleaned: in cell {before}, run `leasehold"
            f" cells move {move.tenant} --to {cells.source_name} --target-env FILE --clean` first.",
        )
    await _check_seals(cells.source, other_settings, settings, move)
    await drop_copies(cells.target, move.tenant)
    if await _is_live(cells, move):  # a `clean` that was killed has left the row of an earlier move
        await cells.target.execute(_FORGET_SWITCH, move.tenant, cells.source_name)
    async with cells.source.transaction():
        await cells.source.execute(_WRITE_MOVE, move.tenant, cells.source_name, move.to, "out", "drain")
        await _record(cells.source, "tenant.move_started", move.tenant, cells.source_name, move.to)
    return "drain"


async def _check_seals(source: Connection, other_settings: Settings, settings: Settings, move: Move) -> None:
    """Raises Conflict `sealing_keys_differ` if the new cell could not open the tenant's secrets."""
    rows = await source.fetch(_SECRETS, move.tenant)
    own_seals, target_seals = Sealing(settings), Sealing(other_settings)
    for sealed_secret in chain.from_iterable(row["secrets"] for row in rows):
        try:
            own_seals.open(sealed_secret)
        except Unsealable:
            continue  # this cell cannot use the secret either
        try:
            target_seals.open(sealed_secret)
        except Unsealable:
            raise Conflict(
                "sealing_keys_differ",
                f"Cell {move.to} cannot open the tenant's secrets: add the sealing key of cell {settings.cell} to the"
                " end of its LEASEHOLD_SEALING_KEYS.",
            ) from None


async def _drain(cells: _Cells, move: Move) -> None:
    """Wait until no step of the tenant runs. Raises Conflict `still_running` after `drain_seconds`."""
    deadline = monotonic() + move.drain_seconds
    while count := await count_running_steps(cells.source, move.tenant):
        if monotonic() > deadline:
            steps, verb = counted(count, "step", "steps"), "runs" if count == 1 else "run"
            raise Conflict(
                "still_running",
                f"{steps} of {move.tenant} still {verb}. The tenant waits: run the command again, or with --abort.",
            )
        await asyncio.sleep(_POLL_SECONDS)


async def _switch(cells: _Cells, move: Move) -> None:
    if await _is_live(cells, move):
        return  # an earlier command committed the switch, and was interrupted
    if (name := await first_table_with_rows(cells.target, move.tenant, cells.tables)) is not None:
        raise Conflict("target_has_tenant", f"Cell {move.to} has rows of {move.tenant} already, in the table {name}.")
    async with cells.target.transaction():
        await take_over(cells.target, move.tenant, cells.tables)
        await cells.target.execute(_WRITE_MOVE, move.tenant, cells.source_name, move.to, "in", "live")
        await _record(cells.target, "tenant.moved_in", move.tenant, cells.source_name, move.to)


async def _is_live(cells: _Cells, move: Move) -> bool:
    """Whether the switch is committed, so that the tenant belongs to the new cell."""
    row = await _move_row(cells.target, move.tenant)
    return row is not None and row["direction"] == "in" and row["from_cell"] == cells.source_name


async def abort(settings: Settings, other_settings: Settings, move: Move) -> dict[str, Any]:
    """Undo the move. The tenant stays in this cell. Raises NotFound if there is no such move, and Conflict after the
    switch.
    """
    async with _open_cells(settings, other_settings, move) as cells:
        row = await _present_move(cells, move)
        if row["stage"] == "moved" or await _is_live(cells, move):
            raise Conflict("already_moved", f"{move.tenant} lives in cell {move.to} now: move it back from there.")
        await drop_copies(cells.target, move.tenant)
        if not cells.shares_store:
            await _delete_objects(cells, cells.target_store, move)
        async with cells.source.transaction():
            await release(cells.source, move.tenant)
            await cells.source.execute("DELETE FROM tenant_move WHERE tenant_id = $1", move.tenant)
            await _record(cells.source, "tenant.move_aborted", move.tenant, cells.source_name, move.to)
        return {"tenant": move.tenant, "from": cells.source_name, "to": move.to, "stage": "aborted"}


async def clean(settings: Settings, other_settings: Settings, move: Move) -> dict[str, Any]:
    """Delete this cell's rows and objects of a tenant that has moved. After an interruption, a second call continues.
    Raises NotFound if there is no such move. Raises Conflict in three cases: the move has not ended yet; clients may
    still upload to this cell; or workers of this cell still write schedules of the tenant.
    """
    async with _open_cells(settings, other_settings, move) as cells:
        objects = 0
        # If only the new cell has a row of the move, an interrupted `clean` has deleted everything here.
        if await _move_row(cells.source, move.tenant) is not None or not await _is_live(cells, move):
            objects = await _clean_source(cells, move)
        await cells.target.execute(_FORGET_SWITCH, move.tenant, cells.source_name)
        return {"tenant": move.tenant, "from": cells.source_name, "to": move.to, "stage": "cleaned", "objects": objects}


async def _clean_source(cells: _Cells, move: Move) -> int:
    """Delete the old cell's rows and objects of the tenant. Before that, copy late uploads to the new cell. Returns the
    number of these uploads. Raises the errors of `clean`.
    """
    row = await _present_move(cells, move)
    if row["stage"] != "moved" or not await _is_live(cells, move):
        raise Conflict("not_moved", f"{move.tenant} has not moved yet: its stage is {row['stage']}.")
    await _refuse_open_uploads(cells, move)
    await _refuse_written_schedules(cells, move)
    objects = await _copy_late_uploads(cells, move)
    if not cells.shares_store:
        await _delete_objects(cells, cells.source_store, move)
    async with cells.source.transaction():
        await delete_rows(cells.source, move.tenant, cells.tables)
        await release(cells.source, move.tenant)
        await cells.source.execute("DELETE FROM tenant_move WHERE tenant_id = $1", move.tenant)
        await _record(cells.source, "tenant.move_cleaned", move.tenant, cells.source_name, move.to)
    return objects


async def state_of_move(settings: Settings, tenant: str) -> dict[str, Any]:
    """This cell's row of the move, and the tenant's running steps here (`running`). Raises NotFound without a row."""
    async with connected(settings.direct(), "cells") as connection:
        row = await _move_row(connection, tenant)
        if row is None:
            raise NotFound("no_move", f"No move of {tenant} is known here.")
        state = dict(row) | {"running": await count_running_steps(connection, tenant)}
    return {("tenant" if name == "tenant_id" else name): value for name, value in state.items()}


async def _present_move(cells: _Cells, move: Move) -> asyncpg.Record:
    row = await _move_row(cells.source, move.tenant)
    if row is None or row["direction"] != "out" or row["to_cell"] != move.to:
        raise NotFound("no_move", f"{move.tenant} does not move from cell {cells.source_name} to cell {move.to}.")
    return row


async def _move_row(connection: Connection, tenant: str) -> asyncpg.Record | None:
    return await connection.fetchrow("SELECT * FROM tenant_move WHERE tenant_id = $1", tenant)


async def _set_stage(cells: _Cells, move: Move, stage: str) -> None:
    async with cells.source.transaction():
        await cells.source.execute("UPDATE tenant_move SET stage = $2 WHERE tenant_id = $1", move.tenant, stage)
        if stage == "moved":
            # In the old cell the tenant's jobs never end, so they must no longer fill limits that all tenants share.
            await leave_shared_limits(cells.source, move.tenant)
            await _record(cells.source, "tenant.moved_out", move.tenant, cells.source_name, move.to)


async def _record(connection: Connection, action: str, tenant: str, from_cell: str, to_cell: str) -> None:
    await audit.record(
        connection, command_actor(), action, Target("tenant", tenant, tenant), from_cell=from_cell, to_cell=to_cell
    )


# --- objects


async def _copy_objects(cells: _Cells, move: Move) -> int:
    """Copy the tenant's objects that the other store lacks, and check the copies. Returns how many of the tenant's
    objects the other store has then. If both cells have the same store, this copies nothing and returns 0.
    """
    if cells.shares_store:
        return 0
    limit = asyncio.Semaphore(_COPIES_AT_ONCE)

    async def copy(key: str) -> int:
        async with limit:
            return await _copy_object(cells.source_store, cells.target_store, key)

    copied_objects = 0
    for prefix in await object_prefixes(cells.source, move.tenant, cells.tables):
        keys = [stored.key async for stored in cells.source_store.list(prefix)]
        copied_objects += sum(await gather_or_cancel(copy(key) for key in keys))
    return copied_objects


async def _copy_object(source: ObjectStore, target: ObjectStore, key: str, *, only_new: bool = False) -> int:
    """Copy one object, unless the target has the same bytes already, and compare the copy with the original. Returns 1,
    or 0 for an object that has expired meanwhile. Raises Conflict `copy_differs`. `only_new`: do not replace an object
    of the target, but raise PutRefused. (Some stores do not support this condition.)
    """
    stored = await source.head(key)
    if stored is None:
        return 0
    if stored.sha256 and _is_same(stored, await target.head(key)):
        return 1
    async with target.upload(
        key, content_type=stored.content_type, metadata=stored.metadata, only_new=only_new
    ) as upload:
        async for piece in source.pieces(key):
            await upload.write(piece)
        written = await upload.finish()
    if written.size != stored.size or (stored.sha256 and written.sha256 != stored.sha256):
        raise Conflict("copy_differs", f"The copy of the object {key} differs. Run the command again.")
    if not _is_same(stored, await target.head(key)):
        raise Conflict("copy_differs", f"The object {key} is not in the other store. Run the command again.")
    if not stored.sha256:  # a client uploaded the object, so it has no digest, and may change
        copy, original_now = await target.digest(key, max_bytes=stored.size), await source.head(key)
        if copy.sha256 != written.sha256 or original_now is None or original_now.etag != stored.etag:
            raise Conflict("copy_differs", f"The object {key} has changed meanwhile. Run the command again.")
    return 1


def _is_same(stored: Stored, copy: Stored | None) -> bool:
    return copy is not None and (copy.size, copy.sha256) == (stored.size, stored.sha256)


async def _copy_late_uploads(cells: _Cells, move: Move) -> int:
    """Copy the objects that clients have uploaded to the old store since the stage `copy`, if the new cell still
    expects them. Returns the number of copies. An object that the new store already has stays as it is.
    """
    copied_objects = 0
    if not cells.shares_store:
        for row in await cells.target.fetch(_EXPECTED_UPLOADS, move.tenant):
            key = row["key"]
            if await cells.target_store.head(key) is None:
                with suppress(PutRefused):  # the client has uploaded the object to the new store meanwhile
                    copied_objects += await _copy_object(cells.source_store, cells.target_store, key, only_new=True)
    return copied_objects


async def _refuse_open_uploads(cells: _Cells, move: Move) -> None:
    """Raises Conflict `uploads_open` while this cell's URLs still accept uploads of the tenant, or forms may arrive."""
    row = await cells.source.fetchrow(_OPEN_UPLOADS, move.tenant)
    if row is not None and row["uploads"]:
        uploads = counted(row["uploads"], "upload", "uploads")
        raise Conflict(
            "uploads_open",
            f"Clients may still send {uploads} of {move.tenant} to cell {cells.source_name}:"
            f" run the command again after {row['last_until']:%H:%M:%S} UTC.",
        )


async def _refuse_written_schedules(cells: _Cells, move: Move) -> None:
    """Raises Conflict `schedules_written` while a worker of this cell has code that declares schedules of the tenant.
    Such a worker writes these schedules into the database. After `clean` has deleted them, the worker would write them
    again, and each tick would fire in both cells.
    """
    apps = await declared.apps_with_writer(cells.source, move.tenant)
    if apps:
        word, verb = ("app", "declares") if len(apps) == 1 else ("apps", "declare")
        raise Conflict(
            "schedules_written",
            f"Workers of cell {cells.source_name} write the schedules of {move.tenant} that the {word}"
            f" {', '.join(apps)} {verb}. Give these workers the settings of cell {move.to}, or stop them, and run the"
            f" command again. If they have died: after {max(apps.values()):%H:%M:%S} UTC.",
        )


async def _delete_objects(cells: _Cells, store: ObjectStore, move: Move) -> None:
    for prefix in await object_prefixes(cells.source, move.tenant, cells.tables):
        await remove_below(store, prefix)


# --- the map


def _map_with_tenant(path: Path, move: Move) -> bytes:
    """The bytes of the map with the tenant in its new cell. Raises Invalid `bad_map` for a map that cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
        cells = parse(text)
    except (OSError, ValueError) as error:
        raise Invalid("bad_map", f"{path}: {getattr(error, 'strerror', None) or error}.") from None
    if move.to not in cells.addresses:
        raise Invalid("bad_map", f"{path}: the map names no cell {move.to}.")
    document = orjson.loads(text)
    document["tenants"] = document.get("tenants", {}) | {move.tenant: move.to}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def _change_map(path: Path, move: Move) -> None:
    """Read the map again, because the move of another tenant may have changed it since this move began. Then replace
    its file in one step, so that a reader sees the old map or the new map. The lock is on a separate file, because a
    lock on the map's file would not hold for the file that replaces it.
    """
    with path.with_name(f".{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new_path = path.with_name(f".{path.name}.new")
        new_path.write_bytes(_map_with_tenant(path, move))
        new_path.chmod(path.stat().st_mode & 0o777)
        new_path.replace(path)
