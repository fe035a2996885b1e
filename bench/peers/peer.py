"""The peers, which are the job systems that the bench compares with Leasehold: their packages, and for each the query
that counts its finished jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

#: Installs requirements into a directory.
Install: TypeAlias = Callable[[Path, tuple[str, ...]], Coroutine[None, None, None]]

#: Every system gets one process for each core.
CORES = len(os.sched_getaffinity(0))
_DRIVERS = Path(__file__).parent / "drivers"
_INSTALL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer. `done`: the query that counts its finished jobs. `jobs`: the number of jobs that take it some seconds.
    `has_processes`: its own command starts a process for each core; otherwise the bench starts a worker for each core.
    """

    name: str
    requirements: tuple[str, ...]
    done: str
    jobs: int
    has_processes: bool = False

    @property
    def driver(self) -> Path:
        return _DRIVERS / f"{self.name}_driver.py"

    async def environment(self) -> Path:
        """Install the peer. Returns its Python. Raises RuntimeError with pip's output."""
        home = await install_once(self.name, self.requirements, with_pip)
        return home / "bin/python"


PEERS = (
    Peer("celery", ("celery==5.7.0", "sqlalchemy==2.1.9", "psycopg2-binary==2.9.13"),
         "SELECT count(*) FROM celery_taskmeta WHERE status = 'SUCCESS'", 2000, has_processes=True),
    Peer("dramatiq", ("dramatiq[rabbitmq]==2.2.1", "psycopg[binary]==3.3.9"), "SELECT count(*) FROM peer_done", 4000,
         has_processes=True),
    Peer("taskiq", ("taskiq==0.13.0", "taskiq-aio-pika==0.6.1", "taskiq-postgres==0.9.1", "asyncpg==0.32.0",
                    "uvloop==0.23.0"), "SELECT count(*) FROM taskiq_results", 8000, has_processes=True),
    Peer("procrastinate", ("procrastinate==3.10.0", "psycopg[binary]==3.3.9", "uvloop==0.23.0"),
         "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'", 3000),
    Peer("pgqueuer", ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
         "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'", 30_000),
    Peer("dbos", ("dbos==3.4.0",), "SELECT count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'", 4000),
)  # fmt: skip


async def install_once(name: str, requirements: tuple[str, ...], install: Install) -> Path:
    """Install these versions, unless they are installed already. Returns their directory. Raises RuntimeError with the
    installer's output.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "leasehold" / "peers"
    stamp = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    home = cache / f"{name}-{stamp}"
    if not (home / "done").exists():
        await install(home, requirements)
        (home / "done").touch()
    return home


async def with_pip(home: Path, requirements: tuple[str, ...]) -> None:
    await _run(sys.executable, "-m", "venv", "--clear", str(home))
    await _run(str(home / "bin/python"), "-m", "pip", "install", "--quiet", *requirements)


async def with_npm(home: Path, requirements: tuple[str, ...]) -> None:
    await asyncio.to_thread(_write_package_json, home)
    await _run("npm", "install", "--silent", "--no-audit", "--no-fund", *requirements, cwd=home)


def _write_package_json(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_text("{}")  # otherwise npm looks for one in the directories above


async def _run(*command: str, cwd: Path | None = None) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]} here") from None
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _INSTALL_SECONDS)
    except TimeoutError:
        process.kill()
        raise RuntimeError(f"{command[0]} did not end in time") from None
    if process.returncode != 0:
        raise RuntimeError(output.decode(errors="replace")[-2000:])
