"""Bounds what an unknown client can use: the number of open connections, the time for which a connection is silent, and
the size of a request's head (its URL and its headers).

`guarded` makes the protocol class that uvicorn uses. uvicorn itself bounds only the number of requests under way. It
would wait forever for the first head on a connection, and for the end of a head that has begun. `allow_files` raises
the process's limit of open files.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from http import HTTPStatus
from typing import Any, ClassVar

import orjson
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from leasehold.api.http.problems import MEDIA_TYPE, Problem
from leasehold.api.process.metrics import CLOSED, CONNECTIONS
from leasehold.domain.ids import new_id
from leasehold.settings import Settings

log = structlog.get_logger(__name__)

#: A head may have at most this many bytes.
MAX_HEAD_BYTES = 64 * 1024
#: Each header counts as this many bytes in addition to its text, because many small headers take more memory than a few
#: large headers.
HEADER_COSTS = 128
#: A client may send at most this many requests on one connection before it has the answer to an earlier request
#: (pipelining).
MAX_PIPELINED = 4
#: If the API answers before a request's body is complete, it reads and discards the rest of the body for at most this
#: long, because most clients read the answer only after they have sent the whole body.
LINGER_SECONDS = 10.0
#: Seconds for which a client may leave an answer unread.
UNREAD_SECONDS = 60.0
#: At most this many refused connections get a 503 at the same time. Further connections are closed without an answer.
_MAX_REFUSING = 100
#: Seconds after which a refused connection is closed.
_REFUSING_SECONDS = 1.0
#: Open files that the process needs in addition to the connections of its clients.
_OTHER_FILES = 256

_BUSY = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "Too many connections. Try again soon.", {"Retry-After": "2"})
_SLOW = Problem(HTTPStatus.REQUEST_TIMEOUT, "head_too_slow", "The head of the request did not arrive in time.")
_MALFORMED = Problem(HTTPStatus.BAD_REQUEST, "malformed_http", "The request is not valid HTTP/1.1.")
_LARGE = Problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", "The request's headers are too large.")


class Guarded(HttpToolsProtocol):
    """One connection. It is quiet while the API waits for the head of the client's next request. When `at_most`
    connections are open, a new connection takes the place of the connection that has been quiet longest.

    All connections of a server share the class variables. `head_seconds`: the time in which the head of a request must
    arrive. `open`: the connections that count for `at_most`. `quiet`: the quiet connections among them; the connection
    that has been quiet longest is the first. `refusing`: connections beyond `at_most` that still get their 503.
    """

    at_most: ClassVar[int] = 1000
    head_seconds: ClassVar[float] = 10.0
    open: ClassVar[set[Guarded]]
    quiet: ClassVar[OrderedDict[Guarded, None]]
    refusing: ClassVar[set[asyncio.Transport]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None  # for a head, or for the rest of a body after its answer
        self._unread_timer: asyncio.TimerHandle | None = None  # for a client that does not read its answer
        self._head_bytes = 0  # received since the last complete head
        self._in_message = False  # the head of a request is complete, but its body is not
        self._unanswered = 0  # requests with a complete head and without a complete answer
        self._parsed_bytes = 0  # of the present head: what the parser has reported, with HEADER_COSTS
        self._refusal: Problem | None = None  # the last answer; after it is set, this connection reads nothing more

    # --- connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.open) >= self.at_most and not self._make_room():
            self._refuse_connection(transport)
            return
        self.open.add(self)
        CONNECTIONS.set(len(self.open))
        self.quiet[self] = None
        self._start_timer(self.head_seconds, "head")

    def _make_room(self) -> bool:
        """Close the connection that has been quiet longest, and return True. Returns False if none is quiet."""
        if not self.quiet:
            return False
        oldest, _ = self.quiet.popitem(last=False)
        self.open.discard(oldest)
        CLOSED.labels("made way").inc()
        oldest.transport.abort()
        return True

    def _refuse_connection(self, transport: asyncio.Transport) -> None:
        CLOSED.labels("too many").inc()
        self._refusal = _BUSY
        if len(self.refusing) >= _MAX_REFUSING:
            transport.abort()
            return
        self.refusing.add(transport)
        self._write(_BUSY)
        self._timer = self.loop.call_later(_REFUSING_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self.refusing.discard(self.transport)
        self.quiet.pop(self, None)
        self.open.discard(self)
        CONNECTIONS.set(len(self.open))
        super().connection_lost(exc)

    # --- requests

    def data_received(self, data: bytes) -> None:
        """uvicorn's parser reads `data`. While it reads, it calls `on_message_begin`, `on_url`, `on_header`,
        `on_headers_complete` and `on_message_complete`.
        """
        if self._refusal is not None:
            return
        if not self._in_message:
            self._head_bytes += len(data)
        super().data_received(data)
        self._check_head()

    def _check_head(self) -> None:
        """Bound the size of a head that is still incomplete, and the time until it is complete."""
        if self._refusal is not None or self._in_message:
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_LARGE)
        elif not self._unanswered and self._timer is None:
            self._start_timer(self.head_seconds, "head")  # the head of the next request has begun

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._parsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head_bytes(len(name) + len(value) + HEADER_COSTS)
        if not self._in_message:  # a header after the body is a trailer, which uvicorn would add to the headers
            super().on_header(name, value)

    def _count_head_bytes(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._refuse(_LARGE)
            raise ValueError("the head is too large")  # so that the parser stops

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self.quiet.pop(self, None)
        self._head_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:  # `pipeline`: uvicorn's queue of requests that wait for earlier answers
            self._refuse(_BUSY)
            raise ValueError("too many pipelined requests")  # so that the parser stops
        super().on_headers_complete()  # raises an error for a malformed URL, which must not count as a request
        self._in_message = True
        self._unanswered += 1

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()
        if not self._unanswered:  # the API had answered before the body was complete (LINGER_SECONDS)
            self._stop_timer()
            self.quiet[self] = None

    def on_response_complete(self) -> None:
        """uvicorn calls this after each answer. The method of uvicorn itself, which is called first, starts the next
        request of `pipeline`.
        """
        super().on_response_complete()
        self._unanswered -= 1
        if self.transport.is_closing():
            return
        if self._refusal is not None:
            self._answer_last(self._refusal)
        elif self._unanswered:
            return
        elif self._in_message:
            self._start_timer(LINGER_SECONDS, "body after its answer")
        else:
            self.quiet[self] = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's own sentence
        """uvicorn calls this when the parser stops. Either the client's bytes are not HTTP, or a method above has
        refused the request.
        """
        if self._refusal is None:
            self._refuse(_MALFORMED)

    # --- clients that do not read their answers

    def pause_writing(self) -> None:
        # asyncio calls this when many bytes wait to be sent, because the client does not read its answer.
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._give_up, "unread answer")

    def resume_writing(self) -> None:
        # asyncio calls this when the client has read most of these bytes.
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # --- time

    def _start_timer(self, seconds: float, reason: str) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._give_up, reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, reason: str) -> None:
        """A timer calls this when its time has passed. If the client has begun the head of a request, answer 408.
        Otherwise close the connection, because the client waits for no answer.
        """
        CLOSED.labels(reason).inc()
        if reason == "head" and self._head_bytes:
            self._refuse(_SLOW)
        else:
            self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        """Read nothing more from this connection. `problem` is its last answer, which follows the answers to all
        earlier requests.
        """
        self._refusal = problem
        self._stop_timer()
        self.quiet.pop(self, None)
        self._answer_last(problem)

    def _answer_last(self, problem: Problem) -> None:
        """Write `problem` and close the connection. If earlier requests have no answer yet, do nothing, because
        `on_response_complete` calls this method again.

        If the body of a request is arriving, the problem answers this request, unless the API has already answered it.
        If no body is arriving, the problem answers the request whose head is arriving.
        """
        is_body_arriving = self._in_message
        if self.transport.is_closing() or self._unanswered > (1 if is_body_arriving else 0):
            return
        if is_body_arriving and not self._unanswered:  # the API has already answered the request
            self.transport.close()
            return
        if is_body_arriving and self.cycle.response_started:  # `cycle`: uvicorn's present request
            self.transport.abort()  # the client would read a second answer as a part of the first
            return
        self._write(problem)
        self.transport.close()

    def _write(self, problem: Problem) -> None:
        """Write the answer directly to the socket, because uvicorn writes only what the app answers."""
        problem.count()
        body = orjson.dumps(problem.body(str(new_id())))
        head = [
            f"HTTP/1.1 {int(problem.status)} {problem.status.phrase}",
            f"Content-Type: {MEDIA_TYPE}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in problem.headers.items()),
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)


def guarded(settings: Settings) -> type[Guarded]:
    """Make the protocol class of one server. All connections of the server share its class variables (see Guarded)."""
    class_variables = {
        "at_most": settings.api_connections,
        "head_seconds": settings.api_header_seconds,
        "open": set(),
        "quiet": OrderedDict(),
        "refusing": set(),
    }
    return type("Connection", (Guarded,), class_variables)


def allow_files(settings: Settings) -> None:
    """Raise this process's limit of open files to the number that it needs for `api_connections` connections, as far as
    the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = settings.api_connections + _MAX_REFUSING + _OTHER_FILES
    if soft < needed_files:
        allowed_files = needed_files if hard == resource.RLIM_INFINITY else min(needed_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed_files, hard))
        if allowed_files < needed_files:
            log.warning(
                "the limit of open files is below the limit of connections", allowed=allowed_files, needed=needed_files
            )
