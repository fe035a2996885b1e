"""Gathers the history of a run: rows, audit, objects, queues and processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import aio_pika
import asyncpg
from aiobotocore.session import get_session

from chaos import audit, journal
from chaos.history import History, Order, Row, StoredObject, Terms
from chaos.load import PICTURE_TYPE, WORDS, Load, picture
from chaos.pipelines import KINDS, declared
from chaos.settings import LEASE_SECONDS, MAX_LOSSES, SUBSCRIBER, SWEEP_SECONDS, TRUST_MARGIN_SECONDS
from chaos.stack import CLIENT, Installation
from chaos.steps import text_of
from leasehold.broker.base import BANDS
from leasehold.domain.work import Work
from leasehold.embedded.guard import descendants
from leasehold.pipelines.media import steps as media_steps
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.storage.store import ObjectStore
from leasehold.transitions.settlements import MAX_CRASHES

_OF_HANDLERS = ("begin", "tick", "end", "stop")
_TABLES = {
    "jobs": "SELECT * FROM job", "tasks": "SELECT * FROM task", "events": "SELECT * FROM event",
    "outputs": "SELECT * FROM output", "results": "SELECT * FROM result",
    "failures": "SELECT * FROM failure", "media": "SELECT * FROM media", "upload_rows": "SELECT * FROM upload",
    "conversions": "SELECT * FROM conversion", "generations": "SELECT * FROM generation",
    "outbox": "SELECT * FROM outbox",
    "tags": "SELECT * FROM job_tag",
    "run_rows": "SELECT * FROM run", "schedules": "SELECT * FROM schedule",
}  # fmt: skip


def terms() -> Terms:
    steps = [(pipeline.name, step) for pipeline in declared() for step in pipeline.steps]
    return Terms(
        LEASE_SECONDS, SWEEP_SECONDS, MAX_LOSSES, MAX_CRASHES,
        {(name, step.name): step.max_attempts for name, step in steps},
        {(name, step.name): step.needs for name, step in steps},
        frozenset((kind.name, step.name) for kind in KINDS for step in kind.steps
                  if not (step.isolated or step.external)),
        {(name, step.name): step.writes for name, step in steps if step.writes is not None},
        TRUST_MARGIN_SECONDS,
    )  # fmt: skip


async def gather(installation: Installation, load: Load, history: History) -> None:
    """Fill `history` from the rows, journals, taps and the store."""
    async with installation.connection() as connection:
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        for name, statement in _TABLES.items():
            setattr(history, name, [_plain(row) for row in await connection.fetch(statement)])
        history.firings = [row for row in history.run_rows if row["schedule_id"] is not None]
        history.changes = await audit.changes(connection)
    diary = load.diary
    history.requests, history.streams = diary.requests, diary.streams
    history.leases, history.bounds, history.operations = diary.leases, diary.bounds, diary.operations
    history.orders = [
        Order("gateway" if one.token else "jimeng", one.prompt.split()[1], one.id, one.at, one.polled_at)
        for one in installation.provider.bought
    ]
    history.journal = [line for line in journal.read(installation.journal) if line["what"] in _OF_HANDLERS]
    history.heard, history.sessions = installation.heard, installation.sessions
    history.subscribers, history.deliveries = frozenset({SUBSCRIBER}), installation.receiver.deliveries
    history.has_broker = bool(installation.amqp_url)
    history.objects, history.uploads = await _objects(installation), await _uploads(installation)
    history.gathered = True
    history.overwritten = installation.front.faults.overwritten
    history.expected_bytes = _words() | await asyncio.to_thread(_pictures)


def write_down(history: History, directory: Path) -> None:
    """Write the changes of rows and the hints into files, in order, for the search for a cause."""
    for name, found in (("changes", history.changes), ("heard", history.heard), ("sessions", history.sessions)):
        lines = (json.dumps(asdict(one), default=str) for one in found)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def _plain(row: asyncpg.Record) -> Row:
    return {name: str(value) if isinstance(value, UUID) else value for name, value in row.items()}


async def _objects(installation: Installation) -> dict[str, StoredObject]:
    store = ObjectStore.from_settings(installation.settings(CLIENT))
    await store.open()
    try:
        found = {}
        async for stored in store.list(""):
            data = await store.fetch_bytes(stored.key, max_bytes=stored.size)
            found[stored.key] = StoredObject(len(data), hashlib.sha256(data).hexdigest())
        return found
    finally:
        await store.close()


async def _uploads(installation: Installation) -> list[str]:
    """The keys of the uploads in parts that are open, less those that their worker had no way to end."""
    settings = installation.settings(CLIENT)
    async with get_session().create_client(
        "s3", endpoint_url=settings.s3_endpoint, region_name=settings.s3_region,
        aws_access_key_id=settings.s3_access_key.get_secret_value(),
        aws_secret_access_key=settings.s3_secret_key.get_secret_value(),
    ) as s3:  # fmt: skip
        try:
            found = await s3.list_multipart_uploads(Bucket=installation.bucket)
        except s3.exceptions.NoSuchUpload:  # so rclone says that there is none
            return []
        excused = installation.front.faults.excused
        return [upload["Key"] for upload in found.get("Uploads", []) if upload["UploadId"] not in excused]


# --- what the outputs must be


def _words() -> dict[tuple[str, str, str], str]:
    expected = {}
    for text in WORDS:
        before = b""
        for step in ("first", "second", "third"):
            before = text_of(step, before, text)
            expected["short", f"{step}.txt", text] = hashlib.sha256(before).hexdigest()
    return expected


def _pictures() -> dict[tuple[str, str, str], str]:
    """The picture's outputs, by calling the handlers: no worker, no lease, no store."""
    params = MediaParams(content_type=PICTURE_TYPE)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        original = directory / "original"
        original.write_bytes(picture())
        files = {"original": original}
        for step in ("resize", "compress", "webp"):
            work = Work("media", step, params, files, directory)
            made = getattr(media_steps, step)(work).files
            files |= {name: file.path for name, file in made.items()}
        return {
            ("media", name, ""): hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in files.items()
            if name != "original"
        }


# --- the broker, the other tenant, and what is left behind


async def queued(installation: Installation) -> dict[str, int]:
    """How many messages each queue of the platform has ready."""
    counts = {}
    async with await aio_pika.connect(installation.amqp_url) as broker:
        for queue in sorted({step.queue for pipeline in declared() for step in pipeline.steps if not step.external}):
            for band in BANDS:
                name = f"leasehold.{queue}.{band}"
                channel = await broker.channel()
                try:
                    answer = await channel.declare_queue(name, passive=True)
                except aio_pika.exceptions.ChannelClosed:
                    continue  # deleted by a fault, and nothing needed it since
                counts[name] = answer.declaration_result.message_count or 0
                await channel.close()
    return counts


async def dead_letters(installation: Installation) -> list[str]:
    """The tasks of the hints that the broker gave up on."""
    found: list[str] = []
    async with await aio_pika.connect(installation.amqp_url) as broker:
        channel = await broker.channel()
        try:
            queue = await channel.get_queue("leasehold.parked")
        except aio_pika.exceptions.ChannelClosed:
            return found
        while (message := await queue.get(fail=False)) is not None:
            found.append(message.body.decode(errors="replace"))
    return found


#: PostgreSQL vacuums on its own, whether or not anybody is there.
_AUTOVACUUM = b"autovacuum worker"


async def leftovers(installation: Installation, codes: dict[str, int | None]) -> list[tuple[str, list[str]]]:
    """What processes that have ended should have taken with them: of each kind of thing looked at, what is left."""
    found = [
        ("process", [f"{name} exited with {code} when told to stop"] if code != 0 else [])
        for name, code in codes.items()
    ]
    found.append(("processes", [f"process {pid} still runs: {line}" for pid, line in _ours(installation.name)]))
    left = installation.work_dir.iterdir() if installation.work_dir.exists() else ()
    found.append(("directory", [f"directory {path.name} is left" for path in left]))
    async with installation.connection() as connection:
        sessions = [
            f"a session of {row['application_name']} is left, {row['state']}"
            for row in await connection.fetch(
                "SELECT application_name, state FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        ]
        found.append(("sessions", sessions))
        locks = await connection.fetchval(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        found.append(("locks", [f"{locks} advisory locks are left"] if locks else []))
    return found


def _ours(name: str) -> list[tuple[int, str]]:
    """Processes below us that are the platform's, or sessions of the database `name`."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            command_line = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if (
            (name.encode() in command_line and _AUTOVACUUM not in command_line)
            or b"leasehold.worker.sandbox.child" in command_line
            or b"chaos.process" in command_line
        ):
            found.append((pid, command_line.replace(b"\0", b" ").decode(errors="replace")[:120]))
    return found


async def resting(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, Any]:
    """How much is unfinished: counts by the kind of thing."""
    row = await connection.fetchrow(
        "SELECT (SELECT count(*) FROM job WHERE finished_at IS NULL) AS jobs,"
        " (SELECT count(*) FROM schedule WHERE next_run_at < clock_timestamp() + interval '1 minute') AS schedules,"
        " (SELECT count(*) FROM job WHERE notify) AS untold,"
        " (SELECT count(*) FROM outbox) AS outbox, (SELECT count(*) FROM task WHERE status = 'running') AS running"
    )
    return dict(row or {})


async def overdue(connection: asyncpg.Connection[asyncpg.Record], patience: float) -> list[str]:
    """Running tasks whose lease has passed for longer than anybody should need to notice."""
    rows = await connection.fetch(
        "SELECT id, lease_until FROM task WHERE status = 'running'"
        " AND lease_until < clock_timestamp() - make_interval(secs => $1)",
        patience,
    )
    return [f"task {row['id']} is running, its lease passed at {row['lease_until']}" for row in rows]
