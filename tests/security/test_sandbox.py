"""A handler that a hostile input has taken over reaches nothing but its own run: no other tenant's files, processes,
memory or words, and no later run.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from leasehold.domain.pipeline import MIB, Limits
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.sandbox import landlock, seccomp
from leasehold.worker.sandbox.children import Children
from leasehold.worker.sandbox.fences import Fences
from leasehold.worker.sandbox.spares import SPARE_CHILDREN
from leasehold.worker.sandbox.zygote_process import scrubbed_environment
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.security.hostile import hostile, pipelines
from tests.security.hostile_steps import REACHED
from tests.support.not_here import only_where
from tests.worker.children.conftest import is_there
from tests.worker.children.waiting import until
from tests.worker.conftest import end_of

pytestmark = only_where(
    seccomp.supported_machine() is not None and landlock.version() > 0, "a kernel with seccomp and Landlock"
)
LIMITS = Limits(memory_bytes=512 * MIB, cpu_seconds=30, file_bytes=8 * MIB, open_files=64)


@dataclass
class Prison:
    children: Children
    work_dir: Path

    def attempt(self) -> Path:
        """A directory as attempts have them, with something to read and something made."""
        made = self.work_dir / secrets.token_hex(8)
        for folder, name in (("in", "0"), ("out", "made")):
            (made / folder).mkdir(parents=True)
            (made / folder / name).write_text("another tenant's")
        return made

    async def attack(self, attack: str, *, attempt: Path | None = None, **args: Any) -> dict[str, Any]:
        attempt = attempt or self.attempt()
        done = await self.children.run(
            pipeline="hostile",
            step="parse",
            params={"attack": attack, "args": args},
            files={"input": attempt / "in" / "0"},
            directory=attempt / "out",
            timeout=200,
            limits=LIMITS,
        )
        assert done.value is not None
        return dict(done.value)


@pytest.fixture(scope="module")
async def prison(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prison]:
    work_dir = tmp_path_factory.mktemp("prison") / "attempts"
    children = Children(2, pipelines=["hostile"], work_dir=work_dir, source="tests.security.hostile:pipelines")
    await children.start()
    yield Prison(children, work_dir)
    await children.close()


def _reached(outcome: dict[str, Any]) -> list[str]:
    return [name for name, how in outcome.items() if how == REACHED]


async def test_a_run_sees_its_own_files_and_writes_beside_none_of_them(prison: Prison) -> None:
    """The honest case: without it everything below could be refused for a wrong reason."""
    assert (await prison.attack("copies"))["names"] == ["a", "c", "made"]


async def test_no_file_of_another_attempt_can_be_read_changed_or_found(prison: Prison) -> None:
    theirs = prison.attempt()
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    assert _reached(await prison.attack("files", directory=str(theirs))) == []
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before


async def test_its_own_inputs_can_only_be_read(prison: Prison) -> None:
    own = prison.attempt()
    outcome = await prison.attack("files", attempt=own, directory=str(own))
    of_inputs = {"change its mode", "mark it", "list", "list all attempts", "list its own attempt", "ask it to stop"}
    assert {name for name in of_inputs if outcome[name] == REACHED} == set()
    assert outcome["read"] == REACHED
    assert (own / "in" / "0").read_text() == "another tenant's"


async def test_nothing_can_be_left_where_processes_of_one_machine_meet(prison: Prison) -> None:
    assert _reached(await prison.attack("shared")) == []


@pytest.mark.parametrize("who", ["the worker", "the zygote", "a waiting child", "a running child"])
async def test_no_other_process_can_be_read_signalled_traced_or_slowed(prison: Prison, who: str) -> None:
    (spares,) = prison.children._spares.values()
    assert spares._zygote is not None
    own = prison.attempt()
    running = asyncio.create_task(prison.attack("waits", attempt=own))
    await until((own / "out" / "here").exists, "one runs")
    await until(lambda: len(spares._idle) == SPARE_CHILDREN, "others wait")
    pids = {
        "the worker": os.getpid(),
        "the zygote": spares._zygote.pid,
        "a waiting child": max(child.pid for child in spares._idle),
        "a running child": next(child.pid for child in prison.children._running),
    }
    outcome = await prison.attack("process", pid=pids[who])
    (own / "out" / "go").touch()
    assert await running == {}
    assert _reached(outcome) == []


async def test_nobody_who_listens_here_can_be_reached(prison: Prison, tmp_path: Path) -> None:
    """They listen, so a refusal is the fence's."""
    name = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as path, socket.socket() as loopback:
        abstract.bind(f"\0{name}")
        path.bind(str(tmp_path / "s"))
        loopback.bind(("127.0.0.1", 0))
        for one in (abstract, path, loopback):
            one.listen()
        port = loopback.getsockname()[1]
        outcome = await prison.attack("sockets", abstract=name, path=str(tmp_path / "s"), port=port)
    assert _reached(outcome) == []


@pytest.fixture
def segment() -> Iterator[int]:
    """Shared memory of the worker's user."""
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.shmget(0, 4096, 0o1600)
    assert made >= 0
    yield made
    libc.shmctl(made, 0, None)


async def test_no_memory_with_a_name_can_be_shared(prison: Prison, segment: int) -> None:
    assert _reached(await prison.attack("memory", segment=segment)) == []


async def test_nothing_that_a_run_leaves_in_its_process_is_there_in_the_next(prison: Prison) -> None:
    own = prison.attempt()
    left = await prison.attack("leave", attempt=own, mark="mine")
    assert (left["builtins"], left["threads"]) == ("mine", 2)
    for _ in range(4):  # more than wait
        found = await prison.attack("find")
        assert found.pop("pid") != left["pid"]
        assert found == {
            "builtins": None, "environment": None, "modules": False, "globals": None, "threads": 1, "descriptors": 4,
        }  # fmt: skip
    await until(lambda: not is_there(left["pid"]), "it is gone")
    path = own / "out" / "late"  # its thread may have ended before it wrote at all
    late = path.read_text() if path.exists() else None
    await asyncio.sleep(0.05)
    assert (path.read_text() if path.exists() else None) == late


async def test_what_a_run_prints_can_be_read_by_no_other_run(prison: Prison) -> None:
    """Its output is a pipe of its own, which it can open for reading like any pipe."""
    with structlog.testing.capture_logs():
        for _ in range(3):
            found = await prison.attack("reopen")
            assert found["1"] in ("my own words\n", "EAGAIN", "EACCES")
            assert found["2"] in ("my own words\n", "EAGAIN", "EACCES")
            assert found["3"] in ("ENXIO", "EACCES")


async def test_no_system_call_newer_than_the_filter_gets_through(prison: Prison) -> None:
    new = [463, 464, 465, 466, 467]
    outcome = await prison.attack("calls", numbers=[*new, seccomp.NEWEST + 1, seccomp.NEWEST + 2, 600, 2**20])
    assert {outcome.pop(str(number)) for number in new} == {"EPERM"}
    assert set(outcome.values()) == {"ENOSYS"}


def test_the_model_runtime_keeps_no_id_of_the_device_and_starts_no_thread(tmp_path: Path) -> None:
    """Its telemetry would do both as soon as it is loaded, and write wherever it may."""
    program = "import onnxruntime, os, time; time.sleep(0.5); print(len(os.listdir('/proc/self/task')))"
    environment = scrubbed_environment() | {"HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert ran.stdout.split() == [b"1"]
    assert list(tmp_path.rglob("*")) == []


async def test_through_a_worker_one_tenants_run_finds_nothing_of_anothers(settings: Settings, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "work_dir": str(tmp_path),
        "worker_children": 1,
        "poll_seconds": 0.1,
        "pipelines": "tests.security.hostile:pipelines",
    }
    async with (
        Worker(settings.model_copy(update=changes), pipelines()) as worker,
        worker.parts.pool.acquire() as connection,
    ):
        rows = Rows(connection)
        found = []
        for tenant, attack in (("a", "leave"), ("b", "find"), ("a", "find"), ("b", "find")):
            args = {"mark": tenant} if attack == "leave" else {}
            new = jobs.NewJob(hostile, tenant, params={"attack": attack, "args": args})
            await jobs.submit(connection, [new])
            assert (await end_of(rows, new.id))["status"] == "succeeded"
            said = await connection.fetchval("SELECT r.value FROM result r JOIN task t ON t.id = r.task_id"
                                             " WHERE t.job_id = $1", new.id)  # fmt: skip
            found.append(said)
    assert len({said["pid"] for said in found}) == 4
    assert [said["builtins"] for said in found] == ["a", None, None, None]


def test_a_child_whose_fences_were_not_made_ready_refuses_its_run(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no filter of system calls yet"):
        Fences(["seccomp", "landlock"], {}).restrict_files([], tmp_path)
