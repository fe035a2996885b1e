"""The handler of the scripted pipeline: every way in which a step can go well or badly."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work
from leasehold.worker.sandbox import frames
from tests.scripted import coroutine, scripted

_ACTS: dict[str, Callable[..., Done]] = {}
_KEPT: list[object] = []


def _act(function: Callable[..., Done]) -> Callable[..., Done]:
    _ACTS[function.__name__] = function
    return function


@scripted.handles("act")
def act(work: Work) -> Done:
    return _ACTS[work.params.act](work, **work.params.args)


@coroutine.handles("act")
async def act_later(work: Work) -> Done:
    return Done()


@_act
def ok(work: Work, **value: Any) -> Done:
    return Done(value=value or None)


@_act
def copy(work: Work) -> Done:
    made = work.directory / "out" / "copy.txt"
    made.parent.mkdir()
    made.write_bytes(work.files["input"].read_bytes())
    return Done(files={"copy.txt": File(made, "text/plain")}, value={"bytes": made.stat().st_size})


@_act
def whoami(work: Work) -> Done:
    return Done(
        value={
            "pid": os.getpid(),
            "parent": os.getppid(),
            "cwd": str(Path.cwd()),
            "tmp": tempfile.gettempdir(),
            "environ": dict(os.environ),
            "descriptors": _open_descriptors(),
        }
    )


def _open_descriptors() -> list[str]:
    found = []
    for fd in range(256):
        try:
            found.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        except OSError:
            continue
    return found


@_act
def fail(work: Work, error: str, code: str = "", after: float | None = None) -> Done:
    if error == "permanent":
        raise Permanent(code, "told to fail for good")
    if error == "retryable":
        raise Retryable("told to fail", code=code, after=None if after is None else timedelta(seconds=after))
    if error == "exit":
        sys.exit(3)
    if error == "no room":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise ValueError(error)


@_act
def diverge(work: Work) -> Done:
    return Done(value={"losses": [1.0, float("nan")]})


@_act
def hang(work: Work, note: str = "started") -> Done:
    (work.directory / note).touch()
    while True:
        time.sleep(3600)


@_act
def finish_when_told(work: Work) -> Done:
    """Finishes when the test has made a file named `go` in its directory."""
    (work.directory / "started").touch()
    while not (work.directory / "go").exists():
        time.sleep(0.002)
    return Done()


@_act
def spin(work: Work) -> Done:
    while True:
        pass


@_act
def spins_on(work: Work) -> Done:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    while True:
        pass


@_act
def exits(work: Work, status: int) -> Done:
    os._exit(status)


@_act
def dies(work: Work, by: str) -> Done:
    os.kill(os.getpid(), signal.Signals[by])
    raise AssertionError("still alive")


@_act
def segfault(work: Work) -> Done:
    ctypes.string_at(0)
    raise AssertionError("still alive")


@_act
def eat(work: Work, mib: int, keep: bool = False) -> Done:  # noqa: FBT002 - filled from JSON
    block = bytearray(b"x") * (mib * 1024 * 1024)
    if keep:
        _KEPT.append(block)
    return Done(value={"pid": os.getpid()})


@_act
def fork(work: Work, how: str) -> Done:
    if how == "bomb":
        while True:
            os.fork()
    if how == "spawn":
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    if how == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "pass"])  # noqa: S606 - it is the test
    return Done()


@_act
def network(work: Work, how: str, port: int) -> Done:
    if how == "tcp":
        socket.create_connection(("127.0.0.1", port), timeout=5)
    if how == "http":
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
    if how == "udp":
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))
    if how == "unix":
        socket.socket(socket.AF_UNIX).bind(str(work.directory / "s"))
    if how == "pair":
        socket.socketpair()
    return Done()


@_act
def io_uring(work: Work) -> Done:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(425, 8, ctypes.create_string_buffer(256))
    return Done(value={"answer": answer, "errno": errno.errorcode.get(ctypes.get_errno())})


@_act
def threads(work: Work, count: int) -> Done:
    seen: list[int] = []
    started = [threading.Thread(target=seen.append, args=(n,)) for n in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return Done(value={"ran": len(seen)})


@_act
def reads(work: Work, path: str) -> Done:
    return Done(value={"text": Path(path).read_bytes()[:200].decode("latin-1")})


@_act
def reads_parent_environment(work: Work) -> Done:
    return Done(value={"text": Path(f"/proc/{os.getppid()}/environ").read_bytes().decode("latin-1")})


@_act
def writes(work: Work, path: str, mib: int = 0) -> Done:
    with (work.directory / path).open("wb") as file:
        for _ in range(mib):
            file.write(b"x" * 1024 * 1024)
    return Done()


@_act
def opens(work: Work, count: int) -> Done:
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    return Done(value={"opened": len(opened)})


@_act
def links(work: Work, how: str, target: str) -> Done:
    if how == "symlink":
        (work.directory / "linked").symlink_to(target)
    else:
        (work.directory / "linked").hardlink_to(target)
    return Done(files={"linked": File(work.directory / "linked", "text/plain")})


@_act
def claims(work: Work, name: str, path: str, content_type: str = "text/plain") -> Done:
    """Names an output file that may not exist."""
    return Done(files={name: File(Path(path), content_type)})


@_act
def answers(work: Work, what: str) -> Done:
    match what:
        case "large value":
            value: dict[str, Any] = {"text": "x" * 70_000}
        case "huge value":
            value = {"text": "x" * 2_000_000}
        case "no JSON":
            value = {"object": object()}
        case "deep value":
            value = nested(250)
        case "large number":
            value = {"numbers": [1, 2**64]}
        case "long number":
            value = {"number": 10**4000 * 10**4000}
        case "NUL":
            value = {"text": "a\x00b"}
        case _:
            return what  # type: ignore[return-value]  # the test needs it
    return Done(value=value)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"inner": value}
    return value


@_act
def reports(work: Work, percent: str) -> Done:
    work.progress(float(percent), "so far")
    return Done()


@_act
def forges(work: Work, data: str) -> Done:
    """Writes to the protocol's descriptor itself, as a hijacked decoder could."""
    os.write(frames.CHANNEL, bytes.fromhex(data))
    time.sleep(3600)
    return Done()


@_act
def loosens(work: Work) -> Done:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return Done()


@_act
def limits(work: Work) -> Done:
    names = ("RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_CPU")
    return Done(value={name: resource.getrlimit(getattr(resource, name))[0] for name in names})


@_act
def signals(work: Work, pid: int) -> Done:
    os.kill(pid, signal.SIGTERM)
    return Done()


@_act
def outlives_parent(work: Work) -> Done:
    if ctypes.CDLL(None, use_errno=True).prctl(1, 0, 0, 0, 0) != 0:
        raise PermissionError(ctypes.get_errno(), "prctl")
    return Done()


@_act
def prints(work: Work, text: str, times: int = 1, end: str = "\n") -> Done:
    for _ in range(times):
        print(text, end=end)  # noqa: T201 - it is the test
    return Done()
