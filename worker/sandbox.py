"""The fences around a child process, from the inside and from the parent.

Inside, for good, at start: it dies with its parent, has no capabilities and gains none, no network, no
programs and no other processes (seccomp; else a network namespace), and sees only Python, the handlers and
the work directory (Landlock, where the kernel has it). As root it keeps its uid, because an interpreter under
a private home could not be read by `nobody`; without capabilities uid 0 is an ordinary owner of its files.

From the parent, before each run: memory, CPU, file size and open files, by prlimit(2), so that code which has
taken the child over cannot loosen them. RLIMIT_NPROC counts per user and never binds root, so it is only a
backstop against threads; the filter is what denies processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import NamedTuple

from leasehold.pipeline import MIB, Limits
from worker import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = 9
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAPABILITY_VERSION_3 = 0x20080522
_THREADS = 4096
_SLACK = 64 * MIB

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

#: What the C library, time zones and thread pools read beside Python itself.
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/sys/devices/system",
    "/sys/fs/cgroup", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip


class Usage(NamedTuple):
    """What a process holds now, in bytes, and has burnt so far, in seconds."""

    address_space: int
    resident: int
    cpu: float


def usage(pid: int) -> Usage:
    """Read from /proc, so that a child cannot lie about itself. Raises OSError when it is gone."""
    pages = Path(f"/proc/{pid}/statm").read_bytes().split()
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return Usage(int(pages[0]) * _PAGE, int(pages[1]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICKS)


def begin_peak(pid: int) -> None:
    """Let `peak` begin anew. Where the kernel does not let us, it stays the peak of the child's whole life."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_bytes(b"5")


def peak(pid: int) -> int:
    """The most bytes resident since `begin_peak`. Raises OSError when it is gone."""
    status = Path(f"/proc/{pid}/status").read_bytes()
    return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def descriptors(pid: int) -> int:
    """How many files the process has open. Raises OSError when it is gone."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - a count after every run: no Path per entry


def limit(pid: int, limits: Limits) -> None:
    """Bound the next run of the child `pid`; raises OSError when it is gone.

    `memory_bytes` is what the run may add to the address space that the warm child has now: the interpreter
    and its libraries are not the work's. CPU is whole seconds on top of what the child has used, rounded up.
    """
    now = usage(pid)
    _lower(pid, resource.RLIMIT_AS, now.address_space + limits.memory_bytes)
    _lower(pid, resource.RLIMIT_CPU, int(now.cpu) + 1 + limits.cpu_seconds)
    _lower(pid, resource.RLIMIT_FSIZE, limits.file_bytes)
    _lower(pid, resource.RLIMIT_NOFILE, limits.open_files)


def _lower(pid: int, kind: int, value: int) -> None:
    """Soft limits only: a hard limit could not be raised again for the next run."""
    hard = resource.prlimit(pid, kind)[1]
    resource.prlimit(pid, kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit if it already has."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def close_descriptors(kept: int) -> None:
    """Close all files but the standard ones and `kept`: some event loops hand more to a child than was said."""
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers, not paths
        if fd not in {0, 1, 2, kept}:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                os.close(fd)


def hide_memory() -> None:
    """Close this process's memory and environment in /proc to other processes of its user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def confine(readable: list[Path], writable: Path) -> list[str]:
    """Give up privileges, the file system and, where there is no filter, the network. Before handlers load.

    Answers the names of the mechanisms that took hold.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_threads()
    held = [] if seccomp.machine_here() else _leave_network()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    system = [Path(path) for path in _SYSTEM]
    grants = {
        landlock.READ: [*system, *readable],
        landlock.READ_DIR: import_roots(),
        landlock.READ_FILE | landlock.WRITE_FILE: [Path("/dev/null")],
        landlock.WRITE: [writable],
    }
    if landlock.confine(grants):
        held.append("landlock")
    _drop_capabilities()
    return held


def seal() -> list[str]:
    """Install the system-call filter: after the handlers, which may run programs to find libraries."""
    machine = seccomp.machine_here()
    if machine is None:
        return []
    seccomp.install_filter(machine)
    return ["seccomp"]


def import_roots() -> list[Path]:
    """List the folders on `sys.path`; the import system has to list them, too."""
    return [Path(entry or ".").resolve() for entry in sys.path if Path(entry or ".").is_dir()]


def importable(packages: set[str]) -> list[Path]:
    """List what `import` may read: Python itself, and under other roots only code and the named `packages`.

    A root on `sys.path` may be a checkout, with an environment file or keys beside the packages.
    """
    python = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = list(python)
    for root in import_roots():
        if any(root.is_relative_to(prefix) for prefix in python):
            continue
        with contextlib.suppress(OSError):  # a root that cannot be listed holds nothing to import
            found += [entry for entry in root.iterdir() if _is_code(entry, packages)]
    return found


def _is_code(entry: Path, packages: set[str]) -> bool:
    if entry.is_dir():
        return entry.name in packages or (entry / "__init__.py").is_file()
    return entry.name.endswith((*all_suffixes(), ".zip", ".egg"))


def _limit_threads() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    bound = _THREADS if hard == resource.RLIM_INFINITY else min(_THREADS, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (bound, hard))


def _leave_network() -> list[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET):  # root needs no user namespace
        if libc.unshare(flags) == 0:
            return ["netns"]
    return []


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(none)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class Residence:
    """This process's own memory; its file stays open, so a run that leaked every descriptor cannot hide it."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._baseline = self._resident()

    def _resident(self) -> int:
        return int(os.pread(self._statm, 200, 0).split()[1]) * _PAGE

    def give_back(self) -> None:
        """Return freed memory to the kernel when there is much more of it than at the start."""
        if self._resident() <= self._baseline + _SLACK:
            return
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)
