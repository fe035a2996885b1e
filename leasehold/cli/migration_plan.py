"""Prints the plan of `leasehold migrate --plan`: what a migration will do, statement by statement."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

from leasehold.db.upgrading.plan import Plan, PlannedRevision, PlannedStatement, Size
from leasehold.settings import Settings

_WIDTH = 300  # the most characters of a statement that are printed
#: Printed for a statement whose locks the plan does not know.
_UNKNOWN_EFFECT = "no rule covers this statement: expect ACCESS EXCLUSIVE on every table that it names"


def as_json(plan: Plan, settings: Settings) -> dict[str, Any]:
    """The plan as JSON. A statement waits for a lock for `lock_seconds`, and is tried again for up to `seconds`."""
    return {
        "lock_seconds": settings.migrate_lock_seconds,
        "seconds": settings.migrate_seconds,
        "revisions": [_revision_json(planned_revision, plan.sizes) for planned_revision in plan.revisions],
    }


def _revision_json(planned_revision: PlannedRevision, sizes: dict[str, Size]) -> dict[str, Any]:
    """A revision as JSON. `sizes`: table -> its size. The member `narrows`: why older code may fail after the revision;
    empty: the revision only adds.
    """
    return {
        "schema": planned_revision.schema,
        "revision": planned_revision.revision,
        "title": planned_revision.title,
        "phase": planned_revision.phase,
        "narrows": list(planned_revision.narrows),
        "may_run_before_the_new_code": planned_revision.beside_old_code or None,
        "transactions": [
            [_statement_json(step, sizes) for step in transaction] for transaction in planned_revision.transactions
        ],
    }


def _statement_json(step: PlannedStatement, sizes: dict[str, Size]) -> dict[str, Any]:
    """A statement as JSON, with its locks. `stops`: which other statements must wait for the lock, such as `writes`.
    `work`: what the statement does to the whole table under the lock: `scan` or `rewrite`.
    """
    locks = [
        {
            "table": lock.table,
            "mode": lock.mode,
            "stops": lock.stops or None,
            "work": lock.work or None,
            "rows": sizes[lock.table].rows if lock.table in sizes else None,
            "bytes": sizes[lock.table].bytes if lock.table in sizes else None,
        }
        for lock in step.effect.locks
    ]
    return {
        "statement": step.statement,
        "known": step.effect.known,
        "locks": locks,
        "held_while_reading": list(step.scanned_under_locks),
    }


def show(console: Console, plan: Plan, settings: Settings) -> None:
    if not plan.revisions:
        console.print("Nothing is pending: the schema is up to date.")
        return
    for planned_revision in plan.revisions:
        _show_revision(console, planned_revision, plan.sizes)
    console.print(
        f"A statement waits {settings.migrate_lock_seconds:g} s for a lock, lets others through, and is tried again for"
        f" {settings.migrate_seconds:g} s. CREATE INDEX CONCURRENTLY waits for the end of older transactions."
    )


def _show_revision(console: Console, planned_revision: PlannedRevision, sizes: dict[str, Size]) -> None:
    schema = "" if planned_revision.schema == "leasehold" else f" ({planned_revision.schema})"
    console.print(Text(f"{planned_revision.revision}{schema}: {planned_revision.title}", style="bold"))
    console.print(
        f"  {planned_revision.phase}: {'; '.join(planned_revision.narrows) or 'it only adds'}",
        highlight=False,
        markup=False,
    )
    for number, transaction in enumerate(planned_revision.transactions, 1):
        console.print(f"  transaction {number}", highlight=False)
        for step in transaction:
            text = textwrap.shorten(step.statement, _WIDTH, placeholder=" ...")
            console.print(f"    {text}", highlight=False, markup=False, soft_wrap=True)
            for line in _lock_lines(step, sizes):
                console.print(f"      {line}", highlight=False, markup=False, soft_wrap=True)
    console.print()


def _lock_lines(step: PlannedStatement, sizes: dict[str, Size]) -> list[str]:
    # A line for each lock: which other statements wait for it, what this statement does to the table meanwhile, and
    # until when the lock is held.
    if not step.effect.known:
        return [_UNKNOWN_EFFECT]
    lines = []
    for lock in step.effect.locks:
        waits = f"{lock.stops} wait" if lock.stops else "nobody waits"
        work = {"scan": ", reads the table", "rewrite": ", rewrites the table"}.get(lock.work, "")
        size = sizes.get(lock.table)
        rows = f" (about {size.rows:,} rows, {size.bytes / 2**20:,.0f} MiB)" if work and size else ""
        line = f"{lock.table}: {lock.mode}, {waits}{work}{rows}"
        if lock.stops:
            scanned_tables = " and ".join(step.scanned_under_locks)
            line += f", until {scanned_tables} is read" if scanned_tables else ", for a moment"
        lines.append(line)
    return lines
