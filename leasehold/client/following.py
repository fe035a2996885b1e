"""Makes the requests for a feed (a job's events, log lines or chunks), and resumes the feed after a lost connection.

The module does no input or output, so that both the blocking client and the asyncio client can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import httpx2

from leasehold.client import models
from leasehold.client.calls import Call, Feed
from leasehold.client.retrying import Tries, pause_after
from leasehold.client.sse import Parser

T = TypeVar("T")  # an item of the feed


class Following(Generic[T]):
    """Reads one feed, connection after connection. `make_tries` makes the Tries of a request. The Tries decide when and
    how often the request is sent again.

    For each connection, a client sends the request of `connect`, and calls `after_answer`. Then it calls `items` with
    each piece of the answer. If the connection breaks, the client calls `after_error`. If the answer ends without an
    item, the client reads the job and calls `after_nothing`.
    """

    def __init__(self, feed: Feed[T], make_tries: Callable[[Call[Any]], Tries]) -> None:
        self._feed = feed
        self._make_tries = make_tries
        self._tries: Tries | None = None  # the Tries of the current request; None once its answer has begun
        self._last_number = str(feed.after)  # the number of the last item
        self._number_at_connect = self._last_number  # the value of `_last_number` when this connection began
        #: Whether the job had ended before this connection began. If so, and this connection brings no item, the feed
        #: ends.
        self.job_has_ended = False
        self._empty_connections = 0  # how many connections in a row brought no item although the job had not ended
        self._parser = Parser()
        self._call: Call[Any]  # the request of this connection

    def connect(self) -> Call[Any]:
        """The request of the next connection, which goes on after the last item."""
        self._parser = Parser()  # a broken connection may have left half an event
        self._number_at_connect = self._last_number
        headers = {"Accept": "text/event-stream", "Last-Event-ID": self._last_number}
        # `idempotent`: the request may be sent again. The lambda parses nothing, because `items` parses the answer in
        # pieces.
        call: Call[Any] = Call(
            "GET", self._feed.path, lambda answer: answer, self._feed.params, headers=headers, idempotent=True
        )
        self._call = call
        self._tries = self._tries or self._make_tries(call)
        return call

    def after_answer(self, answer: httpx2.Response) -> float | None:
        """Returns None if this answer brings the items. If the request failed and is to be sent again, returns the
        seconds until then. Raises the error of an answer after which the request is not sent again.
        """
        assert self._tries is not None
        pause = self._tries.after_answer(answer)
        if pause is None:
            self._tries = None
        return pause

    def after_error(self, error: httpx2.TransportError) -> float:
        """Seconds until the next connection. Raises what Tries.after_error raises."""
        # `_tries` is None if the connection broke after the answer had begun. Then the tries are counted from 0 again.
        self._tries = self._tries or self._make_tries(self._call)
        return self._tries.after_error(error)

    def items(self, text: str) -> Iterator[T]:
        """The items that this piece of the answer completes."""
        for event in self._parser.feed(text):
            self._empty_connections = 0
            self._last_number = event.id or self._last_number
            yield self._feed.parse(event.name, event.data)

    @property
    def advanced(self) -> bool:
        """Whether this connection has brought an item."""
        return self._last_number != self._number_at_connect

    def after_nothing(self, job: models.Job) -> float | None:
        """Call this after a connection that ended without an item. Returns the seconds until the next connection; None:
        connect immediately. `job`: the job, read after that connection. If the job has ended, the client connects once
        more, because the job may have written its last items after that connection ended.

        The API ends a connection without items after ten minutes. But a proxy may end each connection immediately. So
        the pause grows with the number of such connections in a row.
        """
        self.job_has_ended = job.ended
        if job.ended:
            return None
        self._empty_connections += 1
        return pause_after(self._empty_connections)

    @property
    def job_id(self) -> str:
        return self._feed.job_id
