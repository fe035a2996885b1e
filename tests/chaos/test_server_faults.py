"""The faults of servers, made on real ones: each acts, says how much it did, and is undone."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aio_pika
import asyncpg
import pytest

from chaos.catalogue import BY_NAME, CLOCK, MOUNTS
from chaos.disk import Volume
from chaos.faults import Faults
from chaos.faults.clock import JUMP_SECONDS
from chaos.plan import Fault, Plan
from chaos.proxy import Link
from chaos.servers import Servers
from chaos.transactions import TransactionWatch
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.transient import TRY_AGAIN
from tests.support.not_here import not_here

ROOT = Path(__file__).parents[2]
NAME = "chaos_faults"


@dataclass
class Scene:
    """An installation without processes of the platform: the tests are its clients."""

    servers: Servers
    name: str
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan(0, 1.0))
    hint_records: list[object] = field(default_factory=list)
    slots: dict[str, object] = field(default_factory=dict)
    amqp_url: str = ""

    def links_to(self, server: str) -> list[Link]:
        return [link for (_, of), link in self.links.items() if of == server]

    @property
    def url(self) -> str:
        """Through the link."""
        port = self.links["api-0", "postgres"].port
        return self.servers.postgres.url_of(self.name).replace(f":{self.servers.postgres.port}/", f":{port}/")

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        connection = await asyncpg.connect(self.servers.postgres.url_of(self.name))
        try:
            yield connection
        finally:
            await connection.close()

    async def make(self, name: str, seconds: float) -> int:
        faults = Faults(self)  # type: ignore[arg-type]  # what servers' faults use of an installation
        fault = Fault(name, seconds=seconds)
        assert fault.kind is BY_NAME[name]
        return await faults.maker_of(name)(fault)


@pytest.fixture
async def scene(servers: Servers) -> AsyncIterator[Scene]:
    await servers.add_database(NAME)
    link = Link(("127.0.0.1", servers.postgres.port))
    await link.open()
    yield Scene(servers, NAME, {("api-0", "postgres"): link})
    await link.close()
    await servers.mend()
    await servers.drop_database(NAME)


async def beat(scene: Scene, ended: list[tuple[float, str]]) -> None:
    """For ever: write a row, each time with a second's patience; note when, and how it ended."""
    while True:
        try:
            async with asyncio.timeout(1):
                connection = await asyncpg.connect(scene.url)
                try:
                    await connection.execute("CREATE TABLE IF NOT EXISTS beat (text text)")
                    await connection.execute("INSERT INTO beat SELECT repeat('x', 100) FROM generate_series(1, 5000)")
                finally:
                    connection.terminate()
            ended.append((time.monotonic(), "ok"))
        except TRY_AGAIN as error:  # whatever a broken server says must be something that the platform repeats
            ended.append((time.monotonic(), type(error).__name__))
        await asyncio.sleep(0.05)


async def while_beating(scene: Scene, name: str, seconds: float) -> tuple[int, set[str]]:
    """Make a fault, and wait until a beat is well again; returns its effect, and how beats ended badly during it."""
    heard: list[tuple[float, str]] = []
    beating = asyncio.create_task(beat(scene, heard))

    async def until_well(since: float) -> None:
        async with asyncio.timeout(60):
            while not any(at > since and how == "ok" for at, how in heard):
                if beating.done():
                    await beating
                await asyncio.sleep(0.05)

    try:
        await until_well(0.0)
        began = time.monotonic()
        effect = await scene.make(name, seconds)
        ended = time.monotonic()
        await until_well(ended)
    finally:
        await cancel_and_wait(beating)
    return effect, {how for at, how in heard if began < at < ended} - {"ok"}


async def until_felt(scene: Scene, name: str, seconds: float) -> set[str]:
    """How beats ended badly during a fault that lasts so long. On a busy machine no beat may end in the first one."""
    for times in (1, 3, 9):
        effect, during = await while_beating(scene, name, times * seconds)
        if effect > 0 and during:
            return during
    pytest.fail(f"{name} had no effect")


async def test_a_frozen_database_takes_bytes_and_answers_nothing_until_it_goes_on(scene: Scene) -> None:
    assert "TimeoutError" in await until_felt(scene, "F35 freeze the database", 1.5)


@pytest.mark.parametrize("name", ["F22 kill a backend", "F23 kill the database"])
async def test_the_watch_of_transactions_notices_a_restart(scene: Scene, name: str) -> None:
    watch = TransactionWatch(lambda: scene.servers.postgres.url_of(NAME))
    watching = asyncio.create_task(watch.watch())
    beating = asyncio.create_task(beat(scene, []))
    try:
        async with asyncio.timeout(60):
            while not watch.last_seen(2**62):
                await asyncio.sleep(0.02)
            assert watch.restarts == []
            began = time.time()
            while not await scene.make(name, 0.5):  # no beat was connected
                await asyncio.sleep(0.02)
            while not watch.restarts:
                await asyncio.sleep(0.02)
        assert began - 10 < watch.restarts[0] < time.time()
    finally:
        await cancel_and_wait(watching, beating)


async def test_a_database_that_nobody_asked_anything_was_not_frozen_for_anybody(scene: Scene) -> None:
    assert await scene.make("F35 freeze the database", 0.2) == 0
    async with scene.connection() as connection:
        assert await connection.fetchval("SELECT 1") == 1


async def test_a_stalled_disk_holds_up_every_write_and_not_for_ever(scene: Scene) -> None:
    if MOUNTS not in scene.servers.abilities:
        not_here("to mount takes privileges")
    assert "TimeoutError" in await until_felt(scene, "F36 database disk stalls", 2.5)


async def test_a_full_disk_fails_statements_and_the_server_is_there_again_once_it_has_room(scene: Scene) -> None:
    if MOUNTS not in scene.servers.abilities:
        not_here("to mount takes privileges")
    assert await until_felt(scene, "F37 database disk full", 2.0)


@pytest.mark.parametrize("way", ["ahead", "behind"])
async def test_the_databases_clock_jumps_there_and_back_and_the_triggers_keep_the_true_time(
    scene: Scene, way: str
) -> None:
    if CLOCK not in scene.servers.abilities:
        not_here("there is no libfaketime")
    async with scene.connection() as connection:

        async def is_wrong_by(seconds: float) -> bool:
            """However long the answer takes."""
            before = time.time()
            told: float = (await connection.fetchval("SELECT clock_timestamp()")).timestamp()
            return before - 1 < told - seconds < time.time() + 1

        sign = 1 if way == "ahead" else -1
        for seconds in (0.6, 3.0, 12.0):
            began = time.time()
            dealing = asyncio.create_task(scene.make(f"F38 database clock {way}", seconds))
            await asyncio.sleep(0.3)
            await connection.execute(
                "INSERT INTO outbox (task_id, job_id, queue, priority, relay_at)"
                " VALUES (gen_random_uuid(), gen_random_uuid(), 'q', 0, now())"
            )
            during = await is_wrong_by(sign * JUMP_SECONDS)
            is_in_time = not dealing.done()
            effect = await dealing
            if is_in_time:  # else a busy machine has let the statements come too late
                break
        assert is_in_time
        assert during
        assert effect > JUMP_SECONDS / 2
        assert await is_wrong_by(0)
        change = await connection.fetchrow(
            "SELECT at, ahead FROM chaos.change WHERE kind = 'outbox' ORDER BY number DESC LIMIT 1"
        )
    assert change is not None
    assert change["ahead"] == sign * JUMP_SECONDS
    assert began - 1 < change["at"].timestamp() < time.time() + 1


async def test_a_volume_that_nobody_may_mount_is_a_plain_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    volume = Volume(tmp_path / "disk", megabytes=16)
    await volume.mount()
    assert (tmp_path / "disk").is_dir()
    assert not volume.mounted
    assert not volume.fill()
    assert not await volume.freeze()
    await volume.unmount()


async def test_a_frozen_volume_is_let_go_and_unmounted_whatever_ends_its_owner(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    code = (
        "import asyncio, os, signal, sys\nfrom pathlib import Path\nfrom chaos.disk import Volume\n"
        "async def main():\n"
        "    volume = Volume(Path(sys.argv[1]), megabytes=16)\n"
        "    await volume.mount()\n"
        "    print(volume.mounted and await volume.freeze(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(disk), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await owner.communicate()
    if said.strip() != b"True":
        not_here("to mount takes privileges")
    async with asyncio.timeout(60):
        while disk.is_mount():
            await asyncio.sleep(0.05)


async def test_tables_that_a_migration_alters_are_nobodys_meanwhile_and_everybodys_afterwards(scene: Scene) -> None:
    async with scene.connection() as connection:

        async def read() -> int:
            while not dealing.done():
                await connection.fetch("SELECT id FROM outbox")
                await asyncio.sleep(0.01)
            return len(await connection.fetch("SELECT * FROM outbox"))

        dealing = asyncio.create_task(scene.make("F44 alter tables", 1.5))
        assert await read() == 0
        assert await dealing >= 1
        rows = await connection.fetch(
            "SELECT DISTINCT table_name FROM information_schema.columns WHERE column_name LIKE 'chaos\\_%'"
        )
    assert {row["table_name"] for row in rows} >= {"task", "job", "outbox"}


async def test_a_purge_takes_the_hints_that_a_worker_held_unacknowledged(scene: Scene) -> None:
    rabbitmq = scene.servers.rabbitmq
    if rabbitmq is None:
        not_here("there is no RabbitMQ")
    scene.amqp_url = await rabbitmq.add_vhost(NAME)
    scene.plan = Plan(0, 1.0, workers=("worker-0",))
    link = scene.links["worker-0", "amqp"] = Link(("127.0.0.1", rabbitmq.port))
    await link.open()
    through = scene.amqp_url.replace(f":{rabbitmq.port}/", f":{link.port}/")
    async with await aio_pika.connect(scene.amqp_url) as publisher:
        channel = await publisher.channel()
        queue = await channel.declare_queue("leasehold.chaos.normal")
        worker = await aio_pika.connect(through)
        its = await (await worker.channel()).get_queue(queue.name)
        await channel.default_exchange.publish(aio_pika.Message(b"hint"), queue.name)
        assert await its.get() is not None
        assert await scene.make("F18 purge the queues", 0) == 1
        left = await channel.declare_queue(queue.name, passive=True)
        assert left.declaration_result.message_count == 0
    async with await aio_pika.connect(through):  # the worker comes back
        pass
    await worker.close()
    await link.close()
    await rabbitmq.delete_vhost(NAME)
