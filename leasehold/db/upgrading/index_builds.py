"""Builds and drops indexes in revisions (migrations), while other sessions write. A build that died is repeated.

A `CREATE INDEX CONCURRENTLY` that dies half-way leaves an invalid index. PostgreSQL maintains that index at every
write, but no query uses it. So the next try must drop the index first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alembic import op
from sqlalchemy import TextClause, text

#: The name of an option of alembic's context. The option maps the name of each index of the database to whether the
#: index is valid. rendering.py sets the option, because rendering has no connection by which `_is_valid` could ask
#: PostgreSQL.
INDEXES_OPTION = "leasehold_indexes"


def build_index(
    name: str, table: str, columns: Sequence[str | TextClause], *, where: str | None = None, unique: bool = False
) -> None:
    """Build the index while other sessions write to `table`. If a valid index of this name exists, keep it. If an
    invalid index of this name exists, drop it first. So a revision that was interrupted can run again.

    The statements before this call in the revision are committed first, so they must be safe to repeat
    (`if_not_exists`).
    """
    is_valid = _is_valid(name)
    with op.get_context().autocommit_block():
        # No time limit: the build waits for the transactions that run now, but nobody waits behind the build.
        op.execute("SET lock_timeout = 0")
        if is_valid is False:
            op.execute(f'DROP INDEX CONCURRENTLY "{name}"')
        if not is_valid:
            op.create_index(
                name,
                table,
                list(columns),
                unique=unique,
                postgresql_where=None if where is None else text(where),
                postgresql_concurrently=True,
            )
        op.execute("RESET lock_timeout")


def drop_index(name: str) -> None:
    """Drop the index, if it exists, while other sessions read and write its table. As in `build_index`, the statements
    before this call are committed first.
    """
    with op.get_context().autocommit_block():
        # No time limit: the drop waits for the transactions that run now, but nobody waits behind the drop.
        op.execute("SET lock_timeout = 0")
        op.execute(f'DROP INDEX CONCURRENTLY IF EXISTS "{name}"')
        op.execute("RESET lock_timeout")


def end_transaction() -> None:
    """Commit the statements before this call. They must be safe to repeat (`if_not_exists`).

    Call this between two statements that lock different tables against writers. Under load, some transaction nearly
    always holds a lock on one of the tables. So a revision that needed both locks at the same time would rarely get
    them.
    """
    with op.get_context().autocommit_block():
        """The block commits when it begins, and begins a transaction when it ends."""


def _is_valid(name: str) -> bool | None:
    """Whether the index is valid. None: there is no such index."""
    context = op.get_context()
    if context.as_sql:
        validity_by_index: Mapping[str, bool] = context.opts.get(INDEXES_OPTION, {})
        return validity_by_index.get(name)
    is_valid: bool | None = op.get_bind().scalar(
        text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)"), {"name": f'"{name}"'}
    )
    return is_valid
