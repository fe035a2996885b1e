"""A whole installation on this machine, for `leasehold dev` and `demo`: embedded servers, the API and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias
from urllib.parse import urlencode

import asyncpg
import httpx2
from cryptography.fernet import Fernet
from pydantic import SecretStr
from rich.console import Console

from leasehold.api.console import tickets
from leasehold.cli.terminal import print_line
from leasehold.client.requests import DIRECT
from leasehold.db.database import connect
from leasehold.domain.errors import LeaseholdError
from leasehold.embedded.ports import free_port, require_free
from leasehold.embedded.process import EmbeddedError, RunAs, Server
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import find_rabbitmq
from leasehold.embedded.stack import EmbeddedStack
from leasehold.runtime.gather import cancel_and_wait, gather_or_cancel
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.security.credentials import create_key, revoke_key
from leasehold.settings import Settings, as_variables, servers_of_database
from leasehold.starting import parse_settings
from leasehold.worker.sandbox import isolation

#: `dev` and `demo` make an API key of this tenant, unless LEASEHOLD_TENANT names another.
TENANT = "dev"
#: The scopes of this API key.
SCOPES = (
    "media:read", "media:write", "runs:read", "runs:write", "templates:write", "external:work", "webhooks:write",
    "fleet:operate", "jobs:read", "jobs:operate", "jobs:delete", "conversion:read", "conversion:write",
    "generation:read", "generation:write", "keys:write", "people:write", "audit:read",
)  # fmt: skip
#: How long the API may take until it is ready, in seconds.
_START_SECONDS = 60.0
#: The worker's LEASEHOLD_DRAIN_SECONDS, if the user sets none. After the signal to stop, running steps may go on for
#: this time. Then the worker releases them. The time is short, so that a restart after a change of a file is quick.
_DRAIN_SECONDS = 3.0
#: After the drain seconds, the API and the worker may take this time to end: _STOP_SECONDS at the end of the command,
#: and _RESTART_SECONDS at a restart. A worker that is killed too early releases nothing, and each of its steps counts a
#: loss.
_STOP_SECONDS, _RESTART_SECONDS = 15.0, 2.0
#: After _STOP_SECONDS or _RESTART_SECONDS, the API and the worker get a second signal, and after this many seconds more
#: they are killed. On the second signal, a worker that waits for a step that is not cancelable gives the step's task
#: back. Otherwise a restart could take three minutes.
_AGAIN_SECONDS = 3.0
#: The other parts get this time before RabbitMQ starts, because the start of RabbitMQ takes all cores.
_HEAD_START_SECONDS = 3.0
#: How long the ticket in the console's URL is valid, in seconds.
_TICKET_SECONDS = 86_400

#: The type of `upgrade(settings, revision)` of cli/migrate.py.
Upgrade: TypeAlias = Callable[[Settings, str], Awaitable[object]]


class Installation:
    """`async with Installation(...)`: the installation serves inside the block. At its end, everything that it started
    is stopped.

    `database_url`, `amqp_url` and `s3` (variables `LEASEHOLD_S3_*`) name servers that run elsewhere; all other servers
    are embedded. A PostgreSQL that only the environment or `.env` names is not used. `data`: the directory of the
    embedded servers' data; None: a temporary one. `patient`: wait about 8 s for the embedded RabbitMQ. Otherwise
    RabbitMQ starts after the other parts, and the worker polls until RabbitMQ is up.
    """

    def __init__(
        self,
        *,
        data: Path | None = None,
        port: int = 0,
        database_url: str | None = None,
        amqp_url: str | None = None,
        s3: Mapping[str, str] | None = None,
        patient: bool = True,
    ) -> None:
        self.api_url = f"http://127.0.0.1:{port or free_port()}"
        self.api_key = ""
        self.logs: dict[str, Path] = {}  # `api` and `worker` -> its log file
        self.metrics: dict[str, str] = {}  # `api` and `worker` -> the URL of its metrics
        self._metrics_ports: dict[str, int] = {}
        self.isolation = "required"  # LEASEHOLD_ISOLATION of both processes
        self._tenant = TENANT
        self._processes: list[Server] = []
        self._port = self.api_url.rpartition(":")[2]
        self._external_variables = dict(s3 or {})  # these variables name the servers that run elsewhere
        if database_url:
            self._external_variables |= as_variables(servers_of_database(database_url))
        if amqp_url:
            self._external_variables |= {"LEASEHOLD_AMQP_URL": amqp_url, "LEASEHOLD_BROKER": "amqp"}
        rabbitmq = None if amqp_url else find_rabbitmq()
        self._stack = EmbeddedStack(data, postgres=not database_url, s3=not s3, rabbitmq=rabbitmq if patient else None)
        self._late_rabbitmq = None if patient else rabbitmq  # the RabbitMQ that starts after the other parts
        self._keeps_data = data is not None or database_url is not None  # the database outlives this process
        self._cleanup = AsyncExitStack()  # stops all that was started

    async def __aenter__(self) -> Self:
        """Start the embedded servers. Then start the API and the worker while the schema is made, and wait until the
        API is ready. If RabbitMQ starts late, start it in the background once the API is ready. Raises BadSetting for a
        wrong variable, before anything starts.
        """
        require_free(int(self._port))
        parse_settings()
        async with AsyncExitStack() as exit_stack:
            loading_upgrade = asyncio.create_task(asyncio.to_thread(_load_upgrade))
            await exit_stack.enter_async_context(self._stack)
            exit_stack.push_async_callback(self._revoke_key)
            rabbitmq = self._configured_late_rabbitmq()
            self.environment = self._environment_of_processes(rabbitmq)
            # The API and the worker import their modules while the schema is made, and then wait for the schema.
            await gather_or_cancel(
                (
                    self._start(exit_stack, "api"),
                    self._start(exit_stack, "worker"),
                    self._prepare_database(loading_upgrade),
                )
            )
            await self._until_ready()
            if rabbitmq is not None:
                start_task = asyncio.create_task(_start_late(rabbitmq))
                exit_stack.push_async_callback(_abandon, rabbitmq, start_task)
            self._cleanup = exit_stack.pop_all()
        return self

    def _configured_late_rabbitmq(self) -> RabbitMQ | None:
        """The embedded RabbitMQ that will start after the other parts. Returns None if RabbitMQ runs already, or if
        there is none to start.
        """
        if self._late_rabbitmq is None:
            return None
        rabbitmq = RabbitMQ(self._stack.directory / "rabbitmq", self._late_rabbitmq)
        rabbitmq.configure()
        return rabbitmq

    def _environment_of_processes(self, late_rabbitmq: RabbitMQ | None) -> dict[str, str]:
        """The variables `LEASEHOLD_*` of the API and the worker. Values that the user has set replace the defaults."""
        environment = self._stack.environment | self._external_variables
        if late_rabbitmq is not None:
            environment |= {"LEASEHOLD_BROKER": "amqp", "LEASEHOLD_AMQP_URL": late_rabbitmq.url}
        settings = parse_settings()  # from the environment, and from the folder's .env
        names_set_by_user = settings.model_fields_set
        self.isolation = settings.isolation if "isolation" in names_set_by_user else default_isolation()
        self._tenant = settings.tenant if "tenant" in names_set_by_user else TENANT
        environment["LEASEHOLD_TENANT"] = self._tenant
        defaults = {
            # The interval is shorter if RabbitMQ starts late, because until then no hints (messages that a task is due)
            # come.
            "poll_seconds": "0.5" if late_rabbitmq is None else "0.1",
            "drain_seconds": f"{_DRAIN_SECONDS:g}",
            "pipelines": "leasehold.pipelines:with_demonstrations",
            "isolation": self.isolation,
            "sealing_keys": _stored_sealing_key(self._stack.directory),
        }
        for name, default in defaults.items():
            value = _text_of(getattr(settings, name)) if name in names_set_by_user else default
            environment[f"LEASEHOLD_{name.upper()}"] = value
        return environment

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    @property
    def _drain_seconds(self) -> float:
        return float(self.environment["LEASEHOLD_DRAIN_SECONDS"])

    @property
    def ended(self) -> list[Server]:
        """The API or the worker, or both, if they have ended by themselves."""
        return [server for server in self._processes if not server.running]

    async def restart(self) -> None:
        """Stop the API and the worker, and start them again with the present code. The worker releases steps that still
        run after the drain seconds.
        """
        await asyncio.gather(*(self._stop(server, _RESTART_SECONDS) for server in self._processes))
        self._processes.clear()
        await asyncio.gather(self._start(self._cleanup, "api"), self._start(self._cleanup, "worker"))
        await self._until_ready()

    async def restart_ended(self) -> None:
        """Start the API, the worker or both again, if they have ended by themselves."""
        for server in self.ended:
            self._processes.remove(server)
            await self._start(self._cleanup, server.name)
        await self._until_ready()

    @property
    def broker(self) -> str:
        """The broker, as text for the terminal."""
        if self.environment["LEASEHOLD_BROKER"] == "postgres":
            return "none found: workers poll PostgreSQL (the `postgres` broker)"
        location = "elsewhere" if "LEASEHOLD_AMQP_URL" in self._external_variables else "embedded"
        return f"RabbitMQ, {location}" + (
            " (still starting; workers poll until it is up)" if self._late_rabbitmq else ""
        )

    @property
    def fences(self) -> str:
        """The fences (what the kernel offers to isolate a step), as text for the terminal."""
        fences = isolation.of_this_kernel()
        missing_fences = isolation.missing(fences)
        if not missing_fences:
            return fences
        if self.isolation == "required":
            return f"{', '.join(missing_fences)} missing: isolated steps are refused (LEASEHOLD_ISOLATION=required)"
        return f"{', '.join(missing_fences)} missing: isolated steps run nevertheless (LEASEHOLD_ISOLATION=best_effort)"

    def console_url(self, following: str = "/") -> str | None:
        """The console's URL with a ticket that signs in anybody who opens the URL within a day. `following`: the path
        of the page to open. Returns None if the console is off.
        """
        sealing_keys = SecretStr(self.environment["LEASEHOLD_SEALING_KEYS"])
        settings = Settings().model_copy(update={"sealing_keys": sealing_keys})
        if settings.console_path is None:
            return None
        ticket = tickets.ticket(settings, self.key_id, _TICKET_SECONDS)
        query = urlencode({"ticket": ticket, "following": following})
        return f"{self.api_url}{settings.console_path}/enter?{query}"

    async def _start(self, cleanup: AsyncExitStack, module: str) -> None:
        """Start the API or the worker. `cleanup` will stop it."""
        directory = self._stack.directory
        self.logs[module] = directory / f"{module}.log"
        if module not in self._metrics_ports:  # a restart keeps the addresses that were printed
            self._metrics_ports[module] = free_port()
        self.metrics[module] = f"http://127.0.0.1:{self._metrics_ports[module]}/metrics"
        server = await Server.start(
            module,
            [sys.executable, "-P", "-m", f"leasehold.{module}"],
            log=self.logs[module],
            env={
                **environment_with(self.environment),
                "LEASEHOLD_API_PORT": self._port,
                "LEASEHOLD_METRICS_PORT": str(self._metrics_ports[module]),
                "LEASEHOLD_WORK_DIR": str(directory / "work"),
            },
            cwd=Path.cwd(),  # where the user's own module lies
            run_as=RunAs(),
            last_signal=signal.SIGTERM,  # if this command dies, the API and the worker stop in order
        )
        cleanup.push_async_callback(self._stop, server, _STOP_SECONDS)
        self._processes.append(server)

    async def _stop(self, server: Server, seconds: float) -> None:
        """Stop the API or the worker. The process gets a second signal if it has not ended after the drain seconds and
        `seconds` more.
        """
        await server.stop(signal.SIGTERM, grace=self._drain_seconds + seconds, again=_AGAIN_SECONDS)

    async def _prepare_database(self, loading_upgrade: asyncio.Task[Upgrade]) -> None:
        """Bring the schema up to date, and make the API key."""
        servers: dict[str, Any] = servers_of_database(self.environment["LEASEHOLD_DATABASE_URL"])
        settings = Settings(**servers, pipelines=self.environment["LEASEHOLD_PIPELINES"], database_app_role=None)
        upgrade = await loading_upgrade
        await upgrade(settings, "head")
        connection = await connect(settings, "setup")
        try:
            self.api_key = (await create_key(connection, tenant_id=self._tenant, client_id="dev", scopes=SCOPES)).text
        finally:
            await connection.close()

    async def _revoke_key(self) -> None:
        """Revoke the API key that this start has made, if the database outlives this process. Otherwise each start
        would leave a valid key with all scopes in the database, until the tenant has its maximum number of keys.
        """
        if not self._keeps_data or not self.api_key:
            return
        servers: dict[str, Any] = servers_of_database(self.environment["LEASEHOLD_DATABASE_URL"])
        # By now the database may be unreachable, or may have been replaced. The command must end nevertheless.
        with contextlib.suppress(*TRY_AGAIN, LeaseholdError, asyncpg.PostgresError):
            connection = await connect(Settings(**servers, database_app_role=None), "setup")
            try:
                await revoke_key(connection, self.key_id)
            finally:
                await connection.close()

    @property
    def key_id(self) -> str:
        """The public part of the API key."""
        return self.api_key.split("_")[1]

    async def _until_ready(self) -> None:
        """Wait until the API is ready. Raises EmbeddedError with the end of a log if a process does not start."""
        api = next(server for server in self._processes if server.name == "api")
        try:
            async with asyncio.timeout(_START_SECONDS), httpx2.AsyncClient(mounts=DIRECT) as client:
                self._refuse_ended_processes()
                while not await self._api_is_ready(client):
                    await asyncio.sleep(0.05)
                    self._refuse_ended_processes()
        except TimeoutError:
            raise api.failure(f"was not ready within {_START_SECONDS:g} s") from None

    def _refuse_ended_processes(self) -> None:
        for server in self._processes:
            if not server.running:
                raise server.failure("did not start")

    async def _api_is_ready(self, client: httpx2.AsyncClient) -> bool:
        try:
            answer = await client.get(f"{self.api_url}/readyz")
        except httpx2.TransportError:
            return False
        return answer.status_code == httpx2.codes.OK


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with these variables, for a process of the installation. For each NAME in `variables`,
    the environment's NAME_FILE is left out, because a process refuses to start if both are set. The environment's
    LEASEHOLD_S3* are left out, because they may describe another S3 service. If the environment names a proxy, the
    process does not use it for 127.0.0.1.
    """
    files = {f"{name}_FILE" for name in variables}
    hosts_without_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    without_proxy = f"{hosts_without_proxy},127.0.0.1" if hosts_without_proxy else "127.0.0.1"
    return {
        name: value for name, value in os.environ.items() if name not in files and not name.startswith("LEASEHOLD_S3")
    } | {"no_proxy": without_proxy, "NO_PROXY": without_proxy, **variables}


def _load_upgrade() -> Upgrade:
    """Import cli/migrate.py, and return its `upgrade`. Call this in a thread while PostgreSQL starts, because the
    import, which loads alembic, takes half a second, and much longer the first time.
    """
    from leasehold.cli.migrate import upgrade  # noqa: PLC0415 - as above

    return upgrade


def _text_of(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def _stored_sealing_key(directory: Path) -> str:
    """The key that encrypts secrets in the database, if the user has set none. A file in `directory` keeps the key."""
    file = directory / "sealing-key"
    if not file.exists():
        RunAs().write_file(file, Fernet.generate_key().decode())
    return file.read_text()


def default_isolation() -> str:
    """The value of LEASEHOLD_ISOLATION if the user sets none: `best_effort` if the kernel lacks fences (what confines
    an isolated step), because such steps must run on every developer's machine. `demo`, and `dev` without an app, then
    print which fences are missing.
    """
    return "best_effort" if isolation.missing(isolation.of_this_kernel()) else "required"


async def _start_late(rabbitmq: RabbitMQ) -> None:
    """Start RabbitMQ after the other parts, because its start takes 8 s on all cores, and would delay these parts. If
    RabbitMQ does not start, the installation works without it.
    """
    await asyncio.sleep(_HEAD_START_SECONDS)
    try:
        await rabbitmq.start()
    except EmbeddedError as error:
        message = f"leasehold: {error}; the work goes on without RabbitMQ: the worker polls PostgreSQL"
        print_line(message, to=Console(stderr=True))


async def _abandon(rabbitmq: RabbitMQ, start_task: asyncio.Task[None]) -> None:
    """Stop the late RabbitMQ, even if it is still starting."""
    await cancel_and_wait(start_task)
    await rabbitmq.kill()
