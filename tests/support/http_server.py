"""Runs a small HTTP server in a thread: a double of an outside service that the platform calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

#: Between two checks whether to stop. The library's own 0.5 s would be most of a test's time.
STOP_POLL_SECONDS = 0.01


class _Server(ThreadingHTTPServer):
    #: Connections that wait while this process stands still. Of more than the library's own 5, some would be late.
    request_queue_size = 128


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """Yields the server's URL. `attributes`: class attributes of the handler."""
    server = _Server(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    thread = Thread(target=server.serve_forever, args=(STOP_POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
