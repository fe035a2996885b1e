"""Server-sent events as the API writes them, out of the lines of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """`id`: send it as `Last-Event-ID` to go on after this event."""

    name: str
    id: str
    data: dict[str, Any]


@dataclass(slots=True)
class Parser:
    """Give it each line of the answer; it returns an event with the empty line that ends one."""

    _fields: dict[str, str] = field(default_factory=dict)

    def feed(self, line: str) -> ServerEvent | None:
        if line:
            name, _, value = line.partition(":")
            if name:  # a line that begins with a colon is a comment, which keeps the connection open
                value = value.removeprefix(" ")
                self._fields[name] = f"{self._fields['data']}\n{value}" if name == "data" in self._fields else value
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return ServerEvent(fields.get("event", "message"), fields.get("id", ""), json.loads(fields["data"]))


def events_of(lines: Iterable[str]) -> Iterator[ServerEvent]:
    parser = Parser()
    for line in lines:
        event = parser.feed(line)
        if event is not None:
            yield event
