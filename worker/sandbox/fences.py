"""The fences around a child process, from the inside and from the parent.

The zygote has given up before it loads a handler: capabilities, for good; the file system but Python, the handlers
and the work directory (Landlock); and where there is no filter of system calls, the network (a namespace). Its child
adds, before it reads anything of a client's: a filter of system calls (seccomp: no network, no programs, no other
processes) and a second Landlock layer, which leaves it the files of its own run and no others. As root it keeps its
uid, because an interpreter under a private home could not be read by `nobody`; without capabilities uid 0 is an
ordinary owner of its files.

From the worker, before each run: memory, CPU, file size and open files, by prlimit(2), so that code which has
taken the child over cannot loosen them. RLIMIT_NPROC counts per user and never binds root, so it is only a
backstop against threads; the filter is what denies processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import NamedTuple, Self

from leasehold.domain.pipeline import Limits
from leasehold.worker.sandbox import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = 9
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAPABILITY_VERSION_3 = 0x20080522
_THREADS = 4096

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

#: What the C library, time zones and thread pools read beside Python itself.
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/sys/devices/system",
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


def peak(pid: int) -> int:
    """The most bytes that it ever held. Raises OSError when it is gone."""
    status = Path(f"/proc/{pid}/status").read_bytes()
    return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count


def limit(pid: int, limits: Limits) -> None:
    """Bound the run of the child `pid`, for good; raises OSError when it is gone.

    `memory_bytes` is what the run may add to the address space that the child has now: the interpreter and its
    libraries are not the work's. CPU is whole seconds on top of what the child has used, rounded up; a second later it
    is killed, whatever it does about the signal.
    """
    now = usage(pid)
    cpu = int(now.cpu) + 1 + limits.cpu_seconds
    _bound(pid, resource.RLIMIT_AS, now.address_space + limits.memory_bytes)
    _bound(pid, resource.RLIMIT_CPU, cpu, cpu + 1)
    _bound(pid, resource.RLIMIT_FSIZE, limits.file_bytes)
    _bound(pid, resource.RLIMIT_NOFILE, limits.open_files)


def _bound(pid: int, kind: int, soft: int, hard: int | None = None) -> None:
    most = resource.prlimit(pid, kind)[1]
    wanted = (soft, soft if hard is None else hard)
    resource.prlimit(pid, kind, wanted if most == resource.RLIM_INFINITY else (min(soft, most), min(wanted[1], most)))


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


class Fences:
    """What holds around a zygote, and what its children add. `isolation` names the mechanisms: "seccomp+landlock",
    "seccomp", "netns..." or "limits only...".
    """

    def __init__(self, held: list[str], grants: Mapping[int, list[Path]]) -> None:
        self._lands = "landlock" in held
        self._grants = grants
        self._own: landlock.Ruleset | None = None
        network = {"seccomp", "netns"} & set(held)
        self.isolation = "+".join(held if network else ["limits only", *held])

    @classmethod
    def around(cls, packages: set[str], work_dir: Path) -> Self:
        """Give up privileges, the file system and, where there is no filter, the network; before handlers load, which
        may start threads, and run programs to find libraries. Raises OSError.
        """
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_threads()
        held = ["seccomp"] if seccomp.machine_here() else _leave_network()
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        grants = {
            landlock.READ: [*(Path(path) for path in _SYSTEM), *importable(packages)],
            landlock.READ_DIR: import_roots(),
            landlock.READ_FILE | landlock.WRITE_FILE: [Path("/dev/null")],
        }
        # a child's own folder in /proc does not exist yet, so the second layer says which
        here = {**grants, landlock.READ: [*grants[landlock.READ], Path("/proc")], landlock.WRITE: [work_dir]}
        if (land := landlock.ruleset(here)) is not None:
            land.enter()
            held.append("landlock")
        _drop_capabilities()
        return cls(held, grants)

    def seal(self) -> None:
        """In a child: install the filter of system calls, and get ready to `enclose`. Raises OSError."""
        machine = seccomp.machine_here()
        if machine is not None:
            seccomp.install_filter(machine)
        if self._lands:
            readable = [*self._grants[landlock.READ], Path("/proc/self")]
            self._own = landlock.ruleset({**self._grants, landlock.READ: readable})

    def enclose(self, files: list[Path], directory: Path) -> None:
        """In a child that is sealed: leave it of all runs' files only these, to read, and this directory. Raises
        OSError.
        """
        if not self._lands:
            return
        if self._own is None:
            raise OSError("not sealed, or Landlock is not there any more")
        self._own.allow({landlock.READ_FILE: files, landlock.WRITE: [directory]})
        self._own.enter()


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
