"""A place where mutants are judged: a copy of the checkout, servers of its own, and a nursery."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leasehold.embedded.directories import RunDirectory
from mutants.choosing import Chosen
from mutants.copies import make_copy
from mutants.mutant import Mutant
from mutants.places import ROOT
from mutants.servers import TEMPLATE

_LINE_BYTES = 1 << 24  # an order has a whole file in it
_START_SECONDS = 60.0
_SPARE_SECONDS = 20.0
_ERRORS_OF_IMPORT = (1, 2, 4)  # pytest's exit codes where a file of tests, or a conftest, cannot be loaded


@dataclass(frozen=True, slots=True)
class Judgement:
    """`verdict`: killed | timed out | survived | invalid | untested. `by`: the test that noticed; `why`: its error.
    `ran` of `of`: how many tests ran, of how many that could notice.
    """

    id: str
    verdict: str
    by: str = ""
    why: str = ""
    ran: int = 0
    of: int = 0
    seconds: float = 0.0


class Judge:
    def __init__(self, process: asyncio.subprocess.Process, database: str, known: Mapping[str, str]) -> None:
        self._process = process
        self._database = database
        self._known = known

    async def judge(self, mutant: Mutant, chosen: Chosen) -> Judgement:
        """Run the chosen tests beside the mutant.

        Raises:
            RuntimeError: the nursery has ended.
        """
        if not chosen.tests:
            return Judgement(mutant.id, "untested", why="no test runs it")
        text = mutant.applied((ROOT / mutant.path).read_text())
        try:
            compile(text, mutant.path, "exec")
        except SyntaxError as error:
            return Judgement(mutant.id, "invalid", why=str(error))
        order = {
            "path": mutant.path,
            "text": text,
            "tests": chosen.tests,
            "limits": chosen.limits,
            "seconds": sum(chosen.limits[:3]) + sum(chosen.limits[3:]) / 5 + _SPARE_SECONDS,
            "statements": self._known,
            "database": self._database,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        return _judgement(mutant, chosen, await answer(self._process))


def _judgement(mutant: Mutant, chosen: Chosen, told: dict[str, Any]) -> Judgement:
    ran, seconds, by, why = told.get("ran", 0), round(told["seconds"], 2), told.get("by", ""), told.get("why", "")
    if "invalid" in told:
        verdict, why = "invalid", told["invalid"]
    elif told["code"] is None or told.get("timeout"):
        verdict = "timed out"
    elif by:
        verdict = "killed"
    elif told["code"] in _ERRORS_OF_IMPORT:
        verdict, by = "killed", "import"
    elif told["code"] == 0 and ran:
        verdict = "survived"
    elif told["code"] < 0:
        verdict, by = "killed", f"signal {-told['code']}"
    else:
        verdict, why = "untested", f"pytest ended with {told['code']}"
    return Judgement(mutant.id, verdict, by, why, ran, chosen.of, seconds)


async def answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a nursery ended with {await process.wait()}")
    told: dict[str, Any] = json.loads(line)
    return told


@asynccontextmanager
async def judge(servers: Mapping[str, str]) -> AsyncIterator[Judge]:
    """`servers`: the variables that lead to them."""
    with RunDirectory() as directory:
        python = await asyncio.to_thread(make_copy, directory.path / "checkout")
        database = servers[TEMPLATE]
        known = await _statements(python, database)
        process = await _start(python, directory.path / "checkout", servers)
        try:
            await asyncio.wait_for(answer(process), _START_SECONDS)
            yield Judge(process, database, known)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _start(python: Path, copy: Path, servers: Mapping[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        python,
        "-m",
        "mutants.nursery",
        cwd=copy,
        env=os.environ | servers,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        start_new_session=True,  # Ctrl-C is for this process, which ends the nursery
    )


async def _statements(python: Path, database: str) -> dict[str, str]:
    listing = await asyncio.create_subprocess_exec(
        python, "-m", "mutants.statements", database, cwd=python.parents[2], stdout=asyncio.subprocess.PIPE
    )
    listed, _ = await listing.communicate()
    if listing.returncode:
        raise RuntimeError("the statements could not be listed")
    known: dict[str, str] = json.loads(listed)
    return known
