"""Reads the startup message of a PostgreSQL connection: its application name is the part of the platform that connects.

Source of the layout: PostgreSQL's documentation, "Message Formats", SSLRequest and StartupMessage.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

_SSL_REQUEST, _GSS_REQUEST, _PROTOCOL_3 = 80877103, 80877104, 196608
_HEAD = 8
#: The statement that leasehold.transitions.workers.appear runs once it has the lock.
_PRESENT = b"UPDATE worker SET present = true"


@dataclass(frozen=True, slots=True)
class Session:
    """A connection of `process` that has ended. Times are in seconds since 1970. `label`: the application name.
    `port`: of the PostgreSQL server.

    `present`: whether the connection held the worker's presence. Then `since` is when it got the presence; otherwise
    when the connection began.
    """

    process: str
    label: str
    since: float
    until: float
    present: bool = False
    port: int = 0


class PostgresTap:
    """The tap of one connection of a process to the server at `port`. When the connection is closed, the tap calls
    `ended` with its Session.
    """

    def __init__(self, process: str, ended: Callable[[Session], None], port: int = 0) -> None:
        self.label = ""
        self._process = process
        self._ended = ended
        self._port = port
        self._since = time.time()
        self._startup = b""
        self._present = False

    def request(self, data: bytes) -> None:
        if not self._present and _PRESENT in data:
            self._present, self._since = True, time.time()
        if not self.label:
            self._startup += data
            self.label = self._application_name()

    def _application_name(self) -> str:
        """The name in the startup message; "" until the whole message has arrived. "other": the message has no name."""
        size, code = self._head()
        while code in (_SSL_REQUEST, _GSS_REQUEST):
            self._startup = self._startup[size:]
            size, code = self._head()
        if len(self._startup) < max(size if code == _PROTOCOL_3 else 0, _HEAD):
            return ""
        words = self._startup[_HEAD:size].split(b"\0") if code == _PROTOCOL_3 else []
        parameters = dict(zip(words[::2], words[1::2], strict=False))
        return parameters.get(b"application_name", b"other").decode()

    def _head(self) -> tuple[int, int]:
        """Size and code of the next message; (0, 0) until its head has arrived."""
        if len(self._startup) < _HEAD:
            return 0, 0
        size, code = struct.unpack_from(">II", self._startup)
        return size, code

    def reply(self, data: bytes) -> None: ...

    def closed(self) -> None:
        self._ended(Session(self._process, self.label, self._since, time.time(), self._present, self._port))
