"""An HTTP proxy before a store: it passes requests on, and answers 500 where the store has done what it was sent."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.support.http_server import serving_http

_OF_THE_CONNECTION = {"connection", "transfer-encoding", "content-length", "date", "server"}


@dataclass
class LostAnswers:
    """`loses`: whether the answer to such a request (method, path with query) is lost. The first of each is; the
    repetition is answered by the store. `statuses`: of what the client got for the requests that match.
    """

    store: str
    loses: Callable[[str, str], bool]
    url: str = ""
    statuses: list[int] = field(default_factory=list)
    _lost: set[tuple[str, str]] = field(default_factory=set)

    def status_of(self, method: str, path: str, status: int) -> int:
        if not self.loses(method, path):
            return status
        if (method, path) not in self._lost:
            self._lost.add((method, path))
            status = 500
        self.statuses.append(status)
        return status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # it answers `Expect: 100-continue`, for which clients of S3 wait
    proxy: LostAnswers

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        del self.headers["Expect"]
        # The store may close the connection in the middle of a long body, which it refuses: an error here.
        with closing(http.client.HTTPConnection(urlsplit(self.proxy.store).netloc, timeout=60)) as connection:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data = answer.read()
        status = self.proxy.status_of(self.command, self.path, answer.status)
        self.send_response(status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_THE_CONNECTION:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._pass_on
        raise AttributeError(name)

    def log_message(self, *_arguments: object) -> None:
        return


@contextmanager
def losing_answers(store: str, loses: Callable[[str, str], bool]) -> Iterator[LostAnswers]:
    proxy = LostAnswers(store, loses)
    with serving_http(_Handler, proxy=proxy) as url:
        proxy.url = url
        yield proxy
