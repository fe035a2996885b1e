"""The HTTP listener of one process on LEASEHOLD_METRICS_PORT. It serves `/metrics` unless metrics are off. In a worker,
it also serves `/livez` and `/readyz`.

The listener runs in its own threads, so it also answers while the main loop (the event loop) is blocked. Only
Prometheus and the kubelet should reach it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from time import monotonic
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

#: A worker counts as dead when its main loop has been blocked for this many seconds. The time can be long, because
#: another thread renews the leases. So a blocked loop harms only the attempts of its own worker.
DEAD_SECONDS = 120.0


#: The host name for all addresses of the machine, of IPv6 and of IPv4.
ALL = "::"
_BACKLOG = 2048  # connections that wait to be accepted


def _address_of(host: str) -> tuple[socket.AddressFamily, str]:
    """The family and the address to listen on. Where the kernel has no IPv6, ALL means all addresses of IPv4."""
    if host == ALL and not socket.has_dualstack_ipv6():
        return socket.AF_INET, "0.0.0.0"  # noqa: S104 - ALL means all addresses
    return socket.AF_INET6 if ":" in host else socket.AF_INET, host


def listening_at(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError when the address is not free."""
    family, address = _address_of(host)
    is_dual_stack = host == ALL and family == socket.AF_INET6
    return socket.create_server((address, port), family=family, dualstack_ipv6=is_dual_stack, backlog=_BACKLOG)


class Health:
    """The health of a worker. The main loop writes it, and the threads of the listener read it for the probes."""

    def __init__(self) -> None:
        self._turned_at: float | None = None  # when the main loop last made a turn
        self.is_ready = False  # what /readyz answers

    def record_turn(self) -> None:
        """Record that the main loop has just made a turn."""
        self._turned_at = monotonic()

    def is_alive(self) -> bool:
        """Whether the main loop has turned within DEAD_SECONDS. Before its first turn, the process counts as alive."""
        return self._turned_at is None or monotonic() - self._turned_at < DEAD_SECONDS


class _SilentRequests(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - wsgiref's signature
        """Log nothing, because a probe comes every few seconds."""


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


def _not_found(_environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    start("404 Not Found", [("Content-Type", "text/plain")])
    return [b"not found\n"]


def listen(host: str, port: int, health: Health | None, *, has_metrics: bool = True) -> int:
    """Serve the metrics if `has_metrics`, and the probes if `health` is given. The threads end with the process.
    Returns the port. Raises OSError when the address is not free.
    """
    other_pages = make_wsgi_app() if has_metrics else _not_found
    probes: dict[str, Callable[[], bool]] = {}
    if health is not None:
        probes = {"/livez": health.is_alive, "/readyz": lambda: health.is_ready}

    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"])
        if probe is None:
            page: Iterable[bytes] = other_pages(environ, start)
            return page
        is_ok = probe()
        start("200 OK" if is_ok else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if is_ok else b"unavailable\n"]

    family, address = _address_of(host)

    class Listener(_ThreadingServer):
        address_family = family

        def server_bind(self) -> None:
            if family == socket.AF_INET6:
                # If the host is ALL, the socket also accepts connections over IPv4.
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != ALL)
            super().server_bind()

    server = make_server(address, port, answer, server_class=Listener, handler_class=_SilentRequests)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)
