"""A tenant moves with schedules, webhooks, templates of its own, workflows that sleep or wait, external steps, dead
letters, saved views and pictures in upload. Each goes on in the new cell, and nothing happens twice.

The workers are programs of their own. The move is the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr
from typer.testing import CliRunner

from leasehold.cli.main import app
from leasehold.cli.reconcile import SuspiciousBucket, reconcile
from leasehold.db import audit
from leasehold.limits import uploads
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.media.housekeeping import jobless_pictures
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from leasehold.transitions import sweeps
from tests.api.conftest import client_of
from tests.api.media_api import MediaApi
from tests.cells.conftest import Cell, Two, last_json
from tests.cells.test_move import rows_of, settings_of, variables
from tests.jobs.conftest import TENANT_SCOPES

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


@dataclass
class Receiver:
    """A server that gets webhooks. It refuses as many as `refusals` says."""

    url: str = ""
    refusals: int = 0
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # the id of the delivery, and its body

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head) if name}
        body = await reader.readexactly(int(headers["content-length"]))
        self.refusals -= 1
        if self.refusals >= 0:
            writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")
        else:
            self.heard.append((headers["webhook-id"], json.loads(body)))
            writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    def times(self) -> Counter[str]:
        return Counter(body["data"]["id"] for _, body in self.heard)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield receiver
    server.close()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"egress_allow": "127.0.0.0/8"})


@pytest.fixture
def cell_settings() -> dict[str, Any]:
    """Both cells can open the secrets of the tenant."""
    return {"pipelines": "tests.cells.work:pipelines", "sealing_keys": SecretStr(Fernet.generate_key().decode())}


def environment_of(cell: Cell, path: Path) -> dict[str, str]:
    of_cell = dict(line.split("=", 1) for line in variables(cell))
    return os.environ | of_cell | {
        "PYTHONPATH": str(ROOT), "LEASEHOLD_BROKER": "postgres", "LEASEHOLD_WORK_DIR": str(path),
        "LEASEHOLD_POLL_SECONDS": "0.1", "LEASEHOLD_PIPELINES": "tests.cells.work:pipelines",
        "LEASEHOLD_EGRESS_ALLOW": "127.0.0.0/8", "LEASEHOLD_METRICS_PORT": "0",
    }  # fmt: skip


@asynccontextmanager
async def worker_of(cell: Cell, path: Path) -> AsyncIterator[None]:
    await asyncio.to_thread(path.mkdir, exist_ok=True)
    with (path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "leasehold.worker", env=environment_of(cell, path), cwd=path, stdout=log, stderr=log
        )
        try:
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            print((path / "log").read_text()[-4000:])  # noqa: T201 - pytest shows it where the test fails


async def move(two: Two, path: Path, *more: str) -> tuple[int, str, str]:
    """The command, in the environment of cell `a`: its exit code, what it printed, and its errors."""
    target = path / "b.env"
    target.write_text("\n".join(variables(two.b)))
    arguments = ["cells", "move", "acme", "--to", "b", "--target-env", str(target), "--drain-seconds", "120", *more]
    done = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment_of(two.a, path))
    return done.exit_code, done.stdout, done.stderr


@dataclass
class Acme:
    """The tenant's client at a cell."""

    http: httpx2.AsyncClient

    async def send(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        found: dict[str, Any] = answer.json() if answer.content else {}
        return found

    async def get(self, path: str) -> dict[str, Any]:
        answer = await self.http.get(path)
        assert answer.status_code == 200, (path, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    async def start(self, template: str, payload: Any) -> str:
        return str((await self.send("/v1/runs", 202, template=template, payload=payload))["id"])

    async def until(self, run: str, *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(SECONDS):
            while (found := await self.get(f"/v1/runs/{run}"))["status"] not in statuses:
                await asyncio.sleep(0.05)
        return found


@asynccontextmanager
async def acme(cell: Cell, key: str) -> AsyncIterator[Acme]:
    async with client_of(cell.running.url, key) as http:
        yield Acme(http)


async def full_key(cell: Cell) -> str:
    async with rows_of(cell) as rows:
        made = await create_key(rows, tenant_id="acme", client_id="tests", scopes=sorted(TENANT_SCOPES), cell=cell.name)
    return made.text


async def until_waiting(cell: Cell, run: str) -> None:
    async with asyncio.timeout(SECONDS), rows_of(cell) as rows:
        while not await rows.fetchval(  # one that sleeps may be awake again when a busy machine lets the test look
            "SELECT EXISTS (SELECT 1 FROM task WHERE job_id = $1 AND status IN ('waiting', 'succeeded'))", UUID(run)
        ):
            await asyncio.sleep(0.05)


async def test_all_that_a_tenant_has_goes_on_in_the_new_cell_once(  # noqa: PLR0915 - one move, and all that it moves
    two: Two, tmp_path: Path, receiver: Receiver
) -> None:
    key = await full_key(two.a)
    async with acme(two.a, key) as old, worker_of(two.a, tmp_path / "a"):
        await old.send(
            "/v1/templates", 201, type="mixed",
            steps=[{"id": "outside", "queue": "reports"}, {"id": "inside", "worker_type": "noop.only"}],
        )  # fmt: skip
        hook = await old.send("/v1/webhooks", 201, url=receiver.url, events=["run.succeeded"])
        before = await old.start("noop", {})
        await old.until(before, "succeeded")
        async with asyncio.timeout(SECONDS):
            while before not in receiver.times():
                await asyncio.sleep(0.05)
        receiver.refusals = 1
        refused = await old.start("noop", {})  # its delivery fails, and is due again after the move
        await old.until(refused, "succeeded")
        async with asyncio.timeout(SECONDS):
            while receiver.refusals > 0:
                await asyncio.sleep(0.05)
        sleeping = await old.start("shop.naps", {"seconds": 6})
        waiting = await old.start("shop.approved", {})
        dead = await old.start("scripted", {"do": "fail"})
        await old.until(dead, "failed")
        await until_waiting(two.a, sleeping)
        await until_waiting(two.a, waiting)
        await old.send(f"/v1/runs/{waiting}/signals/approved", 202, payload={"by": "anna"})
        saved = await old.http.put("/v1/views", json={"name": "mine", "filter": "status:failed"})
        assert saved.is_success, saved.text
        picture = await MediaApi(old.http).upload()
        leased, untouched = await old.start("mixed", {}), await old.start("mixed", {})
        (task,) = (await old.send("/v1/external/claim", worker_id="w", queues=["reports"]))["tasks"]
        assert task["run_id"] == leased
        schedule = (await old.send("/v1/schedules", 201, template="noop", cron="0 0 1 1 *"))["id"]
        async with worker_of(two.b, tmp_path / "b"):
            moving = asyncio.create_task(move(two, tmp_path, "--map", str(two.a.path), "--map", str(two.b.path)))
            async with rows_of(two.a) as rows, asyncio.timeout(SECONDS):
                while not await rows.fetchval("SELECT EXISTS (SELECT 1 FROM pg_trigger WHERE tgname ~ '^moving_')"):
                    await asyncio.sleep(0.02)
                tick = datetime.now(UTC) + timedelta(seconds=0.5)  # it passes while the tenant moves
                await rows.execute("UPDATE schedule SET next_run_at = $2 WHERE id = $1", UUID(schedule), tick)
                await asyncio.sleep(1)
            settled = {"worker_id": "w", "epoch": task["epoch"]}  # the external worker ends what it has
            await old.send(f"/v1/external/tasks/{task['task_id']}/heartbeat", **settled)
            await old.send(f"/v1/external/tasks/{task['task_id']}/complete", **settled, result={"made": 1})
            code, printed, errors = await moving
            assert code == 0, (printed, errors)
            async with acme(two.b, key) as new:
                assert (await new.until(sleeping, "succeeded"))["result"]
                await new.send(f"/v1/runs/{waiting}/signals/approved", 202, payload={"by": "bert"})
                approved = await new.until(waiting, "succeeded")
                assert "anna, bert" in json.dumps(approved["result"])
                assert (await new.until(leased, "succeeded"))["result"]["outside"] == {"made": 1}
                (again,) = (await new.send("/v1/external/claim", worker_id="w", queues=["reports"]))["tasks"]
                assert again["run_id"] == untouched
                await new.send(
                    f"/v1/external/tasks/{again['task_id']}/complete", worker_id="w", epoch=again["epoch"], result={}
                )
                await new.until(untouched, "succeeded")
                letters = (await new.get("/v1/dead-letters"))["dead_letters"]
                assert [letter["job_id"] for letter in letters] == [dead]
                await new.send(f"/v1/runs/{dead}/retry", 202)
                await new.until(dead, "failed")
                assert [view["name"] for view in (await new.get("/v1/views"))["views"]] == ["mine"]
                assert (await MediaApi(new.http).complete(picture)).status_code == 202
                fresh = await new.start("mixed", {})
                assert (await new.get(f"/v1/runs/{fresh}"))["status"] == "waiting_worker"
                async with rows_of(two.a) as theirs, rows_of(two.b) as rows, asyncio.timeout(SECONDS):
                    ticks = "SELECT r.tick FROM run r JOIN job j ON j.id = r.job_id WHERE r.schedule_id = $1"
                    while [row["tick"] for row in await rows.fetch(ticks, UUID(schedule))] != [tick]:
                        await asyncio.sleep(0.05)
                    done = f"{ticks} AND j.status = 'succeeded'"
                    while not await rows.fetchval(done, UUID(schedule)):
                        await asyncio.sleep(0.05)
                    assert await theirs.fetch(ticks, UUID(schedule)) == []
                    of_tick = await rows.fetchval("SELECT job_id FROM run WHERE schedule_id = $1", UUID(schedule))
                    await rows.execute("UPDATE task SET available_at = clock_timestamp() WHERE status = 'retry'")
                succeeded = {before, refused, sleeping, waiting, leased, untouched, str(of_tick)}
                async with asyncio.timeout(SECONDS):
                    while not succeeded <= receiver.times().keys():
                        await asyncio.sleep(0.05)
                assert [one["id"] for one in (await new.get("/v1/webhooks"))["webhooks"]] == [hook["id"]]
                assert (await new.http.get("/v1/audit")).status_code == 200
            await asyncio.sleep(1)  # a second delivery would come now
    assert set(receiver.times().values()) == {1}, receiver.times()
    async with rows_of(two.a) as theirs, rows_of(two.b) as rows:
        for connection in (theirs, rows):
            heads = await audit.heads(connection)
            assert heads
            assert [await audit.verify(connection, head) for head in heads] == [None] * len(heads)
        claims = "SELECT task_id, epoch FROM history WHERE kind = 'claimed' AND tenant_id = 'acme'"
        old_claims = {tuple(row) for row in await theirs.fetch(claims)}
        new_claims = [tuple(row) for row in await rows.fetch(claims)]
    assert len(new_claims) == len(set(new_claims))
    assert old_claims <= set(new_claims)  # the old cell has claimed nothing since the copy


async def test_the_old_cell_deletes_no_object_of_a_tenant_that_has_moved(two: Two, tmp_path: Path) -> None:
    """Both cells may have one bucket: a picture that is completed in the new cell is an abandoned upload in the old."""
    key = await full_key(two.a)
    async with acme(two.a, key) as old:
        picture = await MediaApi(old.http).upload()
        job = await old.start("noop", {})
    late = "clock_timestamp() - interval '1 day'"
    source = "sources/0123456789abcdef/image.png"
    async with rows_of(two.a) as rows:
        await generations.keep_source(rows, "acme", source, 3, timedelta(hours=1))
        await generations.keep_source(rows, "other", "sources/fedcba9876543210/image.png", 3, timedelta(hours=-1))
        code, _printed, errors = await move(two, tmp_path)
        assert code == 0, errors
        for table in ("media", "upload", "job", "source_image"):
            await rows.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        await rows.execute(f"UPDATE source_image SET expires_at = {late}")
        await rows.execute(f"UPDATE media SET expires_at = {late}")
        await rows.execute(f"UPDATE upload SET look_at = {late}, writable_until = {late}, forget_at = {late}")
        await rows.execute(
            f"UPDATE job SET expires_at = {late}, finished_at = {late}, status = 'cancelled', steps_left = 0"
            " WHERE id = $1",
            UUID(job),
        )
        assert await jobless_pictures(rows) == []
        assert await uploads.due(rows) == []
        assert await sweeps.forgettable_jobs(rows) == []
        assert await generations.expired_sources(rows) == ["sources/fedcba9876543210/image.png"]
        await rows.execute("UPDATE tenant_move SET stage = 'drain'")  # they were due otherwise
        assert [unit[1] for unit in await jobless_pictures(rows)] == [picture.original_key]
        assert [due.key for due in await uploads.due(rows)] == [picture.original_key]
        assert [str(one.job_id) for one in await sweeps.forgettable_jobs(rows)] == [job]
        assert source in await generations.expired_sources(rows)


async def test_the_command_shows_aborts_and_cleans_a_move(two: Two, tmp_path: Path) -> None:
    key = await full_key(two.a)
    async with acme(two.a, key) as old:
        job = await old.start("noop", {})
    code, _, errors = await move(two, tmp_path, "--status")
    assert (code, "No move of acme is known here." in errors) == (1, True)
    async with rows_of(two.a) as rows:
        await rows.execute(
            "UPDATE task SET status = 'running', lease_owner = gen_random_uuid(), lease_until = 'infinity'"
        )
    code, _, errors = await move(two, tmp_path, "--drain-seconds", "0")
    assert (code, "1 step of acme still runs" in errors) == (1, True)
    code, printed, _ = await move(two, tmp_path, "--status", "--json")
    state = last_json(printed)
    assert (code, state["tenant"], state["stage"], state["running"]) == (0, "acme", "drain", 1)
    assert (state["from_cell"], state["to_cell"], state["direction"]) == ("a", "b", "out")
    code, _, errors = await move(two, tmp_path, "--clean")
    assert (code, "has not moved yet: its stage is drain" in errors) == (1, True)
    code, printed, _ = await move(two, tmp_path, "--abort", "--json")
    assert (code, last_json(printed)) == (
        0,
        {"tenant": "acme", "from": "a", "to": "b", "stage": "aborted"},
    )
    code, _, errors = await move(two, tmp_path, "--abort")
    assert (code, "does not move from cell a to cell b" in errors) == (1, True)
    code, _, errors = await move(two, tmp_path, "--abort", "--clean")
    assert (code, "exclude each other" in errors) == (2, True)
    async with rows_of(two.a) as rows:
        await rows.execute("UPDATE task SET status = 'pending', lease_owner = NULL, lease_until = NULL")
    code, printed, errors = await move(two, tmp_path, "--json", "--map", str(two.a.path))
    assert code == 0, errors
    answer = last_json(printed)
    assert (answer["stage"], answer["maps"]) == ("moved", [str(two.a.path)])
    assert json.loads(two.a.path.read_text())["tenants"] == {"acme": "b"}
    code, printed, _ = await move(two, tmp_path, "--json")  # once more changes nothing
    assert (code, last_json(printed)["stage"]) == (0, "moved")
    code, _, errors = await move(two, tmp_path, "--abort")
    assert (code, "lives in cell b now" in errors) == (1, True)
    code, printed, _ = await move(two, tmp_path, "--clean")
    assert (code, "cleaned" in printed) == (0, True)
    code, _, errors = await move(two, tmp_path, "--status")
    assert (code, "No move of acme" in errors) == (1, True)
    two.place(acme="b")
    async with acme(two.b, key) as new:
        assert (await new.get(f"/v1/runs/{job}"))["id"] == job
    secret = settings_of(two.b).s3_secret_key.get_secret_value()
    for text in (printed, errors):
        assert secret not in text
        assert two.b.database_url not in text


async def test_a_cell_does_not_delete_objects_that_may_be_another_cells(two: Two) -> None:
    """After a move and its clean, the objects of the tenant have no row in the old cell."""
    settings = settings_of(two.a)
    store = ObjectStore.from_settings(settings)
    await store.open()
    key = "jobs/01900000-0000-7000-8000-000000000000/only/x"  # as old as the version of its id says
    try:
        await store.put(key, b"x", content_type="text/plain", metadata={})
        with pytest.raises(SuspiciousBucket, match="that of cell a"):
            await reconcile(settings, apply=True)
        assert await store.head(key) is not None
        assert (await reconcile(settings, apply=False)).deleted == 0
    finally:
        await store.delete(key)
        await store.close()
