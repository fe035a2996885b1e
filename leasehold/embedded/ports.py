"""Finds free loopback ports for private servers."""

from __future__ import annotations

import random
import socket

from leasehold.embedded.process import EmbeddedError

# Below the kernel's range for outgoing connections: the port of a server that restarts stays free meanwhile.
LOWEST, HIGHEST = 20_000, 32_000
ATTEMPTS = 200
_given: set[int] = set()


def free_port() -> int:
    """A port on 127.0.0.1 that nothing listens on now, and that no earlier call in this process has returned: its
    server may not listen yet, or may restart.
    """
    for _ in range(ATTEMPTS):
        port = random.randrange(LOWEST, HIGHEST)  # noqa: S311 - no secret
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise EmbeddedError(f"no free port on 127.0.0.1 between {LOWEST} and {HIGHEST}")
