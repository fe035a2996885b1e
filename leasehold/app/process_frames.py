"""The frames (messages) between a worker and the processes of its `process=True` tasks. A frame has a kind, the number
of its call, a length and a body.

In the worker, processes.py sends and reads frames. In the process of the task, process_child.py uses `send` and
`receive`.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Annotated, Any, TypeAlias

import orjson
from pydantic import AfterValidator, BaseModel

from leasehold.domain.result_limits import ResultLimits
from leasehold.domain.storable import storable_text

HEAD = struct.Struct(">BQQ")  # the kind, the number of the call in this process, and the length of the body

#: The call number in a frame, such as a LOG, from a thread whose call is unknown. (The first call has the number 1.)
NO_CALL = 0


class Kind(IntEnum):
    """The kinds of frames. The worker sends CALL, and the process sends all others. BEGUN is the first frame that the
    process sends for a call. After BEGUN the user's code runs. DONE, FAILED or CANCELLED is the last frame. The body of
    EMIT is a chunk of the job's stream. The body of DONE is the JSON of the result.
    """

    CALL = 1
    PROGRESS = 2
    EMIT = 3
    DONE = 4
    FAILED = 5
    CANCELLED = 6
    LOG = 7
    BEGUN = 8


#: A text that the function raised or logged. The validator removes what UTF-8 or PostgreSQL cannot hold.
_Text: TypeAlias = Annotated[str, AfterValidator(storable_text)]


class CallOfProcess(BaseModel):
    """The body of a CALL: what the process runs. `module`, `task`: the names of the module and of the task in it.
    `result_limits`: the process sends no result that exceeds these limits. `directory`: the attempt's directory. The
    worker deletes this directory, even if the process was killed.
    """

    module: str
    task: str
    params: dict[str, Any]
    job_id: str
    task_id: str
    tenant: str
    number: int  # the number of the attempt
    directory: str
    result_limits: ResultLimits
    log_level: int = 30  # the lowest level of `logging` that the process sends


class LineOfProcess(BaseModel):
    """The body of a LOG: a line that the function has logged. `trace`: the traceback of the exception that was logged
    with the line. `fields`: what was logged as `extra`. A value that is not a bool, a number, a text or None becomes
    text.
    """

    level: int
    logger: _Text
    message: _Text
    trace: _Text = ""
    fields: dict[_Text, bool | int | float | _Text | None] = {}


class FailedInProcess(BaseModel):
    """The body of a FAILED: the exception of the function. `after`: the seconds until the next attempt, if a Retryable
    names them.
    """

    code: _Text
    message: _Text
    permanent: bool
    after: float | None = None
    trace: _Text = ""


def send(channel: socket.socket, kind: Kind, call_number: int, body: bytes) -> None:
    """Send a frame. Blocks while the buffer of the socket is full."""
    channel.sendall(HEAD.pack(kind, call_number, len(body)) + body)


def receive(channel: socket.socket) -> tuple[int, bytes] | None:
    """In the process of the task: read the number and the body of the next CALL, the only kind that the worker sends.
    Blocks until the frame has arrived. Returns None if the worker has closed the channel.
    """
    head = _read_exactly(channel, HEAD.size)
    if head is None:
        return None
    _, call_number, length = HEAD.unpack(head)
    body = _read_exactly(channel, length)
    return None if body is None else (call_number, body)


def _read_exactly(channel: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = channel.recv(min(count, 1 << 20))  # at most 1 MiB, because `recv` first allocates all bytes it may read
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def json_of(value: Any) -> bytes:
    """The value as JSON. Values of types that JSON lacks become text."""
    return orjson.dumps(value, default=str)
