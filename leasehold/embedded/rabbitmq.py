"""Runs a private RabbitMQ node on free loopback ports, for `leasehold dev` and the tests."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

from leasehold.embedded.management import Management
from leasehold.embedded.ports import free_port
from leasehold.embedded.process import EmbeddedError, Server, kill_if_running, unprivileged
from leasehold.embedded.rabbitmq_install import RabbitServer
from leasehold.embedded.tls import Tls

USER = "leasehold"
START_SECONDS = 90.0  # a start takes 8 s on a quiet machine
STOP_SECONDS = 30.0
FLUSH_BYTES = 16 * 1024  # the size of the write cache of the node's definitions (see flush_definitions)
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"  # the first bytes that a client sends
METHOD_FRAME = b"\x01"  # the first byte of the node's answer
DISK_LIMIT, MEMORY_LIMIT = "50MB", "512MB"  # the node raises an alarm below this free disk, or above this memory

# The Erlang VM has two schedulers. They do not spin while they wait, because on a small machine spinning takes a whole
# core.
ERLANG_FLAGS = "+S 2:2 +SDcpu 1:1 +SDio 4 +sbwt none +sbwtdcpu none +sbwtdio none"

# The text of `inetrc`, a file of the Erlang VM. With this file the node's name resolves without /etc/hosts, for example
# in a bare chroot.
HOST_NAMES = '{lookup, [file, native]}.\n{host, {127,0,0,1}, ["localhost"]}.\n'

# The parts of rabbitmq.conf. `configure` writes values in place of the names in braces.
PLAIN_LISTENER = "listeners.tcp.1 = 127.0.0.1:{amqp}\n"
ENCRYPTED_LISTENER = """\
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
    """One node with its data in `directory`. A restart uses the same data and ports.

    `program`: the installed RabbitMQ. `settings`: further lines of rabbitmq.conf. `tls`: if given, the node accepts
    only encrypted AMQP connections. `epmd_port`: the port of the epmd (Erlang's port mapper) that the nodes of a
    cluster share; None: the node starts an epmd of its own. `erlang`: further flags of the Erlang VM.
    """

    def __init__(
        self,
        directory: Path,
        program: RabbitServer,
        *,
        settings: tuple[str, ...] = (),
        tls: Tls | None = None,
        epmd_port: int | None = None,
        erlang: str = "",
    ) -> None:
        self._settings = settings
        self._tls = tls
        self.directory = directory
        self.port = free_port()
        self._management_port = free_port()
        self._distribution_port = free_port()
        self._epmd_port = epmd_port or free_port()
        self._erlang = erlang
        self._installed = program
        self._run_as = unprivileged()
        self._password = ""
        self._server: Server | None = None

    @property
    def url(self) -> str:
        """The URL of the default virtual host, with the password. Use it after `configure`, which sets the password."""
        return f"{'amqps' if self._tls else 'amqp'}://{USER}:{self._password}@127.0.0.1:{self.port}/"

    @property
    def name(self) -> str:
        """The node's name, as the cluster and RabbitMQ's tools use it."""
        return f"{self._node_name}@localhost"

    @property
    def management(self) -> Management:
        return Management(f"http://127.0.0.1:{self._management_port}", self.url)

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    async def add_vhost(self, name: str) -> str:
        """Make a virtual host. Returns its URL."""
        return await self.management.add_vhost(name)

    async def delete_vhost(self, name: str) -> None:
        await self.management.delete_vhost(name)

    async def flush_definitions(self) -> None:
        """Write all definitions to disk now.

        The node writes its table of queues and virtual hosts up to 2 s late. If the node is killed before the write, it
        restarts without the newest queues and the confirmed messages in them. A definition that is larger than the
        write cache (16 KiB) flushes the cache, so this call writes such a definition.
        """
        await self.management.call("PUT", "/api/global-parameters/flush", {"value": "x" * 4 * FLUSH_BYTES})

    async def start(self) -> None:
        """Start the node, and wait until clients can connect.

        Raises:
            EmbeddedError: the node did not start, or it did not answer in time.
        """
        if self.running:
            return
        self.configure()
        self._server = await Server.start(
            "RabbitMQ",
            [self._installed.program],
            log=self.directory / "rabbitmq.log",
            env=self._environment(),
            cwd=self.directory,
            run_as=self._run_as,
        )
        await self._server.wait_until_ready(self._until_ready(self._server), seconds=START_SECONDS)

    async def stop(self) -> None:
        """Stop the node cleanly, and kill it after STOP_SECONDS. A node that does not run stays stopped."""
        if self._server is not None:
            await self._server.stop(signal.SIGTERM, grace=STOP_SECONDS)

    async def kill(self) -> None:
        """Kill the node and all its helpers by SIGKILL, as in a crash."""
        if self._server is not None:
            await self._server.kill()

    async def need_free_disk(self, size: str = DISK_LIMIT) -> None:
        """Set the disk alarm. The node then blocks publishers while less than `size` of the disk is free. The next
        start resets the alarm.

        Raises:
            EmbeddedError: the node refused the limit.
        """
        await self.run_tool("rabbitmqctl", "set_disk_free_limit", size)

    async def allow_memory(self, size: str = MEMORY_LIMIT) -> None:
        """Set the memory alarm. The node then blocks publishers while it uses more than `size` of memory. The next
        start resets the alarm.

        Raises:
            EmbeddedError: the node refused the limit.
        """
        await self.run_tool("rabbitmqctl", "set_vm_memory_high_watermark", "absolute", size)

    async def run_tool(self, name: str, *arguments: str) -> str:
        """Run one of RabbitMQ's own programs, such as rabbitmqctl, on this node. Returns the program's output.

        Raises:
            EmbeddedError: the program failed.
        """
        program = self._installed.program.with_name(name)
        process = await asyncio.create_subprocess_exec(
            program, *arguments, env=self._environment(), cwd=self.directory, user=self._run_as.user,
            group=self._run_as.group, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output = (await process.communicate())[0].decode(errors="replace").strip()
        finally:
            await kill_if_running(process)
        if process.returncode:
            raise EmbeddedError(f"{name} {arguments[0]}: {output}")
        return output

    async def is_ready(self) -> bool:
        """Whether the node answers an AMQP client now. With TLS, only whether the node accepts connections."""
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
        """Write the files that the node reads at its start. `start` calls it."""
        for name in ("", "home", "data", "log", "schema", "generated"):
            self._run_as.make_directory(self.directory / name)
        password_file = self.directory / "password"
        if not password_file.exists():
            self._run_as.write_file(password_file, secrets.token_urlsafe(24))
        self._password = password_file.read_text()
        configuration = self._listeners() + CONFIGURATION.format(
            management=self._management_port,
            user=USER,
            password=self._password,
            disk=DISK_LIMIT,
            memory=MEMORY_LIMIT,
        )
        configuration += "".join(f"{line}\n" for line in self._settings)
        self._run_as.write_file(self.directory / "rabbitmq.conf", configuration)
        self._run_as.write_file(self.directory / "enabled_plugins", "[rabbitmq_management].\n")
        self._run_as.write_file(self.directory / "inetrc", HOST_NAMES)

    def _listeners(self) -> str:
        if self._tls is None:
            return PLAIN_LISTENER.format(amqp=self.port)
        certificate, key, authority = self._tls.write(self.directory, self._run_as)
        return ENCRYPTED_LISTENER.format(
            amqp=self.port,
            certificate=certificate,
            key=key,
            authority=authority,
            verify="verify_peer" if self._tls.requires_client_certificate else "verify_none",
            refuse=str(self._tls.requires_client_certificate).lower(),
        )

    def _environment(self) -> dict[str, str]:
        home = self.directory
        environment = {
            "PATH": self._installed.search_path,
            "LANG": "C.UTF-8",
            "HOME": str(home / "home"),  # for the Erlang cookie
            "RUNNING_UNDER_SYSTEMD": "true",  # the start script then execs the node, so the node gets SIGTERM
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_PID_FILE": str(home / "rabbitmq.pid"),
            "RABBITMQ_SCHEMA_DIR": str(home / "schema"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
            "ERL_INETRC": str(home / "inetrc"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"-kernel inet_dist_use_interface {{127,0,0,1}} {ERLANG_FLAGS} {self._erlang}"
            ),
        }
        if self._installed.library_path:
            environment["LD_LIBRARY_PATH"] = self._installed.library_path
        return environment

    @property
    def _node_name(self) -> str:
        """The node's name without the host. A node finds its data by its name, so a file keeps the name."""
        path = self.directory / "node-name"
        if not path.exists():
            self._run_as.write_file(path, f"leasehold-{secrets.token_hex(4)}")
        return path.read_text()
