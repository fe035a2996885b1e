"""Declares the tables of uploads and downloads. `upload` has a row for each object key that a client may still write.

The row is written before the client can write the object. So housekeeping finds every object that a client left behind
(limits/uploads.py).
"""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, BigInteger, Boolean, Column, Index, Integer, Table, Text, Uuid, func, text

from leasehold.db.tables import metadata

upload = Table(
    "upload",
    metadata,
    Column("key", Text, primary_key=True),  # the object's key; with a `/` at its end, the prefix of several objects
    Column("tenant_id", Text, nullable=False),
    Column("open", Boolean, nullable=False),  # the upload is unfinished
    Column("exact", Boolean, nullable=False),  # the store accepts only an object of exactly `bytes` bytes
    # What the tenant's quota counts. At first this is the declared size or, without a declared size, the largest
    # possible size. Later it is the size of the object that housekeeping found.
    Column("bytes", BigInteger, nullable=False),
    # the largest allowed size of the object, in bytes. Housekeeping deletes a larger object; with -1, any object
    Column("most", BigInteger, nullable=False),
    Column("writable_until", TIMESTAMP(timezone=True), nullable=False),  # no client may begin to send after this
    Column("look_at", TIMESTAMP(timezone=True), nullable=False),  # when housekeeping inspects the stored object next
    # when housekeeping deletes this row. By then every transfer that began before `writable_until` has ended
    Column("forget_at", TIMESTAMP(timezone=True), nullable=False),
    # The attempt of the external worker that sends this file. The upload is abandoned when the attempt has ended.
    Column("task_id", Uuid),
    Column("epoch", Integer),
    Index("upload_look", "look_at"),
    Index("upload_attempt", "task_id", "epoch", postgresql_where=text("task_id IS NOT NULL AND open")),
    Index("upload_open", "tenant_id", postgresql_where=text("open")),
)

#: Downloads of artifacts, in progress or of the last day. The limits of downloads count them (limits/downloads.py).
download = Table(
    "download",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    # The prefix of an API key. If the key was made by a rotation, this is the prefix of the first key of all its
    # rotations, because a rotation must not reset the limits.
    Column("key_prefix", Text, nullable=False),
    # the artifact's size while it is sent; afterwards the bytes that were sent
    Column("bytes", BigInteger, nullable=False),
    Column("started_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    # after this the download counts as over, because a process that died cannot set `finished_at`
    Column("lapses_at", TIMESTAMP(timezone=True), nullable=False),
    Column("finished_at", TIMESTAMP(timezone=True)),
    # The limits use the first index, because they count the downloads of a key in the last day. Housekeeping uses the
    # second index.
    Index("download_of_key", "key_prefix", "started_at"),
    Index("download_started", "started_at"),
)
