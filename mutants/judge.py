"""Judges mutants, one after another, in a copy of the checkout with servers of its own.

Two processes in the copy fork for each mutant, and run the mutant's tests in the fork. The warm one (warm.py) has
loaded our modules and all tests: it is faster, but not every mutant can be put into loaded modules. The nursery
(nursery.py) has loaded libraries only: each of its forks loads the changed file.
"""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
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
_START_SECONDS = 900.0
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
    """`warm`: None: the nursery judges all mutants. `digests`: the digests of all statements without a mutant, by
    `module:NAME`.
    """

    def __init__(self, nursery: Process, warm: Process | None, database: str, digests: Mapping[str, str]) -> None:
        self._nursery = nursery
        self._warm = warm
        self._database = database
        self._digests = digests
        self._sound: set[str] = set()  # tests that pass in the warm process without a mutant

    def cold(self) -> Judge:
        """A judge by the nursery alone."""
        return Judge(self._nursery, None, self._database, self._digests)

    async def judge(self, mutant: Mutant, chosen: Chosen) -> Judgement:
        """Run the chosen tests beside the mutant. Raises RuntimeError if the nursery has ended."""
        if not chosen.tests:
            return Judgement(mutant.id, "untested", why="no test runs it")
        text = mutant.applied((ROOT / mutant.path).read_text())
        try:
            compile(text, mutant.path, "exec")
        except SyntaxError as error:
            return Judgement(mutant.id, "invalid", why=str(error))
        if self._warm is not None:
            judgement = await self._judge(self._warm, mutant, text, chosen)
            if judgement is not None:
                return judgement
        return await self._judge_in_nursery(mutant, text, chosen)

    async def _judge_in_nursery(self, mutant: Mutant, text: str, chosen: Chosen) -> Judgement:
        unit_tests = sum(test.startswith(UNIT) for test in chosen.tests[: UNIT_TESTS + 1])
        first, others = chosen.divided(unit_tests + _FIRST_TESTS)
        judgement = await self._judge(self._nursery, mutant, text, first)
        assert judgement is not None
        if judgement.verdict != "survived" or not others.tests:
            return judgement
        last = await self._judge(self._nursery, mutant, text, others)
        assert last is not None
        return replace(last, ran=judgement.ran + last.ran, seconds=round(judgement.seconds + last.seconds, 2))

    async def judge_surely(self, mutant: Mutant, chosen: Chosen) -> Judgement:
        """As `judge`, but the test that noticed the mutant runs once more. If it passes then, it had failed for another
        reason, such as a busy machine, and the tests after it judge the mutant. In the warm process it runs without the
        mutant, too: if it fails then, the nursery judges.
        """
        judgement = await self.judge(mutant, chosen)
        if judgement.verdict != "killed" or judgement.by not in chosen.tests:
            return judgement
        up_to, later = chosen.divided(chosen.tests.index(judgement.by) + 1)
        only = Chosen([judgement.by], up_to.limits[-1:], 1)
        again = await self.judge(mutant, only)
        if again.verdict == "survived":
            once = replace(judgement, verdict="survived", by="", why=f"noticed only once, by {judgement.by}")
            if not later.tests:
                return once
            last = await self.judge_surely(mutant, later)
            return replace(once, ran=once.ran + last.ran) if last.verdict == "survived" else last
        if self._warm is not None and judgement.by not in self._sound:
            before = (ROOT / mutant.path).read_text()
            without = await self._judge(self._warm, mutant, before, only)
            if without is None or without.verdict != "survived":
                return await self._judge_in_nursery(mutant, mutant.applied(before), chosen)
            self._sound.add(judgement.by)
        return judgement

    async def _judge(self, process: Process, mutant: Mutant, text: str, chosen: Chosen) -> Judgement | None:
        """Run these tests in one fork. `text`: the file with the mutant. None: the process cannot judge this mutant."""
        order = {
            "path": mutant.path,
            "before": (ROOT / mutant.path).read_text(),
            "text": text,
            "tests": chosen.tests,
            "limits": chosen.limits,
            "seconds": sum(chosen.limits[:3]) + sum(chosen.limits[3:]) / 5 + _SPARE_SECONDS,
            "statements": self._digests,
            "database": self._database,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
        result = await answer(process)
        return None if "cannot" in result else _judgement(mutant, chosen, result)


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


async def answer(process: Process) -> dict[str, Any]:
    """The next answer of the process. Raises RuntimeError if it has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process that judges ended with {await process.wait()}")
    result: dict[str, Any] = json.loads(line)
    return result


@asynccontextmanager
async def judge(servers: Mapping[str, str], files: Sequence[str] = ()) -> AsyncIterator[Judge]:
    """A judge with a copy and processes of its own. `servers`: the environment variables with their addresses. `files`:
    the files of tests that a warm process loads; none: there is no such process.
    """
    with RunDirectory() as directory:
        copy = directory.path / "checkout"
        python = await asyncio.to_thread(make_copy, copy)
        database = servers[TEMPLATE]
        digests = await _statements(python, database)
        listed = directory.path / "files.json"
        listed.write_text(json.dumps(list(files)))
        async with AsyncExitStack() as opened:
            environment = os.environ | servers
            nursery = await opened.enter_async_context(_process(python, copy, environment, "mutants.nursery"))
            warm = None
            if files:
                warm = await opened.enter_async_context(
                    _process(python, copy, environment, "mutants.warm", str(listed))
                )
            yield Judge(nursery, warm, database, digests)


@asynccontextmanager
async def _process(
    python: Path, copy: Path, environment: Mapping[str, str], module: str, *arguments: str
) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        module,
        *arguments,
        cwd=copy,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        start_new_session=True,  # Ctrl-C must reach only this process, which then ends the other
    )
    try:
        await asyncio.wait_for(answer(process), _START_SECONDS)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _statements(python: Path, database: str) -> dict[str, str]:
    listing = await asyncio.create_subprocess_exec(
        python, "-m", "mutants.statements", database, cwd=python.parents[2], stdout=asyncio.subprocess.PIPE
    )
    output, _ = await listing.communicate()
    if listing.returncode:
        raise RuntimeError("the statements could not be output")
    digests: dict[str, str] = json.loads(output)
    return digests
