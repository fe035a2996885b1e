"""The installation of one run: a database, a virtual host and a bucket of its own, 2 APIs and 3 workers, and a proxy in
each connection between them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import asyncpg
from cryptography.fernet import Fernet

from chaos import journal
from chaos.amqp_tap import AmqpTap, HintRecord
from chaos.catalogue import APIS
from chaos.disk import Disk
from chaos.plan import Plan
from chaos.postgres_tap import PostgresTap, Session
from chaos.proxy import Link
from chaos.receiver import Receiver
from chaos.servers import Servers
from chaos.settings import PROCESS_SETTINGS, SCOPES, SUBSCRIBER, TENANTS
from chaos.slots import Slot
from chaos.store_front import StoreFront
from chaos.transactions import TransactionWatch
from leasehold.cli.installation import default_isolation
from leasehold.domain.ids import new_id
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key
from leasehold.security.sealing import Sealing
from leasehold.security.signing import new_secret
from leasehold.settings import Settings, as_variables, servers_of_database
from leasehold.storage.store import ObjectStore
from tests.generation.simulator.protocols import BEARER, VOLCENGINE
from tests.generation.simulator.server import Simulator

_START_SECONDS = 90.0
_STOP_SECONDS = 20.0
CLIENT = "client"
#: The links that lead to PostgreSQL: to the primary, and to a standby if there is one.
_DATABASES = ("postgres", "standby")
#: The ways in which a commit waits for the standby. None of them loses a commit (docs/operations/failover.md).
_MODES = ("remote_apply", "on", "quorum, on")
_SUBSCRIBE = """
INSERT INTO webhook (id, tenant_id, url, secrets, events)
VALUES ($1, $2, $3, $4, '{run.succeeded,run.failed,run.cancelled,run.expired}')
"""


class Installation:
    """`async with Installation(servers, plan) as installation`: it serves inside the block, and all its processes end
    with the block.
    """

    def __init__(self, servers: Servers, plan: Plan, *, mutate: str = "") -> None:
        self.servers = servers
        self.plan = plan
        self.name = f"chaos_{secrets.token_hex(4)}"
        self.directory = servers.directory / self.name
        self.disk = Disk(self.work_dir)
        self.front = StoreFront(servers.s3, plan.seed)
        self._hook_secrets = {SUBSCRIBER: new_secret()}
        self.receiver = Receiver(plan.seed, self._hook_secrets)
        self.provider = Simulator()
        self._sealing_key = Fernet.generate_key().decode()
        self.links: dict[tuple[str, str], Link] = {}  # by slot and server
        self.slots: dict[str, Slot] = {}
        self.ports = {name: free_port() for name in APIS}
        self.keys: dict[str, str] = {}
        self.hint_records: list[HintRecord] = []
        self.sessions: list[Session] = []
        self.transactions = TransactionWatch(lambda: self.database_url)
        self._amqp_url = ""
        self.mutate = mutate
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            self.directory.mkdir()
            await self.disk.mount()
            opening.push_async_callback(self.disk.unmount)
            await self.servers.add_database(self.name, of_release=self.plan.begins_with_release)
            opening.push_async_callback(self.servers.drop_database, self.name)
            if self.plan.has_standby:
                opening.push_async_callback(self.servers.remove_standby)
                await self.servers.add_standby(_MODES[self.plan.seed % len(_MODES)])
            if self.servers.rabbitmq is not None:
                self._amqp_url = await self.servers.rabbitmq.add_vhost(self.name)
                await self.servers.rabbitmq.flush_definitions()
                opening.push_async_callback(self._drop_vhost)
            await self.front.open((*self.plan.workers, *APIS, CLIENT))
            opening.push_async_callback(self.front.close)
            await self._open_links(opening)
            await self._make_keys()
            await self.receiver.open()
            opening.push_async_callback(self.receiver.close)
            await opening.enter_async_context(self.provider)
            await self._subscribe()
            await self._make_bucket(opening)
            opening.push_async_callback(self.stop)
            await self._start()
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    # --- for the run

    @property
    def workers(self) -> list[Slot]:
        return [self.slots[name] for name in self.plan.workers]

    @property
    def apis(self) -> list[Slot]:
        return [self.slots[name] for name in APIS]

    def started(self) -> dict[str, int]:
        """All processes of the platform that were started, dead ones too: name in the journal -> pid."""
        return {name: pid for slot in self.slots.values() for name, pid in slot.started.items()}

    def running(self) -> list[tuple[str, int]]:
        """The processes of the platform that run now: (name in the journal, pid)."""
        return [(slot.process_name, slot.pid) for slot in self.slots.values() if slot.pid is not None]

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    @property
    def work_dir(self) -> Path:
        return self.directory / "work"

    @property
    def bucket(self) -> str:
        return self.name.replace("_", "-")

    @property
    def database_url(self) -> str:
        """The URL of the database without a proxy, for observers: faults of links do not hit them."""
        return self.servers.postgres.url_of(self.name)

    @property
    def amqp_url(self) -> str:
        """The URL of the broker without a proxy; "" without a broker."""
        return self._amqp_url

    def links_to(self, server: str) -> list[Link]:
        """The links of all processes of the platform to the server. Observers have no links."""
        return [self.links[slot, server] for slot in self.slots if (slot, server) in self.links]

    async def promote(self) -> None:
        """Make the standby the primary, and swap the links' names. The old primary may go on running."""
        await self.servers.promote()
        for slot in {slot for slot, _ in self.links}:
            primary, standby = self.links[slot, "postgres"], self.links[slot, "standby"]
            self.links[slot, "postgres"], self.links[slot, "standby"] = standby, primary

    def _databases(self, slot: str) -> list[Link]:
        return [self.links[slot, server] for server in _DATABASES if (slot, server) in self.links]

    def settings(self, slot: str) -> Settings:
        variables = {name.removeprefix("LEASEHOLD_").lower(): value for name, value in self._variables(slot).items()}
        return Settings(_env_file=None, **variables)  # type: ignore[arg-type]  # pydantic reads the text of each

    def heal(self) -> None:
        """End every fault of links and store."""
        self.disk.empty()
        self.front.faults.heal()
        for link in self.links.values():
            link.heal()

    async def stop(self) -> dict[str, int | None]:
        """Stop every process as an operator would. Returns the exit codes by the name of the process."""
        slots = list(self.slots.values())
        codes = await asyncio.gather(*(slot.close(_STOP_SECONDS) for slot in slots))
        return dict(zip((slot.name for slot in slots), codes, strict=True))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        connection = await asyncpg.connect(self.database_url)
        try:
            yield connection
        finally:
            await connection.close()

    # --- starting

    async def _open_links(self, opening: AsyncExitStack) -> None:
        for slot in (*self.plan.workers, *APIS, CLIENT):
            for server, port in self._ports(slot).items():
                link = self._link(slot, server, port)
                await link.open()
                opening.push_async_callback(link.close)
                self.links[slot, server] = link

    def _ports(self, slot: str) -> dict[str, int]:
        ports = {"postgres": self.servers.postgres.port, "s3": self.front.ports[slot]}
        if self.servers.rabbitmq is not None:
            ports["amqp"] = self.servers.rabbitmq.port
        if self.servers.standby is not None:
            ports["standby"] = self.servers.standby.port
        return ports

    def _link(self, slot: str, server: str, port: int) -> Link:
        def process_name() -> str:
            return self.slots[slot].process_name if slot in self.slots else slot

        target = ("127.0.0.1", port)
        if server == "amqp":
            return Link(target, lambda: AmqpTap(process_name(), self.hint_records.append), self.plan.seed)
        if server in _DATABASES:
            return Link(target, lambda: PostgresTap(process_name(), self.sessions.append, port), self.plan.seed)
        return Link(target, seed=self.plan.seed)

    async def _make_keys(self) -> None:
        async with self.connection() as connection:
            for tenant in TENANTS:
                key = await create_key(connection, tenant_id=tenant, client_id="chaos", scopes=SCOPES)
                self.keys[tenant] = key.text

    async def _subscribe(self) -> None:
        sealing = Sealing(self.settings(CLIENT))
        async with self.connection() as connection:
            url = f"http://127.0.0.1:{self.receiver.port}/{SUBSCRIBER}"
            sealed = sealing.seal(self._hook_secrets[SUBSCRIBER])
            await connection.execute(_SUBSCRIBE, new_id(), SUBSCRIBER, url, [sealed])

    async def _make_bucket(self, opening: AsyncExitStack) -> None:
        store = ObjectStore.from_settings(self.settings(CLIENT))
        await store.open()
        opening.push_async_callback(store.close)
        await store.ensure_bucket()
        bucket = self.servers.s3.directory / "buckets" / self.bucket
        opening.callback(shutil.rmtree, bucket, ignore_errors=True)

    async def _start(self) -> None:
        for name in (*self.plan.workers, *APIS):
            self.slots[name] = Slot(
                name, directory=self.directory, environment=self._environment(name), mutate=self.mutate
            )
            if self.plan.begins_with_release:
                self.slots[name].release = await self.servers.release()
        async with asyncio.timeout(_START_SECONDS):
            for slot in self.slots.values():
                slot.start()
            await asyncio.gather(
                *(slot.until_up('"serving"') for slot in self.workers), *(slot.until_up("") for slot in self.apis)
            )

    def _environment(self, slot: str) -> _Environment:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        credentials = json.dumps({"gateway": BEARER, "jimeng": VOLCENGINE})
        variables = self._variables(slot) | {"LEASEHOLD_GENERATION_CREDENTIALS": credentials}
        return _Environment(self, slot, inherited | variables)

    def _variables(self, slot: str) -> dict[str, str]:
        stack = self.servers.stack.environment
        variables = {name: value for name, value in stack.items() if name.startswith("LEASEHOLD_S3")}
        variables |= {f"LEASEHOLD_{name}": str(value) for name, value in PROCESS_SETTINGS.items()}
        variables["LEASEHOLD_BROKER"] = "amqp" if self.amqp_url else "postgres"
        variables |= as_variables(servers_of_database(_through(self.database_url, *self._databases(slot))))
        variables["LEASEHOLD_S3_ENDPOINT"] = f"http://127.0.0.1:{self.links[slot, 's3'].port}"
        variables["LEASEHOLD_S3_BUCKET"] = self.bucket
        variables["LEASEHOLD_SEALING_KEYS"] = self._sealing_key
        variables["LEASEHOLD_WORK_DIR"] = str(self.work_dir)
        variables["LEASEHOLD_ISOLATION"] = default_isolation()
        if self.amqp_url:
            variables["LEASEHOLD_AMQP_URL"] = _through(self.amqp_url, self.links[slot, "amqp"])
        variables |= {f"LEASEHOLD_{name.upper()}": str(value) for name, value in self.provider.settings().items()}
        if slot in self.ports:
            variables["LEASEHOLD_API_PORT"] = str(self.ports[slot])
        return variables

    async def _drop_vhost(self) -> None:
        assert self.servers.rabbitmq is not None
        await self.servers.rabbitmq.delete_vhost(self.name)


class _Environment:
    """The environment of each process of a slot."""

    def __init__(self, installation: Installation, slot: str, common: Mapping[str, str]) -> None:
        self._installation = installation
        self._slot = slot
        self._common = common

    def __call__(self, generation: int) -> dict[str, str]:
        name = f"{self._slot}.{generation}"
        own = {
            "LEASEHOLD_FAILPOINTS": self._installation.plan.failpoints(self._slot, self._fired()),
            journal.PATH_VARIABLE: str(self._installation.journal),
            journal.PROCESS_VARIABLE: name,
        }
        return {**self._common, **own}

    def _fired(self) -> set[str]:
        """The failpoints at which earlier processes of the slot acted, as `name:act`."""
        return {
            f"{line['name']}:{line['act']}"
            for line in journal.read(self._installation.journal)
            if line["what"] == "failpoint" and line["process"].partition(".")[0] == self._slot
        }


def _through(url: str, *links: Link) -> str:
    """The URL, with the addresses of the links instead of its own."""
    parts = urlsplit(url)
    hosts = ",".join(f"127.0.0.1:{link.port}" for link in links)
    return parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@{hosts}").geturl()
