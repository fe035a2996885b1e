"""Reads the startup message of a PostgreSQL connection. Its application name says which part of the platform connects.

Source of the layout: PostgreSQL's documentation, "Message Formats", SSLRequest and StartupMessage.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

_SSL_REQUEST, _GSS_REQUEST, _PROTOCOL_3 = 80877103, 80877104, 196608
_HEAD = 8
#: The statement of leasehold.transitions.workers.appear once it has the lock.
_PRESENT = b"UPDATE worker SET present = true"


@dataclass(frozen=True, slots=True)
class Session:
    """A connection of `process` that has ended. Times are in seconds since 1970. `present`: the connection held the
    worker's presence, from `since` on. The connection of a heartbeat that has not got the advisory lock yet is not.
    """

    process: str
    label: str
    since: float
    until: float
    present: bool = False


class PostgresTap:
    """The Tap of one connection of a process. It calls `ended` with the connection's Session when it is closed."""

    def __init__(self, process: str, ended: Callable[[Session], None]) -> None:
        self.label = ""
        self._process = process
        self._ended = ended
        self._since = time.time()
        self._startup = b""
        self._present = False

    def request(self, data: bytes) -> None:
        if not self._present and _PRESENT in data:
            self._present, self._since = True, time.time()
        if self.label:
            return
        self._startup += data
        while len(self._startup) >= _HEAD:
            size, code = struct.unpack_from(">II", self._startup)
            if code in (_SSL_REQUEST, _GSS_REQUEST):
                self._startup = self._startup[size:]
                continue
            if code == _PROTOCOL_3 and len(self._startup) < size:
                return
            words = self._startup[_HEAD:size].split(b"\0") if code == _PROTOCOL_3 else []
            parameters = dict(zip(words[::2], words[1::2], strict=False))
            self.label = parameters.get(b"application_name", b"other").decode()
            return

    def reply(self, data: bytes) -> None: ...

    def closed(self) -> None:
        self._ended(Session(self._process, self.label, self._since, time.time(), self._present))
