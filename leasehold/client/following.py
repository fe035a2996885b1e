"""Makes the requests for a feed (events, log lines, chunks), and resumes the feed after a lost connection.

It does no input or output, so both clients use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from leasehold.client.calls import Call, Feed
from leasehold.client.sse import Parser

T = TypeVar("T")


class Following(Generic[T]):
    """Reads one feed, connection after connection."""

    def __init__(self, feed: Feed[T]) -> None:
        self._feed = feed
        self._last_number = str(feed.after)  # of the last item
        self._number_at_connect = self._last_number  # the last number when this connection began
        self._parser = Parser()

    def connect(self) -> Call[Any]:
        """The request of the next connection: it goes on after the last item."""
        self._parser = Parser()  # a broken connection may have left half an event
        self._number_at_connect = self._last_number
        headers = {"Accept": "text/event-stream", "Last-Event-ID": self._last_number}
        return Call("GET", self._feed.path, lambda answer: answer, self._feed.params, headers=headers, safe=True)

    def items(self, text: str) -> Iterator[T]:
        """The items that are complete with this piece of the answer."""
        for event in self._parser.feed(text):
            self._last_number = event.id or self._last_number
            yield self._feed.parse(event.name, event.data)

    @property
    def advanced(self) -> bool:
        """Whether this connection has brought an item."""
        return self._last_number != self._number_at_connect

    @property
    def job_id(self) -> str:
        return self._feed.job_id
