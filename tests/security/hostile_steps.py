"""Attacks on whoever else is on the machine. Each answers what it reached, and how it was refused."""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work
from leasehold.worker.sandbox.seccomp import supported_machine
from tests.security.hostile import hostile

_LIBC = ctypes.CDLL(None, use_errno=True)
_FILES_OF_A_PROCESS = ("environ", "mem", "maps", "cmdline", "status", "stat")
REACHED = "reached"


@hostile.handles("parse")
def parse(work: Work) -> Done:
    return Done(value=globals()[work.params.attack](work, **work.params.args))


def _tried(attacks: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    outcome = {}
    for name, attack in attacks.items():
        try:
            attack()
        except OSError as error:
            outcome[name] = errno.errorcode.get(error.errno or 0, str(error))
        else:
            outcome[name] = REACHED
    return outcome


def _listed(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def _call(number: int, *arguments: Any) -> int:
    answer = int(_LIBC.syscall(number, *arguments))
    if answer < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return answer


def files(work: Work, directory: str) -> dict[str, str]:
    """Of somebody else's attempt, with its address known to the letter."""
    theirs = Path(directory)
    secret = theirs / "in" / "0"
    return _tried({
        "read": secret.read_bytes,
        "read output": (theirs / "out" / "made").read_bytes,
        "overwrite": lambda: (theirs / "out" / "made").write_bytes(b"spoilt"),
        "append": lambda: (theirs / "out" / "made").open("ab").close(),
        "truncate": lambda: os.truncate(theirs / "out" / "made", 0),
        "plant": lambda: (theirs / "out" / "planted").write_bytes(b""),
        "make a folder": (theirs / "out" / "folder").mkdir,
        "delete": (theirs / "out" / "made").unlink,
        "take away": lambda: (theirs / "out" / "made").rename(work.directory / "taken"),
        "give": lambda: _given(work, theirs),
        "link": lambda: (work.directory / "link").hardlink_to(secret),
        "symlink": lambda: (work.directory / "link").symlink_to(secret),
        "read by a path with dots": (work.directory / ".." / ".." / theirs.name / "in" / "0").read_bytes,
        "read from its folder": lambda: _from_within(theirs),
        "list": lambda: _listed(theirs),
        "list all attempts": lambda: _listed(theirs.parent),
        "list its own attempt": lambda: _listed(work.directory.parent),
        "ask it to stop": (theirs / "cancel").touch,
        "change its mode": lambda: secret.chmod(0o777),
        "mark it": lambda: os.setxattr(secret, "user.mark", b"x"),
        "watch it": lambda: _call(254, _call(294, 0), str(theirs).encode(), 0xFFF),
    })  # fmt: skip


def _given(work: Work, theirs: Path) -> None:
    (work.directory / "mine").write_bytes(b"mine")
    (work.directory / "mine").rename(theirs / "out" / "mine")


def _from_within(theirs: Path) -> None:
    os.chdir(theirs)
    try:
        Path("in/0").read_bytes()
    finally:
        os.chdir("/")


def shared(work: Work) -> dict[str, str]:
    """Where processes of one machine meet."""
    names = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/", str(Path.home()))  # noqa: S108 - they are attacked
    places = [Path(name) for name in names]
    writing: dict[str, Callable[[], object]] = {f"write {place}": (place / "left-behind").touch for place in places}
    listing = {f"list {place}": partial(_listed, place) for place in places[:3]}
    return _tried(writing | listing)


def process(work: Work, pid: int) -> dict[str, str]:
    """Another process of the same user: its memory, its files, its life."""
    proc = Path(f"/proc/{pid}")
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
    own = os.open("/dev/null", os.O_RDONLY)
    return _tried({
        **{f"read {name}": (proc / name).read_bytes for name in _FILES_OF_A_PROCESS},
        "write memory": lambda: (proc / "mem").open("r+b").close(),
        "list descriptors": lambda: _listed(proc / "fd"),
        "follow its root": lambda: _listed(proc / "root"),
        "list processes": lambda: _listed(Path("/proc")),
        "kill": lambda: os.kill(pid, signal.SIGTERM),
        "kill its group": lambda: os.killpg(os.getpgid(pid), signal.SIGTERM),
        "kill everybody": lambda: os.kill(-1, signal.SIGTERM),
        "kill a thread": lambda: _call(200, pid, signal.SIGTERM),
        "kill a thread of it": lambda: _call(234, pid, pid, signal.SIGTERM),
        "queue a signal": lambda: _call(129, pid, signal.SIGTERM, bytes(128)),
        "open a handle": lambda: os.pidfd_open(pid),
        "signal by input": lambda: fcntl.fcntl(own, fcntl.F_SETOWN, pid),
        "signal by input, otherwise": lambda: fcntl.fcntl(own, 15, struct.pack("ii", 1, pid)),
        "trace": lambda: _call(101, 16, pid, 0, 0),
        "read memory": lambda: _call(310, pid, vector, 1, vector, 1, 0),
        "write memory directly": lambda: _call(311, pid, vector, 1, vector, 1, 0),
        "slow down": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "bind to a core": lambda: os.sched_setaffinity(pid, {0}),
        "schedule last": lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        "starve of input": lambda: _call(251, 1, pid, 3 << 13),
        "limit": lambda: _limited(pid),
        "move its memory": lambda: _call(279, pid, 0, 0, 0, 0, 0),
    })  # fmt: skip


def _limited(pid: int) -> None:
    import resource  # noqa: PLC0415 - it is the attack's own

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1))


def sockets(work: Work, abstract: str, path: str, port: int) -> dict[str, str]:
    """Who listens on this machine."""

    def reach(family: int, address: Any) -> None:
        with socket.socket(family) as own:
            own.connect(address)

    return _tried({
        "abstract": lambda: reach(socket.AF_UNIX, f"\0{abstract}"),
        "path": lambda: reach(socket.AF_UNIX, path),
        "loopback": lambda: reach(socket.AF_INET, ("127.0.0.1", port)),
        "send a descriptor": lambda: _call(46, 3, ctypes.create_string_buffer(64), 0),
        "pass the kernel by": lambda: _call(425, 8, ctypes.create_string_buffer(256)),
    })  # fmt: skip


def memory(work: Work, segment: int) -> dict[str, str]:
    """Memory and queues that have a name."""
    return _tried({
        "attach": lambda: _call(30, segment, 0, 0),
        "make a segment": lambda: _call(29, 0, 4096, 0o1600),
        "destroy a segment": lambda: _call(31, segment, 0, 0),
        "semaphores": lambda: _call(64, 0, 1, 0o1600),
        "messages": lambda: _call(68, 0, 0o1600),
        "a queue": lambda: _call(240, b"left", os.O_CREAT | os.O_RDWR, 0o600, 0),
        "a file in memory": lambda: os.memfd_create("left"),
        "a file of everybody": Path("/dev/shm/left").touch,  # noqa: S108 - attacked
    })  # fmt: skip


def leave(work: Work, mark: str) -> dict[str, Any]:
    """Whatever outlives a function: for who runs next in this process."""
    builtins.mark = mark  # type: ignore[attr-defined]
    os.environ["MARK"] = mark
    sys.modules["mark"] = sys
    supported_machine.__globals__["mark"] = mark
    os.open("/dev/zero", os.O_RDONLY)
    threading.Thread(target=_write_on, args=(work.directory / "late",), daemon=True).start()
    return find(work)


def _write_on(path: Path) -> None:
    while True:
        path.write_text(str(time.monotonic()))
        time.sleep(0.001)


def find(work: Work) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "builtins": getattr(builtins, "mark", None),
        "environment": os.environ.get("MARK"),
        "modules": "mark" in sys.modules,
        "globals": supported_machine.__globals__.get("mark"),
        "threads": threading.active_count(),
        "descriptors": len(_listed(Path("/proc/self/fd"))) - 1,
    }


def calls(work: Work, numbers: list[int]) -> dict[str, str]:
    """System calls by number, with nothing sensible to do."""
    return _tried({str(number): partial(_call, number, -1, 0, 0, 0, 0, 0) for number in numbers})


def copies(work: Work) -> dict[str, Any]:
    """What an honest handler does: no attack."""
    (work.directory / "a").write_bytes(b"x")
    shutil.copyfile(work.directory / "a", work.directory / "b")
    (work.directory / "b").touch()
    (work.directory / "b").rename(work.directory / "c")
    return {"names": [path.name for path in _listed(work.directory)]}


def waits(work: Work) -> dict[str, Any]:
    """Until somebody says so."""
    (work.directory / "here").touch()
    while not (work.directory / "go").exists():
        time.sleep(0.005)
    return {}


def reopen(work: Work) -> dict[str, Any]:
    """Read from the pipes that it writes to: what others wrote there would come out."""
    print("my own words", flush=True)  # noqa: T201 - it is the attack
    found = {}
    for descriptor in (1, 2, 3):
        try:
            handle = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
            found[str(descriptor)] = os.read(handle, 4096).decode()
        except OSError as error:
            found[str(descriptor)] = errno.errorcode.get(error.errno or 0, "?")
    return found
