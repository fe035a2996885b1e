"""Finds free loopback ports for private servers."""

from __future__ import annotations

import random
import socket

from leasehold.embedded.process import EmbeddedError

# Below the kernel's range for outgoing connections: so the port of a server stays free while the server restarts.
LOWEST, HIGHEST = 20_000, 32_000
ATTEMPTS = 200
_returned_ports: set[int] = set()


def free_port() -> int:
    """A port on 127.0.0.1 on which nothing listens now. No call in this process returns a port twice: the server of an
    earlier call may not listen yet, or may restart.
    """
    for _ in range(ATTEMPTS):
        port = random.randrange(LOWEST, HIGHEST)  # noqa: S311 - no secret
        if port in _returned_ports:
            continue
        if _is_free(port):
            _returned_ports.add(port)
            return port
    raise EmbeddedError(f"no free port on 127.0.0.1 between {LOWEST} and {HIGHEST}")


def require_free(port: int) -> None:
    """Raises EmbeddedError if something listens on this port of 127.0.0.1: it would answer for the new server."""
    if not _is_free(port):
        raise EmbeddedError(f"port {port} is in use on this machine: choose another one with --port, or 0 for any")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
