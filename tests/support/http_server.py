"""A small HTTP server in a thread, for what the platform calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

LOOK_SECONDS = 0.01  # how often it looks whether to stop; the library's own half a second is most of a test


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """Gives the server's URL; `attributes` become the handler class's own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    thread = Thread(target=server.serve_forever, args=(LOOK_SECONDS,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
