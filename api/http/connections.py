"""What a connection may cost before anybody knows whose it is: how many there are, how long each may be silent or slow,
and how large the head of a request may be.

uvicorn has a limit for requests under way, and waits for ever for the head of the next one.
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

#: Bytes of a request's head: its address and its headers.
MOST_HEAD_BYTES = 64 * 1024
#: What a header costs beside its bytes: many small ones take more memory than a few large ones.
HEADER_COSTS = 128
#: Requests that a client may send ahead on one connection.
MOST_AHEAD = 4
#: For so long what is left of a body is thrown away after the answer, so that its sender gets to read it.
LINGER_SECONDS = 10.0
#: For so long a client may take nothing of an answer.
UNREAD_SECONDS = 60.0
#: Refused connections that are being told so at once; more are just closed.
_MOST_TOLD = 100
_TOLD_SECONDS = 1.0
_FILES_BESIDE = 256

_BUSY = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "Too many connections. Try again soon.", {"Retry-After": "2"})
_SLOW = Problem(HTTPStatus.REQUEST_TIMEOUT, "head_too_slow", "The head of the request did not arrive in time.")
_LARGE = Problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", "The request's headers are too large.")


class Guarded(HttpToolsProtocol):
    """A connection. Without a whole request it is quiet: where there is no room, the one that has been so for longest
    makes way for a new one.
    """

    most: ClassVar[int] = 1000
    head_seconds: ClassVar[float] = 10.0
    open: ClassVar[set[Guarded]]
    quiet: ClassVar[OrderedDict[Guarded, None]]
    told: ClassVar[set[asyncio.Transport]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None  # of the head, or of what is left of a body after the answer
        self._unread: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_message = False
        self._answered = True  # or nothing was asked yet
        self._named = 0  # bytes of the head, as the parser told them
        self._refused: Problem | None = None

    # --- connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.open) >= self.most and not self._make_room():
            self._turn_away(transport)
            return
        self.open.add(self)
        CONNECTIONS.set(len(self.open))
        self.quiet[self] = None
        self._wait(self.head_seconds, "head")

    def _make_room(self) -> bool:
        if not self.quiet:
            return False
        oldest, _ = self.quiet.popitem(last=False)
        self.open.discard(oldest)
        CLOSED.labels("made way").inc()
        oldest.transport.abort()
        return True

    def _turn_away(self, transport: asyncio.Transport) -> None:
        CLOSED.labels("too many").inc()
        self._refused = _BUSY
        if len(self.told) >= _MOST_TOLD:
            transport.abort()
            return
        self.told.add(transport)
        self._say(_BUSY)
        self._timer = self.loop.call_later(_TOLD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        if self._unread is not None:
            self._unread.cancel()
        self.told.discard(self.transport)
        self.quiet.pop(self, None)
        self.open.discard(self)
        CONNECTIONS.set(len(self.open))
        super().connection_lost(exc)

    # --- requests

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        if not self._in_message:
            self._head_bytes += len(data)
        super().data_received(data)
        self._judge_head()

    def _judge_head(self) -> None:
        if self._refused is not None or self._in_message:
            return
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(_LARGE)
        elif self._answered and self._timer is None:
            self._wait(self.head_seconds, "head")  # the head of the next request has begun

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._named = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER_COSTS)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._named += size
        if self._named > MOST_HEAD_BYTES:
            self._refuse(_LARGE)
            raise ValueError("the head is too large")  # the parser stops

    def on_headers_complete(self) -> None:
        self._cancel()
        self.quiet.pop(self, None)
        self._in_message, self._answered = True, False
        self._head_bytes = 0
        if len(self.pipeline) >= MOST_AHEAD:
            self._refuse(_BUSY)
            raise ValueError("too many requests ahead")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()
        if self._answered:
            self._cancel()
            self.quiet[self] = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self.pipeline or not self.cycle.response_complete:
            return
        self._answered = True
        if self._in_message:
            self._wait(LINGER_SECONDS, "body after its answer")
        else:
            self.quiet[self] = None

    def send_400_response(self, msg: str) -> None:
        if self._refused is None:
            super().send_400_response(msg)

    # --- those who do not read what they are sent

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self._give_up, "unread answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    # --- time

    def _wait(self, seconds: float, why: str) -> None:
        self._cancel()
        self._timer = self.loop.call_later(seconds, self._give_up, why)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, why: str) -> None:
        CLOSED.labels(why).inc()
        if why == "head" and self._head_bytes:
            self._refuse(_SLOW)
        else:
            self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        self._refused = problem
        if not self.transport.is_closing():
            self._say(problem)
            self.transport.close()

    def _say(self, problem: Problem) -> None:
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
    """The kind of connections of one server, which share its limits."""
    shared = {
        "most": settings.api_connections,
        "head_seconds": settings.api_header_seconds,
        "open": set(),
        "quiet": OrderedDict(),
        "told": set(),
    }
    return type("Connection", (Guarded,), shared)


def allow_files(settings: Settings) -> None:
    """Let the process open as many files as it has connections, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.api_connections + _MOST_TOLD + _FILES_BESIDE
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning("fewer files may be open than connections", allowed=allowed, wanted=wanted)
