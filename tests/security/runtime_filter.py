"""Runs hostile handlers in a process that is filtered as a container runtime filters a container; prints what they
reached. Arguments: the file of a profile, or nothing for the calls that Docker names as blocked.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import json
import platform
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leasehold.domain.pipeline import MIB, Limits
from leasehold.worker.sandbox.children import Children
from leasehold.worker.sandbox.fences import _drop_capabilities

#: "Significant syscalls blocked by the default profile" (docs.docker.com, Seccomp security profiles): of a container
#: without capabilities, on kernels of today.
BLOCKED = [
    "acct",
    "add_key",
    "bpf",
    "chroot",
    "clock_adjtime",
    "clock_settime",
    "delete_module",
    "finit_module",
    "init_module",
    "ioperm",
    "iopl",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "mbind",
    "mount",
    "move_pages",
    "open_by_handle_at",
    "perf_event_open",
    "pivot_root",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "reboot",
    "request_key",
    "set_mempolicy",
    "setns",
    "settimeofday",
    "swapoff",
    "swapon",
    "sysfs",
    "syslog",
    "umount2",
    "unshare",
    "userfaultfd",
    "vm86",
]
#: Flags of clone(2) that make namespaces, and clone3(2), whose flags a filter cannot read.
_NAMESPACES, _CLONE3, _ENOSYS, _EPERM = 0x7E020000, "clone3", 38, 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OPERATORS = {"NE": 1, "LT": 2, "LE": 3, "EQ": 4, "GE": 5, "GT": 6, "MASKED_EQ": 7}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_LIMITS = Limits(memory_bytes=512 * MIB, cpu_seconds=30, file_bytes=8 * MIB, open_files=64)


class _Argument(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Filter:
    """A filter of libseccomp. `default`: what it answers to a call without a rule."""

    def __init__(self, default: int) -> None:
        self._default = default
        self._library = ctypes.CDLL(ctypes.util.find_library("seccomp"))
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(default)))

    def add(self, action: int, name: str, *arguments: _Argument) -> None:
        """Add a rule. A name that this library or machine does not know is left out, as runtimes do."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0 or action == self._default:
            return
        array = (_Argument * len(arguments))(*arguments)
        rule = self._library.seccomp_rule_add_array
        assert rule(self._context, ctypes.c_uint32(action), number, len(arguments), array) == 0, name

    def load(self) -> None:
        """From now on it holds for this process and its children."""
        assert self._library.seccomp_load(self._context) == 0


def of_docker() -> Filter:
    made = Filter(_ALLOW)
    for name in BLOCKED:
        made.add(_ERRNO | _EPERM, name)
    made.add(_ERRNO | _ENOSYS, _CLONE3)
    for bit in range(32):
        if _NAMESPACES >> bit & 1:
            made.add(_ERRNO | _EPERM, "clone", _Argument(0, _OPERATORS["MASKED_EQ"], 1 << bit, 1 << bit))
    return made


def of_profile(path: Path) -> Filter:
    profile = json.loads(path.read_bytes())
    made = Filter(_action(profile["defaultAction"], profile.get("defaultErrnoRet")))
    for rule in profile["syscalls"]:
        if _holds(rule):
            for name in rule["names"]:
                made.add(_action(rule["action"], rule.get("errnoRet")), name, *_arguments(rule))
    return made


def _action(name: str, number: int | None) -> int:
    return _ALLOW if name == "SCMP_ACT_ALLOW" else _ERRNO | (_EPERM if number is None else number)


def _holds(rule: dict[str, Any]) -> bool:
    """Whether the rule is for this machine, and for a container without capabilities."""
    includes, excludes, machine = rule.get("includes") or {}, rule.get("excludes") or {}, _MACHINES[platform.machine()]
    is_here = machine in includes.get("arches", [machine]) and machine not in excludes.get("arches", [])
    return is_here and not includes.get("caps")


def _arguments(rule: dict[str, Any]) -> Iterator[_Argument]:
    for one in rule.get("args") or []:
        yield _Argument(
            one["index"], _OPERATORS[one["op"].removeprefix("SCMP_CMP_")], one["value"], one.get("valueTwo", 0)
        )


async def attack() -> dict[str, Any]:
    """The fences that the children report, and what hostile handlers got in a run of their own."""
    with tempfile.TemporaryDirectory() as directory:
        work_dir = Path(directory) / "attempts"
        children = Children(1, pipelines=["hostile"], work_dir=work_dir, source="tests.security.hostile:pipelines")
        await children.start()
        try:
            outcomes = {name: await _run(children, work_dir, name, args) for name, args in ATTACKS.items()}
        finally:
            await children.close()
        return {"isolation": children.isolation, **outcomes}


def filters() -> int:
    """The filters around this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Seccomp_filters:")[2].split()[0])


#: The honest case, and attacks that each of the fences refuses.
ATTACKS: dict[str, dict[str, Any]] = {"copies": {}, "shared": {}, "files": {"directory": "/etc"}}


async def _run(children: Children, work_dir: Path, name: str, args: dict[str, Any]) -> Any:
    attempt = work_dir / secrets.token_hex(8)
    for folder, file in (("in", "0"), ("out", "made")):
        (attempt / folder).mkdir(parents=True)
        (attempt / folder / file).write_text("another tenant's")
    done = await children.run(
        pipeline="hostile",
        step="parse",
        params={"attack": name, "args": args},
        files={"input": attempt / "in" / "0"},
        directory=attempt / "out",
        timeout=120,
        limits=_LIMITS,
    )
    return done.value


if __name__ == "__main__":
    _drop_capabilities()
    before = filters()
    (of_profile(Path(sys.argv[1])) if sys.argv[1:] else of_docker()).load()
    print(json.dumps({"filters": filters() - before, **asyncio.run(attack())}))  # noqa: T201 - its answer
