"""An HTTP file service in a thread: the target of promotions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.support.http_server import serving_http

#: The body of the answer to a new file: larger than an answer that Egress reads.
_PAGE = b"Created. " * 10_000


@dataclass
class FileService:
    """The service's files, and switches for its failures. It knows PUT and DELETE and, if `full`, also HEAD, GET and
    `If-None-Match`.

    `tokens`: the Authorization headers of all PUTs. `accepts`: whether it accepts such a header. `refuses`: whether it
    refuses a PUT to a path. `on_put`, `on_delete`: called with the path before the file changes.
    """

    full: bool = True
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    deletes: bool = True
    accepts: Callable[[str | None], bool] = lambda _token: True
    refuses: Callable[[str], bool] = lambda _path: False
    on_put: Callable[[str], None] = lambda _path: None
    on_delete: Callable[[str], None] = lambda _path: None


class _Handler(BaseHTTPRequestHandler):
    service: FileService

    def do_PUT(self) -> None:
        service = self.service
        data = self.rfile.read(int(self.headers["Content-Length"]))
        service.tokens.add(self.headers["Authorization"])
        if not self._is_known():
            return self._answer(401)
        service.on_put(self.path)
        if service.refuses(self.path):
            return self._answer(507)
        exists = self.path in service.files
        if service.full and exists and self.headers["If-None-Match"] == "*":
            return self._answer(412)
        service.files[self.path] = data
        return self._answer(204) if exists else self._answer(201, _PAGE)

    def do_DELETE(self) -> None:
        if not self._is_known():
            return self._answer(401)
        self.service.on_delete(self.path)
        if not self.service.deletes:
            return self._answer(503)
        return self._answer(204 if self.service.files.pop(self.path, None) is not None else 404)

    def do_HEAD(self) -> None:
        if not self._is_known():
            return self._answer(401)
        return self._answer(405 if not self.service.full else 200 if self.path in self.service.files else 404)

    def do_GET(self) -> None:
        if not self._is_known():
            return self._answer(401)
        if not self.service.full or self.path not in self.service.files:
            return self._answer(404 if self.service.full else 405)
        return self._answer(200, self.service.files[self.path])

    def _is_known(self) -> bool:
        return self.service.accepts(self.headers["Authorization"])

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        return


@contextmanager
def serving_files(*, full: bool = True) -> Iterator[FileService]:
    service = FileService(full)
    with serving_http(_Handler, service=service) as url:
        service.url = f"{url}/models"
        yield service
