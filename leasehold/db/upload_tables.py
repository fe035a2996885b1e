"""The schema of uploads under way: what clients may still send to the store, so that nothing lies there unseen."""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, BigInteger, Boolean, Column, Index, Integer, Table, Text, Uuid, text

from leasehold.db.tables import metadata

upload = Table(
    "upload",
    metadata,
    Column("key", Text, primary_key=True),  # of the object; or, with a `/` at its end, the prefix of several
    Column("tenant_id", Text, nullable=False),
    Column("open", Boolean, nullable=False),  # unfinished: counts against the tenant's bytes
    Column("exact", Boolean, nullable=False),  # the store admits no other size
    Column("bytes", BigInteger, nullable=False),  # what it counts: as declared, the most it may be, or what lies there
    Column("most", BigInteger, nullable=False),  # a larger object is deleted; -1: any is
    Column("writable_until", TIMESTAMP(timezone=True), nullable=False),  # nobody may begin to send after this
    Column("look_at", TIMESTAMP(timezone=True), nullable=False),  # the sweeper looks what lies there
    Column("forget_at", TIMESTAMP(timezone=True), nullable=False),  # what was begun in time has ended by then
    # Of a file that an external worker hands in: whose it is. It is given up when that attempt has ended.
    Column("task_id", Uuid),
    Column("epoch", Integer),
    Index("upload_look", "look_at"),
    Index("upload_attempt", "task_id", "epoch", postgresql_where=text("task_id IS NOT NULL AND open")),
    Index("upload_open", "tenant_id", postgresql_where=text("open")),
)
