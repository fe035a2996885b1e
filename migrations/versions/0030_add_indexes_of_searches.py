"""add indexes of searches

Revision ID: 0030_indexes_of_searches
Revises: 0029_incarnation_of_workers
May run before the new code: yes; it adds indexes, which hold only the rows of clients that name a scope or a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from leasehold.db.upgrading.index_builds import build_index

revision: str = "0030_indexes_of_searches"
down_revision: str | None = "0029_incarnation_of_workers"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_INDEXES: dict[str, tuple[str, list[str | sa.TextClause], str]] = {
    "job_with_key": ("job", ["tenant_id", sa.text("id DESC")], "dedupe_key IS NOT NULL"),
    "run_with_scope": ("run", ["tenant_id", sa.text("job_id DESC")], "scope_id <> ''"),
}


def upgrade() -> None:
    for name, (table, columns, holds) in _INDEXES.items():
        build_index(name, table, columns, where=holds)


def downgrade() -> None:
    for name, (table, _, _) in _INDEXES.items():
        op.drop_index(name, table_name=table)
