"""Reads from /proc the CPU seconds and the resident memory of a process and of its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Self

from leasehold.embedded.guard import descendants

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TRIES = 10  # on a machine where processes end all the time
_BUSY_FIELDS = (1, 2, 3, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq
#: The role of a process, by its name.
_ROLES = {"beam.smp": "rabbitmq", "postgres": "postgres", "rclone": "s3"}


def role_of(pid: int) -> str:
    """The role of a process: `worker`, `api`, `postgres`, `rabbitmq`, `s3`, `bench` or `other`."""
    if pid == os.getpid():
        return "bench"
    arguments = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    if b"-m" in arguments[1:4]:  # a child of a worker has -B and -P before -m
        module = arguments[arguments.index(b"-m") + 1].decode()
        return module.removeprefix("leasehold.").partition(".")[0]
    return _ROLES.get((Path("/proc") / str(pid) / "comm").read_text().strip(), "other")


def ours() -> list[tuple[int, str]]:
    """This process and its descendants, each with its role."""
    processes = []
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):  # the process has ended
            processes.append((pid, role_of(pid)))
    return processes


def main_processes_of(role: str) -> list[int]:
    """The ids of the processes that run `python -m leasehold.{role}`, without their children."""
    program = [b"-m", f"leasehold.{role}".encode()]
    return [pid for pid, process_role in ours() if process_role == role and _arguments(pid)[1:3] == program]


def _arguments(pid: int) -> list[bytes]:
    return (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")


def cpu_seconds(pid: int) -> float:
    """User and system time of the process and of its children that have ended."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS


def _parent(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def resident_bytes(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * _PAGE


@contextmanager
def paused(pids: Sequence[int]) -> Iterator[None]:
    """Stop the processes during the block: after it, all begin together the work that the block has prepared."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def tree(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


class Meter:
    """`with Meter() as meter`: measures the CPU seconds of the block by role, and the cores that others used."""

    def __init__(self) -> None:
        self.by_role: dict[str, float] = {}
        self.seconds = 0.0
        self.others_cores = 0.0

    def __enter__(self) -> Self:
        self._before, self._busy, self._began = _spent(), _machine_busy(), monotonic()
        return self

    def __exit__(self, *_error: object) -> None:
        self.seconds = monotonic() - self._began
        after = _spent()
        by_role: defaultdict[str, float] = defaultdict(float)
        for pid, now in after.items():
            by_role[now.role] += now.seconds - (self._before[pid].seconds if pid in self._before else 0.0)
        for pid in self._before.keys() - after.keys():
            by_role[_reaper(pid, self._before, after)] -= self._before[pid].seconds
        self.by_role = {role: round(max(0.0, seconds), 2) for role, seconds in sorted(by_role.items())}
        others = _machine_busy() - self._busy - sum(by_role.values())
        self.others_cores = round(max(0.0, others) / self.seconds, 2)


@dataclass(frozen=True, slots=True)
class _Spent:
    role: str
    parent: int
    seconds: float


def _spent() -> dict[int, _Spent]:
    """What each process has spent. It is read again if a process ended meanwhile: its time may then be missing from its
    own entry and from its parent's, or be in both.
    """
    for _ in range(_TRIES):
        listed, spent = ours(), {}
        for pid, role in listed:
            with contextlib.suppress(OSError):
                spent[pid] = _Spent(role, _parent(pid), cpu_seconds(pid))
        if all((Path("/proc") / str(pid)).exists() for pid, _ in listed):
            break
    return spent


def _reaper(pid: int, before: Mapping[int, _Spent], after: Mapping[int, _Spent]) -> str:
    """The role of the process that got the CPU time of the ended `pid`: the kernel adds it to the parent's."""
    while pid in before and pid not in after:
        pid = before[pid].parent
    return after[pid].role if pid in after else "other"


def _machine_busy() -> float:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(int(fields[index]) for index in _BUSY_FIELDS) / _TICKS
