"""The wheel as a user gets it: built, installed into an environment that has nothing else, and its programs run."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx2

from leasehold.embedded.process import kill_if_running

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0


@cache
def uv() -> str:
    """The uv that makes .venv, as scripts/env.sh finds it."""
    script = f'. {shlex.quote(str(ROOT / "scripts/env.sh"))}; find_uv "$(find_python)"'
    return run(["bash", "-c", script]).strip()


def run(command: list[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """What it prints; fails with what it complains of."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, env=env, timeout=PATIENCE)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def build(out: Path, *arguments: str, source: Path = ROOT) -> None:
    run([uv(), "build", "--quiet", "--out-dir", str(out), *arguments, str(source)])


def install(wheel: Path, home: Path, *extras: str) -> Environment:
    """An environment with the wheel and what it asks for, at the versions of uv.lock."""
    run([uv(), "venv", "--quiet", "--python", sys.executable, str(home)])
    lock = home / "constraints.txt"
    flags = ["--no-hashes", "--no-dev", "--all-extras", "--no-emit-project"]
    run([uv(), "export", "--quiet", "--frozen", *flags, "--output-file", str(lock)])
    python = ["--quiet", "--python", str(home / "bin/python")]
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    run([uv(), "pip", "install", *python, "--constraints", str(lock), wanted])
    run([uv(), "pip", "check", *python])
    return Environment(home)


@dataclass(frozen=True)
class Environment:
    home: Path

    def python(self, code: str) -> str:
        return run([str(self.home / "bin/python"), "-I", "-c", code], cwd=self.home)


@dataclass(frozen=True)
class Programs:
    """`leasehold ...` of an environment, started in a folder of the user's with the user's settings."""

    environment: Environment
    folder: Path
    settings: dict[str, str]

    def _variables(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "XDG_CACHE_HOME") if name in os.environ}
        return kept | {f"LEASEHOLD_{name}": value for name, value in self.settings.items()}

    def _command(self, *arguments: str) -> list[str]:
        return [str(self.environment.home / "bin/leasehold"), *arguments]

    async def python(self, *arguments: str) -> str:
        """What `python ...` of the environment prints."""
        command = [str(self.environment.home / "bin/python"), *arguments]
        return await asyncio.to_thread(run, command, cwd=self.folder, env=self._variables())

    async def run(self, *arguments: str) -> str:
        return await asyncio.to_thread(run, self._command(*arguments), cwd=self.folder, env=self._variables())

    @asynccontextmanager
    async def serve(self, *arguments: str) -> AsyncIterator[Serving]:
        """Runs until it is told to stop, and must then end well."""
        log = self.folder.parent / f"{arguments[0]}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command(*arguments), cwd=self.folder, env=self._variables(), stdout=output, stderr=output
            )
        serving = Serving(process, log)
        try:
            yield serving
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == 0, serving.said()
        finally:
            await kill_if_running(process)


@dataclass(frozen=True)
class Serving:
    process: asyncio.subprocess.Process
    log: Path

    def said(self) -> str:
        return self.log.read_text()

    async def says(self, words: str) -> str:
        """Wait until it has; returns all that it said."""
        async with asyncio.timeout(PATIENCE):
            while words not in (said := self.said()):
                assert self.process.returncode is None, said[-4000:]
                await asyncio.sleep(0.05)
        return said

    async def answers(self, url: str) -> None:
        """Wait until the API there does."""
        async with httpx2.AsyncClient() as client, asyncio.timeout(PATIENCE):
            while True:
                assert self.process.returncode is None, self.said()[-4000:]
                try:
                    if (await client.get(f"{url}/livez")).is_success:
                        return
                except httpx2.TransportError:
                    await asyncio.sleep(0.05)
