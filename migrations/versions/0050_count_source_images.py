"""count the bytes of source images

Revision ID: 0050_source_bytes
Revises: 0049_ended_sessions
May run before the new code: yes; it only adds a column, which PostgreSQL does without writing a row, and an index.

Source images of generations counted in no bound on a tenant's stored bytes. The images of earlier releases count 0 bytes;
they expire.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from leasehold.db.upgrading.index_builds import build_index, drop_index

revision: str = "0050_source_bytes"
down_revision: str | None = "0049_ended_sessions"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_INDEX = "source_image_tenant"


def upgrade() -> None:
    size = sa.Column("size", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("source_image", size, if_not_exists=True)
    build_index(_INDEX, "source_image", ["tenant_id"])


def downgrade() -> None:
    drop_index(_INDEX)
    op.drop_column("source_image", "size")
