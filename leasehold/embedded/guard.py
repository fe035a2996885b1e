"""The guard of one server: a small program that starts the server, and lets no process of the server outlive the
server's owner (the process that started the guard).

`leasehold.embedded.process` starts the guard as `python guard.py OWNER_PID UID GID LAST_SIGNAL PROGRAM ARGUMENT...`.
The guard uses the standard library only. UID -1: the server runs as the guard's own user. LAST_SIGNAL: the guard sends
this signal, and waits a little, before it kills the server. The guard kills the server and all processes that the
server started, daemons included, in three cases:
- when the owner ends in any way (the pipe to the guard closes, or the owner's pidfd reports the end);
- when the guard gets SIGTERM, SIGINT or SIGHUP;
- when the server ends.
Linux itself can kill a child when its parent ends (`PR_SET_PDEATHSIG`). This alone is not enough, because Linux kills
the child as soon as the thread that has forked it ends, and a grandchild such as epmd does not inherit the setting.

Each byte of the guard's standard input is the number of a signal, which the guard sends to the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SECONDS_FOR_LAST_SIGNAL = 3.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILLED_CODE = 128 + signal.SIGKILL  # the exit code of a process that SIGKILL ended


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Does nothing if the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    # Called in the server's process before its program starts. From now on, Linux kills the server if the guard ends.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """The children of the process `root`, their children, and so on, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            # The program's name may contain spaces, and may end within a character, because the kernel cuts the name
            # after 15 bytes. The state and the id of the parent process follow the name.
            fields_after_name = stat_file.read_bytes().rpartition(b")")[2].split()
            children.setdefault(int(fields_after_name[1]), []).append(int(stat_file.parent.name))
    below_root: list[int] = []
    unvisited = [root]
    while unvisited:
        pids = children.get(unvisited.pop(), [])
        below_root += pids
        unvisited += pids
    return below_root


def shell_code(status: int) -> int:
    """The exit code for a status of `waitpid`; 128 + n for signal n, as shells do."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill_everything(server: int) -> None:
    """Kill all descendants of the guard, until none is left. The guard is a subreaper, so each process whose parent has
    ended becomes a child of the guard.
    """
    while True:
        # PermissionError: the process runs as another user. The other processes must still be killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server, signal.SIGKILL)  # for systems without /proc
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:  # no child is left
            return


class Guard:
    """Waits, in one poll without a timer, for three events: the owner ends, the server ends, or a signal must be
    forwarded.
    """

    def __init__(self, owner: int, last_signal: int) -> None:
        self.last_signal = last_signal
        self.status: int | None = None  # the server's status from `waitpid`, once the server has ended
        self.stopped = False  # whether one of STOP_SIGNALS has arrived
        self.wakeup_fd, writer_fd = os.pipe()  # Python writes a byte for each signal that arrives
        for end in (self.wakeup_fd, writer_fd):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer_fd)
        for number in (signal.SIGCHLD, *STOP_SIGNALS):
            signal.signal(number, self.on_signal)
        self.poll = select.poll()
        self.poll.register(self.wakeup_fd, select.POLLIN)
        self.poll.register(0, select.POLLIN)
        self.owner_fd = self.watch(owner)
        self.server = 0  # the server's process id

    def on_signal(self, number: int, _frame: object) -> None:
        # For SIGCHLD there is nothing more to do: Python has written a byte to the pipe, and this byte ends the poll.
        # Then `reap` collects the child.
        self.stopped = self.stopped or number in STOP_SIGNALS

    def watch(self, owner: int) -> int | None:
        """Add the owner's pidfd to the poll, and return it. Returns None if the system has no pidfds.

        The pipe from the owner (the guard's standard input) alone is not enough, because a process that the owner has
        forked may keep the pipe open after the owner's death.
        """
        try:
            owner_fd = os.pidfd_open(owner)
        except (AttributeError, OSError):
            return None
        self.poll.register(owner_fd, select.POLLIN)
        return owner_fd

    def start(self, argv: list[str], uid: int, gid: int) -> None:
        # The guard keeps the Popen object. Without a reference to it, Popen itself would collect the child's status
        # before `reap`.
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the guard has no threads
            user=uid if uid >= 0 else None,
            group=gid if uid >= 0 else None,
            extra_groups=[] if uid >= 0 else None,
        )
        self.server = self.process.pid

    def run(self) -> int:
        """Watch until the server or its owner has ended, or a signal stops the guard. Then kill all that still runs.

        Returns:
            The server's exit code; 128 + n for signal n, as shells do.
        """
        while self.status is None and self.wait_for_event():
            self.reap()
        if self.status is None:
            self.send_last_signal()
        kill_everything(self.server)
        return KILLED_CODE if self.status is None else shell_code(self.status)

    def wait_for_event(self) -> bool:
        """Wait for the next event, and forward signals to the server. Returns False if the owner has ended, or if a
        signal stops the guard.
        """
        ready = {fd for fd, _ in self.poll.poll()}
        if self.stopped or (self.owner_fd is not None and self.owner_fd in ready):
            return False
        if 0 in ready:
            signals = os.read(0, 64)
            for number in signals:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.server, number)
            return bool(signals)  # no byte: the pipe has closed, because the owner has ended
        return True

    def reap(self) -> None:
        """Collect the processes that have ended. If the server is among them, keep its status."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup_fd, 512)
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if child[0] == self.server:
                    self.status = child[1]

    def send_last_signal(self) -> None:
        """Send the last signal, and wait a little, so that the server can free its shared memory before the SIGKILL."""
        if self.last_signal == signal.SIGKILL:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.server, self.last_signal)
        deadline = time.monotonic() + SECONDS_FOR_LAST_SIGNAL
        while self.status is None and time.monotonic() < deadline:
            select.select([self.wakeup_fd], [], [], 0.1)
            self.reap()


def main() -> int:
    owner, uid, gid, last_signal = map(int, sys.argv[1:5])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(owner, last_signal)
    if os.getppid() != owner:  # the owner ended before the guard could watch it
        return KILLED_CODE
    try:
        guard.start(sys.argv[5:], uid, gid)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main())
