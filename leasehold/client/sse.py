"""Parses the server-sent events in the text of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """An event of the answer. A new request with the header `Last-Event-ID: {id}` goes on after this event."""

    name: str
    id: str
    data: dict[str, Any]


@dataclass(slots=True)
class Parser:
    """`feed` takes the text of the answer in pieces of any size, and returns the events that each piece completes.

    Only LF and CR LF end a line here. The function of the HTTP library that splits a text into lines is not used,
    because its lines also end at U+2028 and U+0085, which JSON may contain unescaped.
    """

    _unfinished: str = ""
    _fields: dict[str, str] = field(default_factory=dict)

    def feed(self, text: str) -> list[ServerEvent]:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        events = [self._take_line(line.removesuffix("\r")) for line in lines]
        return [event for event in events if event is not None]

    def _take_line(self, line: str) -> ServerEvent | None:
        """Take the next line. If it is empty, it ends an event, and this method returns the event if it has data."""
        if line:
            self._add_field(line)
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return ServerEvent(fields.get("event", "message"), fields.get("id", ""), json.loads(fields["data"]))

    def _add_field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data" and "data" in self._fields:  # an event may have several lines of data
            value = f"{self._fields['data']}\n{value}"
        if name:  # a line that begins with a colon is a comment, which only keeps the connection open
            self._fields[name] = value


def events_of(texts: Iterable[str]) -> Iterator[ServerEvent]:
    """The events of an answer whose text comes in these pieces."""
    parser = Parser()
    for text in texts:
        yield from parser.feed(text)
