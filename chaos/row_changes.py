"""Makes triggers in the run's database. They record every change of tasks, jobs, admissions to limits, hints and
workflow calls.

The platform does not write these records, so the checker can compare the platform's own events with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import orjson

#: The setting of a PostgreSQL session that names its process.
PROCESS = "chaos.process"

_INSTALL = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.change (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL,
    ahead double precision NOT NULL,
    xact text NOT NULL DEFAULT pg_current_xact_id()::text,
    process text,
    kind text NOT NULL,
    before jsonb,
    after jsonb
);
CREATE FUNCTION chaos.ahead() RETURNS double precision LANGUAGE sql VOLATILE AS $$ SELECT AHEAD::double precision $$;
CREATE FUNCTION chaos.note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    ahead double precision;
    read_at timestamptz;
BEGIN
    LOOP  -- until both reads of `ahead` agree: then the clock did not jump between them
        ahead := chaos.ahead();
        read_at := clock_timestamp();
        EXIT WHEN ahead = chaos.ahead();
    END LOOP;
    INSERT INTO chaos.change (at, ahead, process, kind, before, after) VALUES (
        read_at - make_interval(secs => ahead), ahead,
        current_setting('chaos.process', true), coalesce(TG_ARGV[0], TG_TABLE_NAME),
        CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END, CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON task FOR EACH ROW EXECUTE FUNCTION chaos.note();
CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON job FOR EACH ROW EXECUTE FUNCTION chaos.note();
CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON gate_job FOR EACH ROW EXECUTE FUNCTION chaos.note();
CREATE TRIGGER chaos AFTER INSERT OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION chaos.note();
"""
#: Makes the triggers of workflow calls and of batches of hints, if the schema has their tables. The release's schema
#: lacks the tables: run this once more after its upgrade.
WATCH_LATER_TABLES = """
DO $$ BEGIN
    IF to_regclass('journal') IS NOT NULL THEN
        CREATE OR REPLACE TRIGGER call AFTER INSERT OR UPDATE OR DELETE ON journal
        FOR EACH ROW EXECUTE FUNCTION chaos.note('call');
    END IF;
    IF to_regclass('outbox_batch') IS NOT NULL THEN
        CREATE OR REPLACE TRIGGER chaos AFTER INSERT OR DELETE ON outbox_batch
        FOR EACH ROW EXECUTE FUNCTION chaos.note();
    END IF;
END $$;
"""


def install(clock: Path | None) -> str:
    """The statements that make the triggers. `clock`: the file that says by how many seconds the server's clock is
    ahead; None: the clock cannot jump.
    """
    return (_INSTALL + WATCH_LATER_TABLES).replace("AHEAD", "0" if clock is None else f"pg_read_file('{clock}')")


@dataclass(frozen=True, slots=True)
class Change:
    """One committed change of one row. `number`: the changes of a row have rising numbers.

    `at`: in seconds since 1970, by the true clock. `ahead`: by how many seconds the database's clock was ahead of the
    true clock. `kind`: the kind of row: its table, or `call` for a row of the table `journal`.
    """

    number: int
    at: float
    xact: str
    process: str  # "" if no worker wrote the change
    kind: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    ahead: float = 0.0

    @property
    def row(self) -> dict[str, Any]:
        """The row after the change; of a deleted row, the row before it."""
        return self.after or self.before or {}

    def moved(self) -> tuple[str | None, str | None] | None:
        """The status before and after the change. None: the status is the same."""
        was = self.before["status"] if self.before else None
        now = self.after["status"] if self.after else None
        return None if was == now else (was, now)


async def changes(connection: asyncpg.Connection[asyncpg.Record]) -> list[Change]:
    """All changes, in order."""
    rows = await connection.fetch(
        "SELECT number, at, ahead, xact, coalesce(process, '') AS process, kind, before::text, after::text"
        " FROM chaos.change ORDER BY number"
    )
    return [
        Change(row["number"], seconds(row["at"]), row["xact"], row["process"], row["kind"], _read(row["before"]),
               _read(row["after"]), row["ahead"])
        for row in rows
    ]  # fmt: skip


def seconds(instant: datetime | str | None) -> float:
    """Seconds since 1970; 0 for None; infinity for PostgreSQL's `infinity` (a workflow that only a signal wakes)."""
    if instant is None:
        return 0.0
    if instant == "infinity":
        return float("inf")
    return (datetime.fromisoformat(instant) if isinstance(instant, str) else instant).timestamp()


def _read(text: str | None) -> dict[str, Any] | None:
    return None if text is None else orjson.loads(text)
