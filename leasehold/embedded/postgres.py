"""Runs a private PostgreSQL server on a free loopback port, for `leasehold dev`, the demo and the tests."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
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
from leasehold.embedded.postgres_programs import find_postgres, find_postgres_with_tls
from leasehold.embedded.process import Server, run, unprivileged
from leasehold.embedded.tls import Tls

USER = "leasehold"
DATABASE = "leasehold"
START_SECONDS = 30.0  # the longest time until the server answers
STOP_SECONDS = 15.0  # after this time a stop kills the server

# The server's settings, with and without durability.
DURABLE = {"max_connections": "200", "dynamic_shared_memory_type": "mmap"}  # mmap leaves nothing in /dev/shm
NOT_DURABLE = DURABLE | {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "128MB",  # the data directory may be in memory
}
_NOBODYS_ID = 2**31 - 1  # no process has this id, because Linux gives ids below 2**22
# The mode of `pg_ctl stop` -> the signal to the server.
SHUTDOWN_SIGNALS = {"fast": signal.SIGINT, "smart": signal.SIGTERM, "immediate": signal.SIGQUIT}


class Postgres:
    """One server with its data in `directory`.

    Args:
        directory: the directory of the data; the first start fills it
        durable: False turns fsync and synchronous_commit off, for tests. Then a crash of the machine may damage the
            data, and a crash of the server may lose what was committed within the last second
        port: the port to listen on; 0: a free port
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
        self._run_as = unprivileged()  # PostgreSQL refuses to run as root
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
            EmbeddedError: no PostgreSQL was found, it did not start, or it did not answer in time.
        """
        if self.running:
            return
        self._run_as.make_directory(self.directory)
        self._bin = self._programs or await self._find_programs()
        await self._make_cluster()
        _forget_dead_server(self._data)
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
            # If this process dies, the guard (guard.py) ends the server by this signal. After SIGKILL the server would
            # not free its shared memory.
            last_signal=signal.SIGQUIT,
        )
        await self._server.wait_until_ready(self._until_ready(self._server), seconds=START_SECONDS)

    async def _find_programs(self) -> Path:
        return await find_postgres(self._run_as) if self._tls is None else await find_postgres_with_tls()

    def _tls_settings(self, tls: Tls) -> dict[str, str]:
        certificate, key, authority = tls.write(self.directory, self._run_as)
        client_option = " clientcert=verify-ca" if tls.requires_client_certificate else ""
        self._run_as.write_file(
            self._data / "pg_hba.conf", f"hostssl all all 127.0.0.1/32 scram-sha-256{client_option}\n"
        )
        return {
            "ssl": "on",
            "ssl_cert_file": str(certificate),
            "ssl_key_file": str(key),
            "ssl_ca_file": str(authority),
        }

    async def stop(self, mode: Literal["fast", "smart", "immediate"] = "fast") -> None:
        """Stop as `pg_ctl stop -m MODE` does. A server that does not run stays stopped."""
        if self._server is not None:
            await self._server.stop(SHUTDOWN_SIGNALS[mode], grace=STOP_SECONDS)

    async def kill(self) -> None:
        """Kill the server and all its children by SIGKILL, as in a crash."""
        if self._server is not None:
            await self._server.kill()

    async def forget(self) -> None:
        """Free the few bytes of shared memory that a killed server has left. Call this if the server will not start
        again.
        """
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
        """If there is no data directory, make it by initdb. Set `_password` to the password of the data."""
        password_file = self.directory / "password"
        if (self._data / "PG_VERSION").exists():
            self._password = password_file.read_text()
            return
        # initdb may be killed after it has written PG_VERSION. So the directory gets the name `data` only when it is
        # complete. (An old version of this module may have left a `data` without PG_VERSION, which is incomplete.)
        new_data = self.directory / "data.new"
        for leftover in (new_data, self._data):
            shutil.rmtree(leftover, ignore_errors=True)
        self._password = secrets.token_urlsafe(24)
        self._run_as.write_file(password_file, self._password)
        verifier_file = self._run_as.write_file(self.directory / "verifier", _verifier(self._password))
        initdb: list[str | Path] = [self._bin / "initdb", "-D", new_data, "-U", USER, "--pwfile", verifier_file]
        initdb += ["-E", "UTF8", "--locale=C.UTF-8", "-A", "scram-sha-256"]
        await run(
            "initdb",
            initdb if self._durable else [*initdb, "--no-sync"],
            log=self._log,
            env=_environment(),
            cwd=self.directory,
            run_as=self._run_as,
        )
        new_data.rename(self._data)

    async def _until_ready(self, server: Server) -> None:
        """Wait until the server accepts a connection. Make the database `leasehold`, if there is none."""
        while True:
            if not server.running:
                raise server.failure("did not start")
            try:
                connection = await asyncpg.connect(self.url_of("postgres"), ssl=self._client_context())
            # Either the server does not answer yet, or another server has the port and refuses this client. In the
            # second case our server soon ends, because it cannot get the port, and the check above notices this.
            except (OSError, asyncpg.PostgresError):
                await asyncio.sleep(0.02)
                continue
            try:
                if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
                    await connection.execute(f"CREATE DATABASE {DATABASE}")
            finally:
                await connection.close()
            return

    def _client_context(self) -> ssl.SSLContext | Literal[False]:
        if self._tls is None:
            return False
        context = ssl.create_default_context(cadata=self._tls.authority)
        context.check_hostname = False  # the certificate may lack the address 127.0.0.1
        if self._tls.requires_client_certificate:  # this client shows the server's certificate, the only one there is
            context.load_cert_chain(self.directory / "server.crt", self.directory / "server.key")
        return context


def _forget_dead_server(data: Path) -> None:
    """Change a stale postmaster.pid, which would keep PostgreSQL from starting.

    A killed server leaves its process id in postmaster.pid. After a restart of the machine or of a container, another
    process may soon have this id. PostgreSQL mistakes that process for a server, and refuses to start. So this function
    replaces the id. The file's other lines stay, because PostgreSQL needs them to find out whether a part of the dead
    server still runs. PostgreSQL also refuses an empty file, which a full disk leaves. So this function deletes an
    empty file.
    """
    pid_file = data / "postmaster.pid"
    try:
        first_line, *other_lines = pid_file.read_text().splitlines() or [""]
    except FileNotFoundError:
        return
    if not first_line.strip():
        pid_file.unlink()
        return
    try:
        is_server = Path(f"/proc/{int(first_line)}/cwd").samefile(data)  # a server's current folder is its data
    except (OSError, ValueError):  # no process has the id, or its folder cannot be read; then PostgreSQL decides
        return
    if not is_server:
        pid_file.write_text("\n".join([str(_NOBODYS_ID), *other_lines, ""]))


def _verifier(password: str) -> str:
    """The SCRAM verifier of the password (RFC 5803), which PostgreSQL stores unchanged. It has one iteration, because
    with PostgreSQL's default, 4096, each connection would take 2 ms more. More iterations protect only weak passwords,
    and this password has 192 random bits.
    """
    salt = secrets.token_bytes(16)
    salted_password = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    client_key, server_key = (hmac.digest(salted_password, name, "sha256") for name in (b"Client Key", b"Server Key"))
    stored_key = hashlib.sha256(client_key).digest()
    parts = [base64.b64encode(part).decode() for part in (salt, stored_key, server_key)]
    return "SCRAM-SHA-256$1:{}${}:{}".format(*parts)


def _environment() -> dict[str, str]:
    # The PG* variables of the caller must not change the server. The system's programs may need LD_LIBRARY_PATH.
    library_path = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC", **library_path}


def _remove_shared_memory(pid_file: Path) -> None:
    """Remove the segment of shared memory that the server named in its postmaster.pid."""
    lines = pid_file.read_text().splitlines()
    segment = lines[6].split() if len(lines) > 6 else []  # noqa: PLR2004 - line 7 is "key id"
    ipcrm = shutil.which("ipcrm")
    if len(segment) == 2 and ipcrm:  # noqa: PLR2004
        subprocess.run([ipcrm, "-m", segment[1]], check=False, capture_output=True)
