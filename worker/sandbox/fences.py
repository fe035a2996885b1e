"""The fences that confine a child process, in which a handler runs. Three processes set them up: a zygote (the process
that loads the handlers, and forks a child for each run), the child, and the worker. This is the order:

1. Before the zygote loads a handler, it gives up all capabilities, and the file system except Python, the handlers and
   the work directory (Landlock). If the kernel cannot filter system calls, the zygote also gives up the network: it
   enters an empty network namespace of its own, if the kernel allows this.
2. The child adds a filter of system calls (seccomp: no network, no programs, no other processes).
3. The worker limits the child's memory, CPU, file size and open files with prlimit(2). Hostile code that controls the
   child cannot loosen these limits.
4. Before the child reads a client's bytes, it adds a second Landlock layer that grants only the files of its own run.

If root starts the worker, the zygote stays root. As the user `nobody` it could not read a Python that is installed in a
private home. This is safe. Without capabilities, root is an ordinary user. It still owns root's files, but Landlock
denies them.

The filter of system calls denies new processes, but not new threads. RLIMIT_NPROC limits the number of threads. This
limit is weak, because the kernel counts the threads of the whole user, and the limit does not bind root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import NamedTuple, Self

from leasehold.domain.pipeline import Limits
from leasehold.worker.sandbox import landlock, seccomp

# Numbers of the kernel's interface: options of prctl, the signal that kills, flags of unshare, and a version of capset.
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = 9
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAPABILITY_VERSION_3 = 0x20080522
#: The bound of RLIMIT_NPROC. It limits the number of threads, which the filter of system calls does not limit.
_MAX_THREADS = 4096

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

#: The mechanisms, in the order in which `isolation` names them.
_MECHANISMS = ("seccomp", "netns", "landlock")
#: Endings of the folders that installers put beside packages: shared libraries, and metadata.
_BESIDE_PACKAGES = (".libs", ".dist-info", ".egg-info")
#: Paths that the C library, time zones and thread pools read, besides Python itself.
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/sys/devices/system",
    "/sys/fs/cgroup", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip


class Usage(NamedTuple):
    """The memory that a process holds now, in bytes, and the CPU time that it has used so far, in seconds."""

    address_space: int
    resident: int
    cpu: float


def usage(pid: int) -> Usage:
    """The usage according to /proc, which a child cannot falsify. An ended process holds 0 bytes. Raises OSError once
    the process has been reaped.
    """
    # See proc(5). `statm` begins with the size and the resident part, in pages. In `stat`, the CPU times `utime` and
    # `stime` are the fields 11 and 12 after the name (counted from 0), in ticks.
    pages = Path(f"/proc/{pid}/statm").read_bytes().split()
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    cpu_ticks = int(fields[11]) + int(fields[12])
    return Usage(int(pages[0]) * _PAGE_BYTES, int(pages[1]) * _PAGE_BYTES, cpu_ticks / _TICKS_PER_SECOND)


def peak(pid: int) -> int:
    """The most bytes of memory that the process has ever held. Raises IndexError for an ended process, and OSError
    once the process has been reaped.
    """
    status = Path(f"/proc/{pid}/status").read_bytes()
    return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count


def limit(pid: int, limits: Limits) -> None:
    """Limit the run of the child `pid`. The child cannot raise the limits again. Raises OSError if the child has
    been reaped.

    Memory: the run may add `memory_bytes` to the address space that the child has now; the interpreter and its
    libraries do not count. CPU: the run may add `cpu_seconds` to the CPU time that the child has used, rounded up to a
    second. At the CPU limit the kernel sends SIGXCPU, and kills the child a second later.
    """
    now = usage(pid)
    cpu = int(now.cpu) + 1 + limits.cpu_seconds
    _bound(pid, resource.RLIMIT_AS, now.address_space + limits.memory_bytes)
    _bound(pid, resource.RLIMIT_CPU, cpu, cpu + 1)
    _bound(pid, resource.RLIMIT_FSIZE, limits.file_bytes)
    _bound(pid, resource.RLIMIT_NOFILE, limits.open_files)


def _bound(pid: int, kind: int, soft: int, hard: int | None = None) -> None:
    """Set one limit of the process, but never above the hard limit that it has already. If `hard` is None, it is the
    same as `soft`.
    """
    ceiling = resource.prlimit(pid, kind)[1]
    hard = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.prlimit(pid, kind, (soft, hard))


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. If `parent` has ended already, this
    process exits immediately.
    """
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def close_descriptors(channel: int) -> None:
    """Close all descriptors except the standard ones and `channel`. With some event loops, a new process inherits more
    descriptors than these.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers, not paths
        if fd not in {0, 1, 2, channel}:
            with contextlib.suppress(OSError):  # the descriptor by which `listdir` read the folder is closed already
                os.close(fd)


def hide_memory() -> None:
    """Forbid other processes of the same user to read this process's memory and environment in /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


class Fences:
    """The fences around a zygote, and those that its children add. `grants`: the files that every child may use, by
    Landlock rights (landlock.Grants). `isolation` names the mechanisms: "seccomp+landlock", "seccomp", "netns..." or
    "limits only...".
    """

    def __init__(self, mechanisms: list[str], grants: Mapping[int, list[Path]]) -> None:
        self._has_landlock = "landlock" in mechanisms
        self._grants = grants
        # In a child: the Landlock rules that `install_syscall_filter` prepares, and `restrict_files` enters.
        self._own_layer: landlock.Ruleset | None = None
        self.isolation = _name_of(mechanisms)

    @classmethod
    def around(cls, packages: set[str], work_dir: Path) -> Self:
        """Call this in a zygote before it loads handlers. The zygote then gives up privileges and the file system. If
        the kernel has no filter of system calls, the zygote also gives up the network. `packages`: the packages that
        children may import, besides Python's own. Raises OSError.

        A handler's module may start threads while it loads, and Landlock does not restrict threads that run already. So
        these fences come before the handlers load. Such a module may also run programs while it loads, to find
        libraries. So the filter of system calls, which denies programs, comes only in the child.
        """
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_threads()
        mechanisms = ["seccomp"] if seccomp.supported_machine() else _leave_network()
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        grants = {
            landlock.READ: [*(Path(path) for path in _SYSTEM), *importable(packages)],
            landlock.READ_DIR: import_roots(),
            landlock.READ_FILE | landlock.WRITE_FILE: [Path("/dev/null")],
        }
        # This layer grants all of /proc, because the folders of later children do not exist there yet. A child's own
        # layer grants only its own folder.
        zygote_grants = {**grants, landlock.READ: [*grants[landlock.READ], Path("/proc")], landlock.WRITE: [work_dir]}
        if (ruleset := landlock.ruleset(zygote_grants)) is not None:
            ruleset.enter()
            mechanisms.append("landlock")
        _drop_capabilities()
        return cls(mechanisms, grants)

    def install_syscall_filter(self) -> None:
        """Call this in a child. It installs the filter of system calls, and prepares the Landlock layer of
        `restrict_files`. Raises OSError.
        """
        machine = seccomp.supported_machine()
        if machine is not None:
            seccomp.install_filter(machine)
        if self._has_landlock:
            readable = [*self._grants[landlock.READ], Path("/proc/self")]
            self._own_layer = landlock.ruleset({**self._grants, landlock.READ: readable})

    def restrict_files(self, files: list[Path], directory: Path) -> None:
        """Call this in a child after `install_syscall_filter`. From then on the child reads only these `files` and what
        every child may read, such as Python. It writes only to this `directory` and /dev/null. Without Landlock this
        changes nothing. Raises OSError.
        """
        if not self._has_landlock:
            return
        if self._own_layer is None:
            raise OSError("the child has no filter of system calls yet, or the kernel no longer offers Landlock")
        self._own_layer.allow({landlock.READ_FILE: files, landlock.WRITE: [directory]})
        self._own_layer.enter()


def common(isolations: Collection[str]) -> str:
    """The mechanisms that all `isolations` contain, as a name in the form of Fences.isolation."""
    # `held`: for each of `isolations`, the mechanisms that it names.
    held = [isolation.split("+") for isolation in isolations]
    return _name_of([mechanism for mechanism in _MECHANISMS if all(mechanism in mechanisms for mechanisms in held)])


def _name_of(mechanisms: Sequence[str]) -> str:
    has_network_fence = "seccomp" in mechanisms or "netns" in mechanisms
    return "+".join(mechanisms if has_network_fence else ["limits only", *mechanisms])


def import_roots() -> list[Path]:
    """The folders on `sys.path`. Children may list them, because the import system does."""
    entries = [entry or "." for entry in sys.path]
    # Path.is_dir raises an error in a folder that this user may not search. Python's import skips such a folder.
    return [Path(entry).resolve() for entry in entries if os.path.isdir(entry)]  # noqa: PTH112


def importable(packages: set[str]) -> list[Path]:
    """The paths that `import` may read: Python itself, and under the other roots of `sys.path` only code and the named
    `packages`.

    Another root may be a checkout, with an environment file or keys beside the packages. Children must not read these.
    """
    python = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    paths = list(python)
    for root in import_roots():
        if any(root.is_relative_to(prefix) for prefix in python):
            continue
        with contextlib.suppress(OSError):  # a root that cannot be listed holds nothing to import
            entries = list(root.iterdir())
            installed = packages | _installed_in(entries)
            paths += [entry for entry in entries if _is_code(entry, installed)]
    return paths


def _installed_in(entries: Iterable[Path]) -> set[str]:
    """The folders that pip has installed beside these `*.dist-info` folders. A namespace package, such as `google`, has
    no `__init__.py`. So only pip's lists of installed files (RECORD) show that it is not a folder of the user.
    """
    names: set[str] = set()
    for entry in entries:
        if entry.name.endswith(".dist-info"):
            with contextlib.suppress(OSError):  # the distribution has no list, or this user may not read the list
                files = (entry / "RECORD").read_text(errors="replace").splitlines()
                names |= {file.partition("/")[0] for file in files if "/" in file}
    # RECORD also lists files elsewhere, such as `../../bin/...` (a program) or `/...` (an absolute path). Their first
    # parts, `..` and the empty text, are no packages.
    return names - {"..", ""}


def _is_code(entry: Path, packages: set[str]) -> bool:
    # Path.is_dir and Path.is_file raise an error in a folder that this user may not search.
    if os.path.isdir(entry):  # noqa: PTH112 - as above
        has_init = os.path.isfile(entry / "__init__.py")  # noqa: PTH113 - as above
        return entry.name in packages or entry.name.endswith(_BESIDE_PACKAGES) or has_init
    return entry.name.endswith((*all_suffixes(), ".zip", ".egg"))


def _limit_threads() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    bound = _MAX_THREADS if hard == resource.RLIM_INFINITY else min(_MAX_THREADS, hard)
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
