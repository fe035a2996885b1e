"""The faults of processes, made on real ones that do nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from chaos import journal, memory
from chaos.faults.processes import ProcessFaults
from chaos.plan import Fault
from tests.support.not_here import only_where

ROOT = Path(__file__).parents[2]
IDLE = """
import sys, time
from chaos import process
process.fill_memory_on_signal()
process.move_clock_on_signals()
print("listens", flush=True)
time.sleep(60)
"""


class IdleSlot:
    """A slot whose process listens to the signals of a chaos run's processes, and waits."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self.process_name = "worker-0.0"
        self.journal = directory / "journal"
        environment = {
            **os.environ, journal.PATH_VARIABLE: str(self.journal), journal.PROCESS_VARIABLE: self.process_name
        }  # fmt: skip
        self.process = subprocess.Popen([sys.executable, "-c", IDLE], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.log.write_bytes(self.process.stdout.readline())

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process.poll() is None else None

    def signal(self, number: signal.Signals) -> bool:
        self.process.send_signal(number)
        return True


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[IdleSlot]:
    slot = IdleSlot(tmp_path)
    yield slot
    slot.process.kill()
    slot.process.communicate()


def faults_of(slot: IdleSlot) -> ProcessFaults:
    it = SimpleNamespace(slots={"worker-0": slot}, journal=slot.journal)
    return ProcessFaults(it)  # type: ignore[arg-type]  # what these faults use of an installation


@only_where(memory.is_possible(), "control groups take privileges")
async def test_a_process_that_runs_out_of_memory_is_ended_by_the_kernel(slot: IdleSlot) -> None:
    assert await faults_of(slot).makers["F41"](Fault("F41 worker out of memory", target="worker-0")) == 1
    assert slot.process.wait() == -signal.SIGKILL
    assert journal.read(slot.journal) == []  # it did not get all that it wanted


@only_where(memory.is_possible(), "control groups take privileges")
def test_a_group_is_gone_afterwards_and_knows_of_no_kill_before() -> None:
    with memory.MemoryLimit(16) as limit:
        group = limit._group
        assert group.is_dir()
        assert limit.killed() == 0
    assert not group.exists()


async def test_the_fault_of_a_clock_counts_what_the_process_itself_wrote_down(slot: IdleSlot) -> None:
    for seconds in (0.5, 2.0, 8.0):  # a busy machine may keep the process from its processor for longer than the first
        if await faults_of(slot).makers["F33"](Fault("F33 a clock ahead", target="worker-0", seconds=seconds)) >= 1:
            break
    assert next(line["hours"] for line in journal.read(slot.journal)) == 1
