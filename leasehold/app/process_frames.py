"""The frames between a worker and the processes of its `process=True` tasks: a kind, a length, a body."""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Any

import orjson
from pydantic import BaseModel

HEAD = struct.Struct(">BQ")


class Kind(IntEnum):
    """CALL goes to the process, and all others come from it. DONE has the result's JSON as its body."""

    CALL = 1
    PROGRESS = 2
    EMIT = 3
    DONE = 4
    FAILED = 5
    CANCELLED = 6
    LOG = 7


class CallOfProcess(BaseModel):
    """What the process runs: the task of a module, by name."""

    module: str
    task: str
    params: dict[str, Any]
    job_id: str
    task_id: str
    tenant: str
    number: int
    log_level: int = 30  # the lowest level of `logging` that the process sends


class LineOfProcess(BaseModel):
    """What the function logs."""

    level: int
    logger: str
    message: str
    trace: str = ""


class FailedInProcess(BaseModel):
    """The exception of the function. `after`: seconds, of Retryable."""

    code: str
    message: str
    permanent: bool
    after: float | None = None
    trace: str = ""


def send(channel: socket.socket, kind: Kind, body: bytes) -> None:
    """Blocks until the worker has room for it."""
    channel.sendall(HEAD.pack(kind, len(body)) + body)


def receive(channel: socket.socket) -> tuple[Kind, bytes] | None:
    """Blocks until a frame is there. None: the worker has closed the channel."""
    head = _exactly(channel, HEAD.size)
    if head is None:
        return None
    kind, length = HEAD.unpack(head)
    body = _exactly(channel, length)
    return None if body is None else (Kind(kind), body)


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = channel.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def json_of(value: Any) -> bytes:
    return orjson.dumps(value, default=str)
