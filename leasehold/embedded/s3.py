"""Runs a private S3 server, `rclone serve s3`. It checks signatures and keeps objects as plain files on disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path

from leasehold.embedded.ports import free_port, is_free
from leasehold.embedded.process import EmbeddedError, RunAs, Server, unprivileged
from leasehold.embedded.programs import runnable_copy_of
from leasehold.embedded.tls import Tls

START_SECONDS = 15.0  # how long a start may take
STOP_SECONDS = 5.0  # how long the server has to stop before it is killed
ACCESS_KEY = "leasehold"  # the name of the server's only client


class S3:
    """One server with its buckets in `directory`/buckets.

    Args:
        directory: the directory of the objects and the log
        bucket: a bucket that `start` makes
        port: the port to listen on; 0: a free port
        secret_key: the key of the S3 client; "": the first start makes a key and keeps it with the data
        allow_origin: the web page that may upload from a browser; "*" allows every page
        tls: if given, the server speaks HTTPS only
    """

    def __init__(
        self,
        directory: Path,
        *,
        bucket: str = "leasehold",
        port: int = 0,
        secret_key: str = "",
        allow_origin: str = "*",
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self.directory = directory
        self.bucket = bucket
        self.port = port or free_port()
        self.access_key = ACCESS_KEY
        self.secret_key = secret_key
        self._allow_origin = allow_origin
        self._run_as = unprivileged()
        self._server: Server | None = None

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    async def start(self) -> None:
        """Start the server. After a stop, the server starts again on the same port, with the same objects.

        Raises:
            EmbeddedError: rclone was not found, did not start, or did not answer in time.
        """
        if self.running:
            return
        self._run_as.make_directory(self.directory)
        buckets = self._run_as.make_directory(self.directory / "buckets")
        self._run_as.make_directory(buckets / self.bucket)
        self._remember_secret()
        program = await find_rclone(self._run_as)
        if not is_free(self.port):  # otherwise the process that uses this port now would answer our clients
            raise EmbeddedError(f"rclone serve s3 cannot start: port {self.port} is in use")
        address = f"127.0.0.1:{self.port}"
        options = ["--addr", address, "--allow-origin", self._allow_origin, *self._tls_options()]
        self._server = await Server.start(
            "rclone serve s3",
            [program, "serve", "s3", *options, buckets],
            log=self.directory / "s3.log",
            # The key is in the environment, because every user of the machine can read a command line. rclone reads the
            # variable as CSV.
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(self.directory),
                "RCLONE_CONFIG": "",
                "RCLONE_AUTH_KEY": f'"{self.access_key},{self.secret_key}"',
            },
            cwd=self.directory,
            run_as=self._run_as,
        )
        await self._server.wait_until_ready(self._until_ready(self._server), seconds=START_SECONDS)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(signal.SIGTERM, grace=STOP_SECONDS)

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.kill()

    def _tls_options(self) -> list[str | Path]:
        if self._tls is None:
            return []
        certificate, key, _ = self._tls.write(self.directory, self._run_as)
        return ["--cert", certificate, "--key", key]

    def _remember_secret(self) -> None:
        """Set the secret key, if the caller gave none, and keep it with the data."""
        path = self.directory / "secret-key"
        if not self.secret_key:
            self.secret_key = path.read_text() if path.exists() else secrets.token_hex(20)
        self._run_as.write_file(path, self.secret_key)

    # Wait until the server accepts a connection. Raises EmbeddedError if the server ends before that.
    async def _until_ready(self, server: Server) -> None:
        while server.running:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            with contextlib.suppress(OSError):  # the server may reset the connection after accepting it
                await writer.wait_closed()
            return
        raise server.failure("did not start")


async def find_rclone(run_as: RunAs) -> Path:
    """The path of rclone: $LEASEHOLD_RCLONE; else the program that a wheel has installed in the directory of this
    Python; else rclone on the PATH. If the user `run_as` cannot run that program, returns the path of a copy that this
    user can run.

    Raises:
        EmbeddedError: there is no rclone.
    """
    program = _installed_rclone()
    return await runnable_copy_of(program, [program], run_as)


def _installed_rclone() -> Path:
    wheel_program = Path(sys.executable).with_name("rclone")
    path = os.environ.get("LEASEHOLD_RCLONE") or (
        str(wheel_program) if wheel_program.exists() else shutil.which("rclone")
    )
    if path is None:
        raise EmbeddedError(
            "no rclone was found: install the extra `embedded`, or set LEASEHOLD_RCLONE to rclone 1.65 or newer"
        )
    return Path(path).absolute()  # rclone runs in another folder
