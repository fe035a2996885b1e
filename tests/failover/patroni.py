"""Three Patroni nodes with their own Raft on this machine: loopback, ports of their own, no other store."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
from pydantic import SecretStr

from leasehold.embedded.ports import free_port
from leasehold.embedded.postgres import SHUTDOWN_SIGNALS
from leasehold.embedded.postgres_programs import find_postgres
from leasehold.embedded.process import Server, unprivileged
from leasehold.settings import Settings

NODES = 3
#: Seconds until a silent leader is replaced: the least that Patroni takes.
TTL = 20
USER = PASSWORD = DATABASE = "leasehold"
_SECONDS = 90.0
_PORTS = ("postgres", "rest", "raft")


class Node:
    """`ports`: by the names of _PORTS."""

    def __init__(self, name: str, directory: Path, patroni: Path) -> None:
        self.name = name
        self.directory = directory
        self.ports = {of: free_port() for of in _PORTS}
        self._patroni = patroni
        self._server: Server | None = None

    @property
    def configuration(self) -> Path:
        return self.directory / "patroni.json"

    @property
    def url(self) -> str:
        """Of the administrative database of this node's PostgreSQL."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.ports['postgres']}/postgres"

    async def start(self) -> None:
        if self._server is not None and self._server.running:
            return
        self._server = await Server.start(
            "Patroni",
            [self._patroni, self.configuration],
            log=self.directory / "patroni.log",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            cwd=self.directory,
            run_as=unprivileged(),
            last_signal=SHUTDOWN_SIGNALS["immediate"],
        )

    async def kill(self) -> None:
        """SIGKILL to Patroni and to the PostgreSQL that it started."""
        if self._server is not None:
            await self._server.kill()

    def processes(self, *, agent: bool) -> list[int]:
        """Patroni's own process, or those of its PostgreSQL, which have the node's directory in their command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                line = path.read_bytes()
                if os.fsencode(self.directory) in line and b"guard.py" not in line:
                    found.append((int(path.parent.name), b"patroni.json" in line))
        servers = [pid for pid, is_agent in found if not is_agent]
        if agent:
            return [pid for pid, is_agent in found if is_agent]
        return servers + [pid for pid in _children() if _parent(pid) in servers]

    async def takes_writes(self) -> bool:
        try:
            connection = await asyncpg.connect(self.url, timeout=1)
            try:
                return not await connection.fetchval("SELECT pg_is_in_recovery()")
            finally:
                connection.terminate()
        except (OSError, TimeoutError, asyncpg.PostgresError):  # a demotion ends the session at any moment
            return False

    async def asked(self, method: str, path: str, body: dict[str, str] | None = None) -> Any:
        """Patroni's answer, or None."""
        async with httpx2.AsyncClient(timeout=60.0 if body else 1.0) as http:
            try:
                answer = await http.request(method, f"http://127.0.0.1:{self.ports['rest']}{path}", json=body)
            except httpx2.HTTPError:
                return None
            return (
                answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text
            )


def _children() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _parent(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


class Cluster:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @property
    def url(self) -> str:
        """Names all servers."""
        hosts = ",".join(f"127.0.0.1:{node.ports['postgres']}" for node in self.nodes)
        return f"postgresql://{USER}:{PASSWORD}@{hosts}/{DATABASE}"

    def settings(self, **more: Any) -> Settings:
        return Settings(_env_file=None, database_url=SecretStr(self.url), broker="postgres", **more)

    async def promoted(self, *, other_than: Node) -> float:
        """When another node began to take writes, in seconds of the epoch."""
        others = [node for node in self.nodes if node is not other_than]
        async with asyncio.timeout(_SECONDS):
            while not any([await node.takes_writes() for node in others]):
                await asyncio.sleep(0.02)
        return time.time()

    async def demoted(self, node: Node) -> float:
        """When the node took no more writes."""
        async with asyncio.timeout(_SECONDS):
            while await node.takes_writes():
                await asyncio.sleep(0.02)
        return time.time()

    async def leader(self, *, other_than: Node | None = None) -> Node:
        """The node that takes writes and is the leader by Patroni's own word."""
        async with asyncio.timeout(_SECONDS):
            while True:
                for node in self.nodes:
                    if node is not other_than and await self._leads(node):
                        return node
                await asyncio.sleep(0.1)

    async def _leads(self, node: Node) -> bool:
        view = await node.asked("GET", "/cluster")
        if not isinstance(view, dict):
            return False
        roles = {member["name"]: member["role"] for member in view.get("members", ())}
        # A node that has just been started again knows what it knew when it was killed: that it leads.
        return roles.get(node.name) == "leader" and await node.takes_writes()

    async def whole(self) -> Node:
        """The leader, once each node says that two nodes stream from it, one of them as its synchronous standby.

        A node that was killed or frozen says at first what it knew before. An old leader takes writes until then.
        """
        whole = [("leader", "running"), ("replica", "streaming"), ("sync_standby", "streaming")]
        async with asyncio.timeout(_SECONDS):
            while True:
                leader = await self.leader()
                views = [await node.asked("GET", "/cluster") or {"members": ()} for node in self.nodes]
                states = [sorted((member["role"], member["state"]) for member in view["members"]) for view in views]
                leaders = {member["name"] for view in views for member in view["members"] if member["role"] == "leader"}
                writers = [node for node in self.nodes if await node.takes_writes()]
                if states == [whole] * len(self.nodes) and leaders == {leader.name} and writers == [leader]:
                    return leader
                await asyncio.sleep(0.2)

    async def switch_over(self, leader: Node) -> None:
        await leader.asked("POST", "/switchover", {"leader": leader.name})


@contextmanager
def standing_still(pids: list[int]) -> Iterator[None]:
    assert pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # Patroni ended it meanwhile
                os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def cluster_in(directory: Path, patroni: Path) -> AsyncIterator[Cluster]:
    run_as = unprivileged()
    run_as.make_directory(directory)
    programs = await find_postgres(run_as)
    nodes = [Node(f"node{n}", run_as.make_directory(directory / f"node{n}"), patroni) for n in range(NODES)]
    for node in nodes:
        run_as.write_file(node.configuration, json.dumps(_configuration(node, nodes, programs), indent=1))
    cluster = Cluster(nodes)
    try:
        for node in nodes:
            await node.start()
        leader = await cluster.whole()
        maker = await asyncpg.connect(leader.url)
        await maker.execute(f"CREATE DATABASE {DATABASE}")
        await maker.close()
        yield cluster
    finally:
        for node in nodes:
            await node.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _configuration(node: Node, nodes: list[Node], programs: Path) -> dict[str, Any]:
    def address(of: str, which: Node = node) -> str:
        return f"127.0.0.1:{which.ports[of]}"

    login = {"username": USER, "password": PASSWORD}
    return {
        "scope": "leasehold",
        "name": node.name,
        "restapi": {"listen": address("rest"), "connect_address": address("rest")},
        "raft": {
            "data_dir": str(node.directory / "raft"),
            "self_addr": address("raft"),
            "partner_addrs": [address("raft", other) for other in nodes if other is not node],
        },
        "bootstrap": {
            "dcs": {
                "ttl": TTL,
                "loop_wait": 1,
                "retry_timeout": 3,
                "synchronous_mode": True,
                "postgresql": {
                    "use_pg_rewind": True,
                    "parameters": {
                        "max_connections": 200,
                        "synchronous_commit": "remote_apply",
                        "dynamic_shared_memory_type": "mmap",
                        "wal_log_hints": "on",
                    },
                },
            },
            "initdb": [{"encoding": "UTF8"}, {"locale": "C.UTF-8"}],
        },
        "postgresql": {
            "listen": address("postgres"),
            "connect_address": address("postgres"),
            "data_dir": str(node.directory / "data"),
            "bin_dir": str(programs),
            "pgpass": str(node.directory / "pgpass"),
            "authentication": {"superuser": login, "replication": login, "rewind": login},
            "pg_hba": ["host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"],
            "parameters": {"unix_socket_directories": ""},
        },
    }
