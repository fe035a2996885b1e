"""A private RabbitMQ node on free loopback ports, for `leasehold dev` and the tests."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

from leasehold.embedded.management import Management
from leasehold.embedded.ports import free_port
from leasehold.embedded.process import EmbeddedError, Server, unprivileged
from leasehold.embedded.rabbitmq_install import RabbitServer
from leasehold.embedded.tls import Tls

USER = "leasehold"
START_SECONDS = 90.0  # 8 s on a quiet machine
STOP_SECONDS = 30.0
FLUSH_BYTES = 16 * 1024
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"
DISK, MEMORY = "50MB", "512MB"

# Two schedulers, and none that waits by spinning: kind to small machines, where spinning takes a whole core.
ERLANG_FLAGS = "+S 2:2 +SDcpu 1:1 +SDio 4 +sbwt none +sbwtdcpu none +sbwtdio none"

# The node's own name must resolve even where /etc/hosts is missing, as in a bare chroot.
NAMES = '{lookup, [file, native]}.\n{host, {127,0,0,1}, ["localhost"]}.\n'

PLAIN = "listeners.tcp.1 = 127.0.0.1:{amqp}\n"
ENCRYPTED = """\
listeners.tcp = none
listeners.ssl.1 = 127.0.0.1:{amqp}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.cacertfile = {authority}
ssl_options.verify = {verify}
ssl_options.fail_if_no_peer_cert = {refuse}
"""
CONFIGURATION = """\
management.tcp.ip = 127.0.0.1
management.tcp.port = {management}
management_agent.disable_metrics_collector = true
default_user = {user}
default_pass = {password}
default_permissions.configure = .*
default_permissions.read = .*
default_permissions.write = .*
disk_free_limit.absolute = {disk}
vm_memory_high_watermark.absolute = {memory}
log.console = true
log.console.level = warning
log.file = false
"""


class RabbitMQ:
    """One node with its data in `directory`; `start` after `stop` or `kill` finds the same data and ports.

    `settings`: further lines of rabbitmq.conf. `tls`: with it, only encrypted AMQP connections are taken.
    """

    def __init__(
        self, directory: Path, program: RabbitServer, *, settings: tuple[str, ...] = (), tls: Tls | None = None
    ) -> None:
        self._settings = settings
        self._tls = tls
        self.directory = directory
        self.port = free_port()
        self._management_port = free_port()
        self._distribution_port = free_port()
        self._epmd_port = free_port()
        self._program = program
        self._run_as = unprivileged()
        self._password = ""
        self._server: Server | None = None

    @property
    def url(self) -> str:
        """The default virtual host; known once the node was configured. It holds the password."""
        return f"{'amqps' if self._tls else 'amqp'}://{USER}:{self._password}@127.0.0.1:{self.port}/"

    @property
    def management(self) -> Management:
        return Management(f"http://127.0.0.1:{self._management_port}", self.url)

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    async def add_vhost(self, name: str) -> str:
        """Make a virtual host; gives its URL."""
        return await self.management.add_vhost(name)

    async def delete_vhost(self, name: str) -> None:
        await self.management.delete_vhost(name)

    async def flush_definitions(self) -> None:
        """Have what was declared until now written to disk.

        The node's table of queues and virtual hosts is written up to 2 s late: one that is killed sooner comes back
        without a queue that was declared just before, and without the confirmed messages in it. A definition larger
        than the write cache (16 KiB) flushes it.
        """
        await self.management.call("PUT", "/api/global-parameters/flush", {"value": "x" * 4 * FLUSH_BYTES})

    async def start(self) -> None:
        """Start, and wait until clients can connect.

        Raises:
            EmbeddedError: it did not start.
        """
        if self.running:
            return
        self.configure()
        self._server = await Server.start(
            "RabbitMQ",
            [self._program.program],
            log=self.directory / "rabbitmq.log",
            env=self._environment(),
            cwd=self.directory,
            run_as=self._run_as,
        )
        try:
            await asyncio.wait_for(self._until_ready(self._server), START_SECONDS)
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> None:
        """Stop in order; nothing happens where it does not run."""
        if self._server is not None:
            await self._server.stop(signal.SIGTERM, grace=STOP_SECONDS)

    async def kill(self) -> None:
        """SIGKILL to the node and all its helpers, as a crash does."""
        if self._server is not None:
            await self._server.kill()

    async def need_free_disk(self, size: str = DISK) -> None:
        """With less than this free the alarm is on, and who publishes is blocked; until the node starts again.

        Raises:
            EmbeddedError: the node did not take it.
        """
        await self._control("set_disk_free_limit", size)

    async def allow_memory(self, size: str = MEMORY) -> None:
        """With more than this in use the alarm is on; as above."""
        await self._control("set_vm_memory_high_watermark", "absolute", size)

    async def _control(self, *command: str) -> None:
        program = self._program.program.with_name("rabbitmqctl")
        process = await asyncio.create_subprocess_exec(
            program, *command, env=self._environment(), cwd=self.directory, user=self._run_as.user,
            group=self._run_as.group, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
        if process.returncode:
            raise EmbeddedError(f"rabbitmqctl {command[0]}: {said.decode(errors='replace').strip()}")

    async def is_ready(self) -> bool:
        """Whether an AMQP client would be greeted now; of a node with TLS, whether somebody listens."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        if self._tls is not None:
            writer.close()
            return True
        try:
            writer.write(PROTOCOL_HEADER)
            return await reader.read(1) == METHOD_FRAME
        except OSError:
            return False
        finally:
            writer.close()

    async def _until_ready(self, server: Server) -> None:
        while not (await self.is_ready() and await self.management.is_ready()):
            if not server.running:
                raise server.failure("did not start")
            await asyncio.sleep(0.05)

    def configure(self) -> None:
        """Write what the node reads when it starts; `start` does it, too."""
        for name in ("", "home", "data", "log", "schema", "generated"):
            self._run_as.directory(self.directory / name)
        password = self.directory / "password"
        if not password.exists():
            self._run_as.file(password, secrets.token_urlsafe(24))
        self._password = password.read_text()
        text = self._listeners() + CONFIGURATION.format(
            management=self._management_port,
            user=USER,
            password=self._password,
            disk=DISK,
            memory=MEMORY,
        )
        text += "".join(f"{line}\n" for line in self._settings)
        self._run_as.file(self.directory / "rabbitmq.conf", text)
        self._run_as.file(self.directory / "enabled_plugins", "[rabbitmq_management].\n")
        self._run_as.file(self.directory / "inetrc", NAMES)

    def _listeners(self) -> str:
        if self._tls is None:
            return PLAIN.format(amqp=self.port)
        certificate, key, authority = self._tls.write(self.directory, self._run_as)
        return ENCRYPTED.format(
            amqp=self.port,
            certificate=certificate,
            key=key,
            authority=authority,
            verify="verify_peer" if self._tls.clients else "verify_none",
            refuse=str(self._tls.clients).lower(),
        )

    def _environment(self) -> dict[str, str]:
        here = self.directory
        environment = {
            "PATH": self._program.search_path,
            "LANG": "C.UTF-8",
            "HOME": str(here / "home"),  # where the Erlang cookie is made
            "RUNNING_UNDER_SYSTEMD": "true",  # no shell stays between us and the node, so SIGTERM reaches it
            "RABBITMQ_NODENAME": f"{self._node_name}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(here / "data"),
            "RABBITMQ_LOG_BASE": str(here / "log"),
            "RABBITMQ_CONFIG_FILE": str(here / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(here / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(here / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_PID_FILE": str(here / "rabbitmq.pid"),
            "RABBITMQ_SCHEMA_DIR": str(here / "schema"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(here / "generated"),
            "ERL_INETRC": str(here / "inetrc"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (f"-kernel inet_dist_use_interface {{127,0,0,1}} {ERLANG_FLAGS}"),
        }
        if self._program.library_path:
            environment["LD_LIBRARY_PATH"] = self._program.library_path
        return environment

    @property
    def _node_name(self) -> str:
        """Names the data, so it is the same for as long as the data is kept."""
        kept = self.directory / "node-name"
        if not kept.exists():
            self._run_as.file(kept, f"leasehold-{secrets.token_hex(4)}")
        return kept.read_text()
