"""Reads the history of a run from its installation: rows and their changes, objects, queues, processes and sessions.

`chaos.run` calls these functions, and `chaos.checker` judges the history.
"""

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

from chaos import journal, row_changes
from chaos.evidence import Order, Row, StoredObject, Terms
from chaos.history import History
from chaos.load import PICTURE_TYPE, WORDS, Load, picture
from chaos.pipelines import KINDS, declared
from chaos.servers import command_line
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

#: The kinds of journal lines that handlers write. All other lines are about faults.
_HANDLER_LINES = ("begin", "tick", "end", "stop")
#: Field of the history -> the statement that reads its rows.
_TABLES = {
    "jobs": "SELECT * FROM job", "tasks": "SELECT * FROM task", "events": "SELECT * FROM history",
    "outputs": "SELECT * FROM output", "results": "SELECT * FROM result",
    "failures": "SELECT * FROM failure", "media": "SELECT * FROM media", "upload_rows": "SELECT * FROM upload",
    "conversions": "SELECT * FROM conversion", "generations": "SELECT * FROM generation",
    "outbox": "SELECT id, ARRAY[task_id::text] AS task_ids FROM outbox"
              " UNION ALL SELECT id, task_ids::text[] FROM outbox_batch",
    "tags": "SELECT * FROM job_tag",
    "run_rows": "SELECT * FROM run", "schedules": "SELECT * FROM schedule",
}  # fmt: skip


def terms() -> Terms:
    """The settings and declarations of every run."""
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
    """Fill `history` from the database, the load's diary, the journal, the proxies and the store."""
    async with installation.connection() as connection:
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        for name, statement in _TABLES.items():
            setattr(history, name, [_plain(row) for row in await connection.fetch(statement)])
        history.firings = [row for row in history.run_rows if row["schedule_id"] is not None]
        history.changes = await row_changes.changes(connection)
    changing = {change.xact for change in history.changes}
    history.in_progress = {xact: installation.transactions.may_last_until(int(xact)) for xact in changing}
    history.begun = {xact: installation.transactions.begun_by(int(xact)) for xact in changing}
    history.restarts = installation.transactions.restarts
    diary = load.diary
    history.requests, history.streams = diary.requests, diary.streams
    history.leases, history.bounds, history.operations = diary.leases, diary.bounds, diary.operations
    history.orders = [
        Order("gateway" if order.token else "jimeng", order.prompt.split()[1], order.id, order.at, order.polled_at)
        for order in installation.provider.bought
    ]
    lines = journal.read(installation.journal)
    history.journal = [line for line in lines if line["what"] in _HANDLER_LINES]
    history.of_release = {line["process"] for line in lines if line["what"] == "release"}
    history.hint_records, history.sessions = installation.hint_records, installation.sessions
    history.subscribers, history.deliveries = frozenset({SUBSCRIBER}), installation.receiver.deliveries
    history.has_broker = bool(installation.amqp_url)
    history.objects, history.uploads = await _objects(installation), await _uploads(installation)
    history.gathered = True
    history.overwritten = installation.front.faults.overwritten
    history.expected_bytes = _expected_texts() | await asyncio.to_thread(_expected_pictures)


def write_down(history: History, directory: Path) -> None:
    """Write the changes of rows, the transactions, the hints, the sessions and the waits for a processor into files.
    People who look for a cause read them.
    """
    for name, records in (
        ("changes", history.changes),
        ("hints", history.hint_records),
        ("sessions", history.sessions),
    ):
        lines = (json.dumps(asdict(record), default=str) for record in records)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "in_progress.json").write_text(json.dumps(history.in_progress))
    starved = (json.dumps(sample._asdict()) for sample in history.starved)
    (directory / "starved.jsonl").write_text("\n".join(starved) + "\n")


def _plain(row: asyncpg.Record) -> Row:
    """The row as a dict, with its ids as text."""
    return {name: str(value) if isinstance(value, UUID) else value for name, value in row.items()}


async def _objects(installation: Installation) -> dict[str, StoredObject]:
    store = ObjectStore.from_settings(installation.settings(CLIENT))
    await store.open()
    try:
        objects = {}
        async for stored in store.list(""):
            data = await store.fetch_bytes(stored.key, max_bytes=stored.size)
            objects[stored.key] = StoredObject(len(data), hashlib.sha256(data).hexdigest())
        return objects
    finally:
        await store.close()


async def _uploads(installation: Installation) -> list[str]:
    """The keys of the open multipart uploads, without those that their worker could not end because of a fault."""
    settings = installation.settings(CLIENT)
    async with get_session().create_client(
        "s3", endpoint_url=settings.s3_endpoint, region_name=settings.s3_region,
        aws_access_key_id=settings.s3_access_key.get_secret_value(),
        aws_secret_access_key=settings.s3_secret_key.get_secret_value(),
    ) as s3:  # fmt: skip
        try:
            answer = await s3.list_multipart_uploads(Bucket=installation.bucket)
        except s3.exceptions.NoSuchUpload:  # rclone answers so when no upload is open
            return []
        excused = installation.front.faults.excused
        return [upload["Key"] for upload in answer.get("Uploads", []) if upload["UploadId"] not in excused]


# --- the digests that outputs must have: (pipeline, output, words) -> SHA-256


def _expected_texts() -> dict[tuple[str, str, str], str]:
    """The outputs of the pipeline `short`: each step's text depends on the output of the step before."""
    expected = {}
    for text in WORDS:
        output = b""
        for step in ("first", "second", "third"):
            output = text_of(step, output, text)
            expected["short", f"{step}.txt", text] = hashlib.sha256(output).hexdigest()
    return expected


def _expected_pictures() -> dict[tuple[str, str, str], str]:
    """The outputs of the load's picture. This calls the handlers directly: no worker, no lease, no store."""
    params = MediaParams(content_type=PICTURE_TYPE)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        original = directory / "original"
        original.write_bytes(picture())
        files = {"original": original}
        for step in ("resize", "compress", "webp"):
            work = Work("media", step, params, files, directory)
            outputs = getattr(media_steps, step)(work).files
            files |= {name: file.path for name, file in outputs.items()}
        return {
            ("media", name, ""): hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in files.items()
            if name != "original"
        }


# --- the broker, and the things that processes leave behind


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
                    continue  # a fault deleted the queue, and no process has needed it since
                counts[name] = answer.declaration_result.message_count or 0
                await channel.close()
    return counts


async def dead_letters(installation: Installation) -> list[str]:
    """The bodies of the hints that the broker moved to the dead-letter queue."""
    bodies: list[str] = []
    async with await aio_pika.connect(installation.amqp_url) as broker:
        channel = await broker.channel()
        try:
            queue = await channel.get_queue("leasehold.parked")
        except aio_pika.exceptions.ChannelClosed:
            return bodies
        while (message := await queue.get(fail=False)) is not None:
            bodies.append(message.body.decode(errors="replace"))
    return bodies


#: A process of PostgreSQL's own vacuum. It may run after every client has left.
_AUTOVACUUM = b"autovacuum worker"


async def leftovers(installation: Installation, exit_codes: dict[str, int | None]) -> list[tuple[str, list[str]]]:
    """Look, after all processes have ended, for what they must not leave behind. Returns each kind of thing, with a
    sentence for each thing that is left. `exit_codes`: by the name of the process.
    """
    left = [
        ("process", [f"{name} exited with {code} when asked to stop"] if code != 0 else [])
        for name, code in exit_codes.items()
    ]
    for name, pid in installation.started().items():
        lives_on = b"chaos." in command_line(pid)  # another process may have its number now
        left.append(("process that was started", [f"{name} still runs as process {pid}"] if lives_on else []))
    running = _running_processes(installation.name)
    left.append(("processes", [f"process {pid} still runs: {line}" for pid, line in running]))
    directories = installation.work_dir.iterdir() if installation.work_dir.exists() else ()
    left.append(("directory", [f"directory {path.name} is left" for path in directories]))
    async with installation.connection() as connection:
        sessions = [
            f"a session of {row['application_name']} is left, {row['state']}"
            for row in await connection.fetch(
                "SELECT application_name, state FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        ]
        left.append(("sessions", sessions))
        locks = await connection.fetchval(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        left.append(("locks", [f"{locks} advisory locks are left"] if locks else []))
    return left


def _running_processes(database: str) -> list[tuple[int, str]]:
    """The pid and the command line of each descendant of this process that belongs to the platform, or that serves a
    session of the database in PostgreSQL.
    """
    running = []
    for pid in descendants(os.getpid()):
        line = command_line(pid)
        if (
            (database.encode() in line and _AUTOVACUUM not in line)
            or b"leasehold.worker.sandbox.child" in line
            or b"chaos.process" in line
        ):
            running.append((pid, line.replace(b"\0", b" ").decode(errors="replace")[:120]))
    return running


async def count_unfinished(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, Any]:
    """Kind of thing -> how many are unfinished. The installation is at rest when all are 0."""
    row = await connection.fetchrow(
        "SELECT (SELECT count(*) FROM job WHERE finished_at IS NULL) AS jobs,"
        " (SELECT count(*) FROM schedule WHERE next_run_at < clock_timestamp() + interval '1 minute') AS schedules,"
        " (SELECT count(*) FROM job WHERE notify) AS unnotified,"
        " (SELECT count(*) FROM outbox) + (SELECT count(*) FROM outbox_batch) AS outbox,"
        " (SELECT count(*) FROM task WHERE status = 'running') AS running"
    )
    return dict(row or {})


async def overdue(connection: asyncpg.Connection[asyncpg.Record], patience: float) -> list[str]:
    """A sentence for each running task whose lease passed more than `patience` seconds ago and was not expired."""
    rows = await connection.fetch(
        "SELECT id, lease_until FROM task WHERE status = 'running'"
        " AND lease_until < clock_timestamp() - make_interval(secs => $1)",
        patience,
    )
    return [f"task {row['id']} is running, its lease passed at {row['lease_until']}" for row in rows]
