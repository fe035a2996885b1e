"""Starts a real Prometheus for one test: the one on the PATH, else Debian's package, unpacked into the cache."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml

from leasehold.embedded.debian import unpack_packages
from leasehold.embedded.directories import cache_directory
from leasehold.embedded.ports import free_port
from leasehold.embedded.process import Server, unprivileged
from leasehold.embedded.programs import runnable_copy_of

START_SECONDS = 60.0


@dataclass(frozen=True)
class Programs:
    prometheus: Path
    promtool: Path


async def install_prometheus() -> Programs:
    """Find Prometheus and promtool, or unpack the distribution's package (20 MB to download) into the cache.

    Raises:
        EmbeddedError: this is not Debian or Ubuntu, or the package could not be downloaded.
    """
    on_path = [shutil.which(name) for name in ("prometheus", "promtool")]
    if all(on_path):
        return Programs(*(Path(path) for path in on_path if path))
    unpacked = cache_directory() / "prometheus-debian"
    with (unpacked.parent / "prometheus.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # another run may be unpacking it now
        if not unpacked.exists():
            with tempfile.TemporaryDirectory(prefix=f"{unpacked.name}.", dir=unpacked.parent) as scratch:
                root = Path(scratch) / "root"
                root.mkdir(mode=0o755)
                await unpack_packages(["prometheus"], root)
                root.rename(unpacked)
    return Programs(unpacked / "usr/bin/prometheus", unpacked / "usr/bin/promtool")


class Prometheus:
    """One server with its data and its configuration in `directory`."""

    def __init__(self, directory: Path, programs: Programs) -> None:
        self.directory = directory
        self.port = free_port()
        self._programs = programs
        self._run_as = unprivileged()
        self._server: Server | None = None

    async def start(self, targets: Mapping[str, Sequence[int]], rules: str) -> None:
        """Scrape the ports of every job each second, and evaluate `rules` as often."""
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
                for job, ports in targets.items()
            ],
        }
        for name in ("", "data"):
            self._run_as.make_directory(self.directory / name)
        self._run_as.write_file(self.directory / "prometheus.yaml", yaml.safe_dump(configuration))
        self._run_as.write_file(self.directory / "rules.yaml", rules)
        program = await runnable_copy_of(self._programs.prometheus, [self._programs.prometheus], self._run_as)
        self._server = await Server.start(
            "Prometheus",
            [
                program,
                f"--config.file={self.directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={self.directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--enable-feature=exemplar-storage",
            ],
            log=self.directory / "prometheus.log",
            env={"PATH": os.defpath, "HOME": str(self.directory), "GOMAXPROCS": "1"},
            cwd=self.directory,
            run_as=self._run_as,
        )
        async with asyncio.timeout(START_SECONDS):
            while not await self._ready():
                if not self._server.running:
                    raise self._server.failure("did not start")
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(signal.SIGTERM, grace=10)

    async def _ready(self) -> bool:
        try:
            async with httpx2.AsyncClient() as client:
                return (await client.get(f"http://127.0.0.1:{self.port}/-/ready")).is_success
        except httpx2.TransportError:
            return False

    async def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of the HTTP API. Raises AssertionError with Prometheus' message if it refuses."""
        async with httpx2.AsyncClient(timeout=60) as client:
            answer = await client.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The series to which the expression evaluates now."""
        series: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return series


async def run_promtool(programs: Programs, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of promtool."""
    process = await asyncio.create_subprocess_exec(
        programs.promtool, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()
