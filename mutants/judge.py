"""Judges mutants, one after another, in a copy of the checkout with servers of its own.

The nursery, a process in the copy, forks once for each mutant, and runs the mutant's tests in the fork (nursery.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leasehold.embedded.directories import RunDirectory
from mutants.choosing import UNIT, UNIT_TESTS, Chosen
from mutants.copies import make_copy
from mutants.mutant import Mutant
from mutants.places import ROOT
from mutants.servers import TEMPLATE

#: These tests run first, alone, besides unit tests. They notice most mutants, and a fork loads the files of all tests
#: before it runs one.
_FIRST_TESTS = 6
_LINE_BYTES = 1 << 24  # the longest line: an order has a whole file in it
_START_SECONDS = 60.0
_SPARE_SECONDS = 20.0
_IMPORT_FAILED = (1, 2, 4)  # pytest's exit codes if it cannot load a file of tests, or a conftest


@dataclass(frozen=True, slots=True)
class Judgement:
    """`verdict`: killed | timed out | survived | invalid | untested. `by`: the test that noticed; `why`: the error.
    `ran`: how many tests ran; `of`: how many could notice the mutant.
    """

    id: str
    verdict: str
    by: str = ""
    why: str = ""
    ran: int = 0
    of: int = 0
    seconds: float = 0.0


class Judge:
    """`process`: the nursery. `digests`: the digests of all statements without a mutant, by `module:NAME`."""

    def __init__(self, process: asyncio.subprocess.Process, database: str, digests: Mapping[str, str]) -> None:
        self._process = process
        self._database = database
        self._digests = digests

    async def judge(self, mutant: Mutant, chosen: Chosen) -> Judgement:
        """Run the chosen tests beside the mutant. Raises RuntimeError if the nursery has ended."""
        if not chosen.tests:
            return Judgement(mutant.id, "untested", why="no test runs it")
        text = mutant.applied((ROOT / mutant.path).read_text())
        try:
            compile(text, mutant.path, "exec")
        except SyntaxError as error:
            return Judgement(mutant.id, "invalid", why=str(error))
        unit_tests = sum(test.startswith(UNIT) for test in chosen.tests[: UNIT_TESTS + 1])
        first, others = chosen.divided(unit_tests + _FIRST_TESTS)
        judgement = await self._judge(mutant, text, first)
        if judgement.verdict != "survived" or not others.tests:
            return judgement
        last = await self._judge(mutant, text, others)
        return replace(last, ran=judgement.ran + last.ran, seconds=round(judgement.seconds + last.seconds, 2))

    async def judge_surely(self, mutant: Mutant, chosen: Chosen) -> Judgement:
        """As `judge`, but the test that noticed the mutant runs once more. If it passes then, it had failed for another
        reason, such as a busy machine: the mutant counts as survived, and a later run judges it again.
        """
        judgement = await self.judge(mutant, chosen)
        if judgement.verdict != "killed" or judgement.by not in chosen.tests:
            return judgement
        limit = chosen.limits[chosen.tests.index(judgement.by)]
        again = await self.judge(mutant, Chosen([judgement.by], [limit], 1))
        if again.verdict == "survived":
            return replace(judgement, verdict="survived", by="", why=f"noticed only once, by {judgement.by}")
        return judgement

    async def _judge(self, mutant: Mutant, text: str, chosen: Chosen) -> Judgement:
        """Run these tests in one fork. `text`: the file with the mutant."""
        order = {
            "path": mutant.path,
            "text": text,
            "tests": chosen.tests,
            "limits": chosen.limits,
            "seconds": sum(chosen.limits[:3]) + sum(chosen.limits[3:]) / 5 + _SPARE_SECONDS,
            "statements": self._digests,
            "database": self._database,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        return _judgement(mutant, chosen, await answer(self._process))


def _judgement(mutant: Mutant, chosen: Chosen, result: dict[str, Any]) -> Judgement:
    """The judgement for the nursery's answer."""
    ran, seconds = result.get("ran", 0), round(result["seconds"], 2)
    by, why = result.get("by", ""), result.get("why", "")
    if "invalid" in result:
        verdict, why = "invalid", result["invalid"]
    elif result["code"] is None or result.get("timeout"):
        verdict = "timed out"
    elif by:
        verdict = "killed"
    elif result["code"] in _IMPORT_FAILED:
        verdict, by = "killed", "import"
    elif result["code"] == 0 and ran:
        verdict = "survived"
    elif result["code"] < 0:
        verdict, by = "killed", f"signal {-result['code']}"
    else:
        verdict, why = "untested", f"pytest ended with {result['code']}"
    return Judgement(mutant.id, verdict, by, why, ran, chosen.candidates, seconds)


async def answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next answer of the nursery. Raises RuntimeError if the nursery has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a nursery ended with {await process.wait()}")
    result: dict[str, Any] = json.loads(line)
    return result


@asynccontextmanager
async def judge(servers: Mapping[str, str]) -> AsyncIterator[Judge]:
    """A judge with a copy and a nursery of its own. `servers`: the environment variables with their addresses."""
    with RunDirectory() as directory:
        python = await asyncio.to_thread(make_copy, directory.path / "checkout")
        database = servers[TEMPLATE]
        digests = await _statements(python, database)
        process = await _start(python, directory.path / "checkout", servers)
        try:
            await asyncio.wait_for(answer(process), _START_SECONDS)
            yield Judge(process, database, digests)
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
        start_new_session=True,  # Ctrl-C must reach only this process, which then ends the nursery
    )


async def _statements(python: Path, database: str) -> dict[str, str]:
    listing = await asyncio.create_subprocess_exec(
        python, "-m", "mutants.statements", database, cwd=python.parents[2], stdout=asyncio.subprocess.PIPE
    )
    output, _ = await listing.communicate()
    if listing.returncode:
        raise RuntimeError("the statements could not be output")
    digests: dict[str, str] = json.loads(output)
    return digests
