"""A RabbitMQ 3 cluster of three nodes on this machine: loopback, ports of their own, one epmd, one cookie.

The first node starts alone. So one of RabbitMQ 4 does not start: it waits for the others.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from leasehold.embedded.ports import free_port
from leasehold.embedded.process import Server, unprivileged
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import RabbitServer
from leasehold.runtime.transient import until_answered

NODES = 3
#: Seconds after which nodes count a silent one as down; RabbitMQ's default is a minute.
TICK_SECONDS = 1
VHOST = "cluster"
_SECONDS = 60.0
_POLICY = f"/api/policies/{VHOST}/all"


class Cluster:
    """`nodes`: by their AMQP ports. `handling`: RabbitMQ's `cluster_partition_handling`."""

    def __init__(self, nodes: list[RabbitMQ], cookie: str, handling: str) -> None:
        self._cookie = cookie
        self.handling = handling
        self.nodes = {node.port: node for node in nodes}

    @property
    def url(self) -> str:
        """All nodes, as LEASEHOLD_AMQP_URL names them."""
        return ",".join(f"{node.url}{VHOST}" for node in self.nodes.values())

    async def running(self) -> int:
        """How many nodes the cluster counts as running. A node that woke up alone pauses, and answers later."""
        counts: list[int] = []
        for node in self.nodes.values():
            with suppress(OSError):
                counts.append(sum(one["running"] for one in await node.management.call("GET", "/api/nodes")))
        return min(counts) if len(counts) == len(self.nodes) else 0

    async def serve_vhost(self) -> None:
        """Wait until all nodes serve the virtual host. A node that is still booting when it is made leaves it down,
        refuses its clients, and has no copies of its queues, until somebody starts it there.
        """
        while True:
            states = (await self._any_node.management.call("GET", f"/api/vhosts/{VHOST}"))["cluster_state"]
            down = [name for name, state in states.items() if state != "running"]
            if len(states) == len(self.nodes) and not down:
                return
            for name in down:
                await self._any_node.management.call("POST", f"/api/vhosts/{VHOST}/start/{name}")
            await asyncio.sleep(0.1)

    async def start_all(self) -> None:
        """Start the nodes that a failed test has left ended."""
        for node in self.nodes.values():
            await node.start()

    async def until_whole(self, queue: str) -> None:
        """Wait until all nodes run, and all have their copy of the queue. A node that counts as running may not have
        opened its copy yet: if the next one ended then, the queue would have lost two of three.
        """
        async with asyncio.timeout(_SECONDS):
            while await self.running() < len(self.nodes) or len((await self.describe(queue))["online"]) < len(
                self.nodes
            ):
                await asyncio.sleep(0.1)

    async def describe(self, queue: str) -> dict[str, Any]:
        """What the cluster says of the queue."""
        found = await self._any_node.management.call("GET", f"/api/queues/{VHOST}/{queue}")
        wanted = ("leader", "online", "members", "consumers", "messages_ready", "messages_unacknowledged", "state")
        return {key: found.get(key) for key in wanted}

    async def leader_of(self, queue: str) -> RabbitMQ:
        found = await self._any_node.management.call("GET", f"/api/queues/{VHOST}/{queue}")
        return next(node for node in self.nodes.values() if node.name == found["leader"])

    async def set_policy(self, definition: dict[str, int]) -> None:
        """Give all queues a policy, as an operator does while clients are connected."""
        policy = {"pattern": ".*", "apply-to": "queues", "definition": definition}
        await self._any_node.management.call("PUT", _POLICY, policy)

    async def drop_policy(self) -> None:
        await self._any_node.management.call("DELETE", _POLICY)

    @property
    def _any_node(self) -> RabbitMQ:
        return next(node for node in self.nodes.values() if node.running)

    async def part(self, node: RabbitMQ) -> None:
        """The node and the others lose each other, and all go on: clients reach each of them."""
        await self._change_cookies(node, "wrong")
        for other in self.nodes.values():
            if other is not node:
                await node.run_tool("rabbitmqctl", "eval", f"erlang:disconnect_node('{other.name}').")

    async def heal(self, node: RabbitMQ) -> None:
        await self._change_cookies(node, self._cookie)

    async def _change_cookies(self, node: RabbitMQ, cookie: str) -> None:
        """Nodes with different cookies refuse each other."""
        for other in self.nodes.values():
            if other is not node:
                await node.run_tool("rabbitmqctl", "eval", f"erlang:set_cookie('{other.name}', '{cookie}').")

    @contextmanager
    def frozen(self, node: RabbitMQ) -> Iterator[None]:
        """SIGSTOP to the node: its sockets stay open, and nothing answers."""
        pids = _processes_of(node.directory)
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):  # a port program of the node may have ended
                    os.kill(pid, signal.SIGCONT)


def _processes_of(directory: Path) -> list[int]:
    """The node's Erlang machine: it has its directory in its command line, as its guard has."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(directory) in line and b"beam" in line and b"guard.py" not in line:
            found.append(int(path.parent.name))
    return found


@asynccontextmanager
async def cluster_in(directory: Path, program: RabbitServer, handling: str) -> AsyncIterator[Cluster]:
    """`handling`: RabbitMQ's `cluster_partition_handling`."""
    run_as, port, cookie = unprivileged(), free_port(), secrets.token_hex(16)
    run_as.make_directory(directory)
    names = [f"leasehold-{secrets.token_hex(4)}" for _ in range(NODES)]
    settings = (
        "cluster_formation.peer_discovery_backend = classic_config",
        *(f"cluster_formation.classic_config.nodes.{place} = {name}@localhost" for place, name in enumerate(names, 1)),
        f"cluster_partition_handling = {handling}",
    )
    password = secrets.token_urlsafe(24)
    nodes = []
    for name in names:
        folder = run_as.make_directory(directory / name)
        run_as.write_file(folder / "node-name", name)
        run_as.write_file(folder / "password", password)
        run_as.write_file(run_as.make_directory(folder / "home") / ".erlang.cookie", cookie)
        erlang = f"-kernel net_ticktime {TICK_SECONDS}"
        nodes.append(RabbitMQ(folder, program, settings=settings, epmd_port=port, erlang=erlang))
    epmd = await Server.start(
        "epmd",
        [shutil.which("epmd", path=program.search_path) or "epmd", "-address", "127.0.0.1", "-port", str(port)],
        log=directory / "epmd.log",
        env={"PATH": program.search_path, "LD_LIBRARY_PATH": program.library_path},
        cwd=directory,
        run_as=run_as,
    )
    cluster = Cluster(nodes, cookie, handling)
    try:
        await nodes[0].start()
        await asyncio.gather(*(node.start() for node in nodes[1:]))
        while await cluster.running() < NODES:
            await asyncio.sleep(0.1)
        await until_answered(lambda: nodes[0].add_vhost(VHOST), within=_SECONDS)
        async with asyncio.timeout(_SECONDS):
            await cluster.serve_vhost()
        yield cluster
    finally:
        await asyncio.gather(*(node.kill() for node in nodes))
        await epmd.kill()
        shutil.rmtree(directory, ignore_errors=True)
