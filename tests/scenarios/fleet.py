"""Starts real processes of the platform for a test, and reads their work: as a client over HTTP, and from the rows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx2

from leasehold.db.database import connect
from leasehold.embedded.ports import free_port
from leasehold.pipelines import with_bulk_operations, with_demonstrations
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import serving
from tests.factories import Rows, assert_history, terms

ROOT = Path(__file__).parents[2]
#: Seconds for which a test waits. It is long, so that a slow machine causes no failure.
PATIENCE = 60.0


#: The pipelines of a fleet, unless its test names others.
PIPELINES = "leasehold.pipelines:with_demonstrations"
#: The queues that the workers of a fleet serve, unless its test names others: all but `conversion`, whose child costs
#: each worker 0.8 s of CPU time at its start.
QUEUES = sorted(
    {step.queue for pipeline in with_bulk_operations(with_demonstrations()) for step in pipeline.steps} - {"conversion"}
)


@dataclass
class Process:
    """One process `python -m leasehold.api` or `python -m leasehold.worker`. `log`: the file of its log."""

    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def metrics_port(self) -> int:
        """The port that a process with `metrics_port=0` got, by its log."""
        for line in self.log.read_text().splitlines():
            if "metrics are served" in line:
                return int(json.loads(line)["address"].rpartition(":")[2].partition("/")[0])
        raise AssertionError(f"it serves no metrics:\n{self.log.read_text()[-3000:]}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def wait(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.wait()

    async def says(self, words: str) -> None:
        """Wait until `words` are in the log. Raises AssertionError if the process ends before."""
        while words not in self.log.read_text():
            if self.process.returncode is not None:
                raise AssertionError(f"the process ended before it logged {words!r}:\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(0.02)


@dataclass
class Fleet:
    """Starts processes on one database, broker and bucket. `close` kills those that still run."""

    settings: Settings
    directory: Path
    rows: Rows
    processes: list[Process] = field(default_factory=list)
    api_url: str = ""
    key: str = ""
    _here: AsyncExitStack = field(default_factory=AsyncExitStack)

    def environment(self, **changes: object) -> dict[str, str]:
        settings = self.settings
        chosen = {
            "DATABASE_URL": settings.database_url.get_secret_value(),
            "AMQP_URL": settings.amqp_url.get_secret_value(),
            "AMQP_QUEUE_PREFIX": settings.amqp_queue_prefix,
            "BROKER": settings.broker,
            "S3_ENDPOINT": settings.s3_endpoint,
            "S3_BUCKET": settings.s3_bucket,
            "S3_ACCESS_KEY": settings.s3_access_key.get_secret_value(),
            "S3_SECRET_KEY": settings.s3_secret_key.get_secret_value(),
            "WORK_DIR": self.directory / "work",
            "PIPELINES": PIPELINES,
            **({} if "pipelines" in changes else {"WORKER_QUEUES": ",".join(QUEUES)}),
            "WORKER_CHILDREN": 1,
            "POLL_SECONDS": 0.5,
            "SWEEP_SECONDS": 0.5,
            "LOG_FORMAT": "json",
            **{name.upper(): value for name, value in changes.items()},
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        return inherited | {f"LEASEHOLD_{name}": str(value) for name, value in chosen.items()}

    async def start(self, module: str, directory: Path = ROOT, **changes: object) -> Process:
        """`directory`: where the program finds its code, this code's or a release's."""
        log = self.directory / f"{module}-{len(self.processes)}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module if "." in module else f"leasehold.{module}",
                cwd=directory,
                env=self.environment(**changes) | {"PYTHONPATH": os.fspath(directory)},
                stdout=output,
                stderr=output,
            )
        started = Process(process, log)
        self.processes.append(started)
        return started

    async def worker(self, directory: Path = ROOT, **changes: object) -> Process:
        """Start a worker, and wait until it serves. `changes`: further settings."""
        started = await self.start("worker", directory, **changes)
        await asyncio.wait_for(started.says('"serving"'), PATIENCE)
        return started

    async def api(self, directory: Path = ROOT, **changes: object) -> Process:
        port = free_port()
        self.api_url = f"http://127.0.0.1:{port}"
        started = await self.start("api", directory, api_port=port, **changes)
        await self._make_key()
        await self.until(self._answers, started)
        return started

    async def api_here(self) -> None:
        """Serve the API in the test's own process, which saves 1.3 s of CPU time, if the test is not about the API."""
        settings = self.settings.model_copy(update={"pipelines": PIPELINES})
        self.api_url = (await self._here.enter_async_context(serving(settings))).url
        await self._make_key()

    async def _make_key(self) -> None:
        if not self.key:
            scopes = ["media:read", "media:write"]
            new_key = await create_key(self.rows.connection, tenant_id="t", client_id="tests", scopes=scopes)
            self.key = new_key.text

    async def _answers(self) -> bool:
        async with httpx2.AsyncClient() as client:
            try:
                return (await client.get(f"{self.api_url}/livez")).is_success
            except httpx2.TransportError:
                return False

    async def until(self, condition: Any, *alive: Process) -> None:
        """Wait until `await condition()` is true. Raises AssertionError if one of `alive` ends before."""
        async with asyncio.timeout(PATIENCE):
            while not await condition():
                for process in alive:
                    assert process.process.returncode is None, process.log.read_text()[-3000:]
                await asyncio.sleep(0.05)

    # --- as a client

    async def call(self, method: str, path: str, **request: Any) -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self.api_url, timeout=PATIENCE) as client:
            return await client.request(method, path, headers={"Authorization": f"Bearer {self.key}"}, **request)

    async def upload(self, picture: bytes, content_type: str = "image/jpeg") -> dict[str, str]:
        """Upload the picture to a signed URL. Returns the body for complete-upload."""
        answer = await self.call("POST", "/upload-url", json={"content_type": content_type, "file_name": "a.jpg"})
        assert answer.status_code == 201, answer.text
        ticket = answer.json()
        async with httpx2.AsyncClient(timeout=PATIENCE) as store:
            put = await store.put(ticket["upload_url"], content=picture, headers={"Content-Type": content_type})
        assert put.is_success, put.text
        return {"media_id": ticket["media_id"], "original_key": ticket["original_key"]}

    async def send(self, picture: bytes, content_type: str = "image/jpeg") -> dict[str, Any]:
        """Upload the picture and complete the upload. Returns the body of the answer."""
        accepted = await self.call("POST", "/complete-upload", json=await self.upload(picture, content_type))
        assert accepted.status_code == 202, accepted.text
        body: dict[str, Any] = accepted.json()
        return body

    async def view(self, media_id: str) -> dict[str, Any]:
        answer = await self.call("GET", f"/media/{media_id}")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def finished(self, media_id: str, status: str = "READY") -> dict[str, Any]:
        async def ended() -> bool:
            return (await self.view(media_id))["status"] in ("READY", "FAILED")

        await self.until(ended)
        view = await self.view(media_id)
        assert view["status"] == status, view
        return view

    # --- in the rows

    async def reaches(self, job_id: UUID, step: str, status: str) -> None:
        """Wait until the step's row has that status, or has been through it: a busy machine may look too late."""

        async def has_status() -> bool:
            return (await self.rows.statuses(job_id)).get(step) in (status, "succeeded")

        await self.until(has_status)

    async def assert_done_once(self, job_id: UUID) -> None:
        """Assert that every step succeeded exactly once, and that the rows are what the events add up to."""
        kinds = Counter((e["step"], e["kind"]) for e in await self.rows.events(job_id))
        statuses = await self.rows.statuses(job_id)
        assert set(statuses.values()) == {"succeeded"}
        assert all(kinds[step, "completed"] == 1 for step in statuses)
        await assert_history(self.rows, job_id)

    async def at_rest(self) -> None:
        """Wait until the outbox is empty and no task is leased."""

        async def resting() -> bool:
            return not await self.rows.connection.fetchval(
                "SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM outbox_batch)"
                " + (SELECT count(*) FROM task WHERE status = 'running')"
            )

        await self.until(resting)

    async def close(self) -> None:
        for process in self.processes:
            if process.process.returncode is None:
                process.signal(signal.SIGCONT)
            await process.kill()
        await self._here.aclose()


async def open_fleet(settings: Settings, directory: Path) -> Fleet:
    connection: asyncpg.Connection[asyncpg.Record] = await connect(settings, "test")
    return Fleet(settings, directory, Rows(connection, terms()))
