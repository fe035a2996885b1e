"""Chooses loopback ports for servers that must know their port before they start.

A port is chosen before its server binds it, so another process could take the port in between. Two rules prevent this.
All ports lie outside the kernel's range for outgoing connections. And each process reserves whole blocks of ports, so
two processes never choose the same port. A server that can bind port 0 and report its port does not need this module.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

from leasehold.embedded.process import EmbeddedError

BLOCK_SIZE = 32  # ports
_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _END = 20_000, 65_536  # the lowest port that this module chooses, and the number after the highest
#: The ports to use if the kernel's range leaves none. An outgoing connection may take one of these before the server
#: does.
_LAST_RESORT = range(20_000, 32_000)


class Ports:
    """The ports of one process. No two calls of `take` return the same port, not even in two processes that live at the
    same time.

    A Unix socket with an abstract name reserves a block. Such a name belongs to a network namespace, as ports do. The
    kernel frees the name when the process ends, however it ends.
    """

    def __init__(self, candidates: range) -> None:
        # Only whole blocks are used, so the last candidates may be left out.
        self._blocks = [range(first, first + BLOCK_SIZE) for first in candidates[: -BLOCK_SIZE + 1 : BLOCK_SIZE]]
        random.SystemRandom().shuffle(self._blocks)  # not `random.shuffle`, because a test may have seeded it
        self._reservations: list[int] = []  # the descriptors of the Unix sockets
        self._block_ports: list[int] = []  # the ports of the newest block that were not taken yet
        self._last_refusal: OSError | None = None  # why the last block could not be reserved
        self._owner_pid = os.getpid()

    def take(self) -> int:
        """A port of 127.0.0.1 on which nothing listens now.

        Raises:
            EmbeddedError: this process has no free port left in its blocks, and can reserve no other block.
        """
        if self._owner_pid != os.getpid():  # a forked child must not take ports from its parent's block
            self._owner_pid, self._block_ports = os.getpid(), []
        while True:
            while self._block_ports:
                port = self._block_ports.pop(0)
                if is_free(port):
                    return port
            self._block_ports = list(self._reserve_block())

    def close(self) -> None:
        """Release the blocks. From now on, other processes may reserve them."""
        self._block_ports = []
        while self._reservations:
            os.close(self._reservations.pop())

    def _reserve_block(self) -> range:
        while self._blocks:
            block = self._blocks.pop()
            with socket.socket(socket.AF_UNIX) as reservation:
                try:
                    reservation.bind(f"\0leasehold-ports-{block.start}")
                except OSError as error:  # usually: another process has this block
                    self._last_refusal = error
                    continue
                self._reservations.append(reservation.detach())
            return block
        reason = "this process has used all blocks of ports"
        if self._last_refusal is not None:
            reason = f"no other block of ports can be reserved: {self._last_refusal}"
        raise EmbeddedError(f"no free port on 127.0.0.1: {reason}")


def ports_outside(first_outgoing: int, last_outgoing: int) -> range:
    """The ports that no outgoing connection takes: the ports below the kernel's range or the ports above it, whichever
    are more. Ports below 20,000 are left to the machine's own servers.
    """
    below = range(_LOWEST, max(_LOWEST, first_outgoing))
    above = range(max(_LOWEST, last_outgoing + 1), _END)
    more_ports = max(below, above, key=len)
    return more_ports if len(more_ports) >= BLOCK_SIZE else _LAST_RESORT


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now. No other call returns this port, in this process or in another
    process that lives at the same time.

    Raises:
        EmbeddedError: no port is left.
    """
    return _ports.take()


def require_free(port: int) -> None:
    """Raises EmbeddedError if this user may not listen on this port of 127.0.0.1, or if a process listens on it. That
    process would answer instead of the new server.
    """
    try:
        _bind(port)
    except OSError as error:
        reason = "is in use on this machine"
        if error.errno != errno.EADDRINUSE:  # a port below 1024, for example, is root's
            reason = f"cannot be used: {error.strerror}"
        raise EmbeddedError(f"port {port} {reason}: choose another one with --port, or 0 for any") from None


def is_free(port: int) -> bool:
    """Whether this user may listen on this port of 127.0.0.1, and no process listens on it."""
    try:
        _bind(port)
    except OSError:
        return False
    return True


def _bind(port: int) -> None:
    """Bind the port of 127.0.0.1, and free it again. Raises OSError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def _outgoing_range() -> tuple[int, int]:
    """The first and the last port that the kernel gives to outgoing connections."""
    try:
        first, last = _KERNEL_RANGE.read_text().split()
    except OSError:  # not Linux, or no /proc: a range that contains IANA's range and those of most kernels
        return 32_768, 65_535
    return int(first), int(last)


_ports = Ports(ports_outside(*_outgoing_range()))
