"""The protocol between a worker, its zygotes (processes that load handlers, and fork a child for each run) and their
children. A frame is a message of this protocol: its length, and then JSON, never pickle.

A hostile picture may have taken control of a child. So the worker reads a bounded number of bytes and validates each
frame with these models. Such a child can report false results, but cannot make the worker run anything.
"""

from __future__ import annotations

import os
import struct
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from leasehold.domain.result_limits import ResultLimits

LENGTH = struct.Struct(">I")  # the header of a frame: how many bytes of JSON follow
#: The reader refuses larger frames. A frame has room for a result of 1 MiB, the largest LEASEHOLD_RESULT_INLINE_BYTES.
MAX_FRAME = 1280 * 1024  # bytes
MAX_TEXT = 2000  # characters
#: The name of a file that asks the handler to stop. It is in the parent of the run's `out` directory.
CANCEL = "cancel"
MAX_TRACEBACK = 16 * 1024  # characters
MAX_MESSAGE = 8192  # characters of a line that a handler logs
#: The most fields of a line that a handler logs, and the most characters of a field's name and of its value.
MAX_FIELDS, MAX_NAME, MAX_VALUE = 32, 200, 2000
#: Log lines per run. The child stops sending at this number, and the worker ignores any line beyond it.
MAX_LOG_LINES = 10_000
MAX_AFTER = 366 * 86400.0  # seconds until a retry

#: The file descriptor of the protocol in a child.
CHANNEL = 3
#: The worker's request to a zygote is one number, and the zygote's answer is one number. Request -> answer:
#: FORK -> the process id of the new child, or the negative error number of the fork;
#: a process id -> that child's exit status, once the zygote has reaped it.
NUMBER = struct.Struct("=i")
FORK = 0

#: The exit status of a child that ran out of memory. Such a child sends no frame, because sending might need more
#: memory. Neither Python nor a shell uses this number.
OUT_OF_MEMORY = 86

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Traceback = Annotated[str, Field(max_length=MAX_TRACEBACK)]


class FrameError(Exception):
    """A message that is not a frame of this protocol, or is too large for one."""


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Confinement(_Frame):
    """Worker to child, first: the only files that the child may read, and the only directory that it may write to."""

    files: list[str]
    directory: str


class Run(_Frame):
    """Worker to child, second: run this step now, in `directory`, on `files`. `result_limits`: the limits of the result
    if the step is a task of an app.
    """

    pipeline: str
    step: str
    params: dict[str, Any]
    files: dict[str, str]
    directory: str
    item: Any = None  # for a part of a fanned-out step: the item that this run handles
    result_limits: ResultLimits | None = None
    log_level: int = 30  # the lowest level of `logging` that the child sends


class Ready(_Frame):
    """Zygote to worker, once: the handlers are loaded. `isolation`: the mechanisms that confine the children, as in
    Fences.isolation. `threads`: how many threads the zygote has; a fork copies only one thread.
    """

    kind: Literal["ready"] = "ready"
    isolation: Text
    threads: int


class Refused(_Frame):
    """Zygote to worker, once, instead of Ready: why the handlers cannot be loaded."""

    kind: Literal["refused"] = "refused"
    reason: Text
    traceback: Traceback = ""


class Progress(_Frame):
    """Child to worker, any number of times before the answer."""

    kind: Literal["progress"] = "progress"
    percent: Annotated[float, Field(ge=0, le=100)]
    summary: Annotated[str, Field(max_length=500)] = ""


#: The name and the value of a field of a LogLine.
_Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
_Value: TypeAlias = Annotated[str, Field(max_length=MAX_VALUE)]


class LogLine(_Frame):
    """Child to worker, any number of times before the answer: a line that the handler logs."""

    kind: Literal["log"] = "log"
    level: Annotated[int, Field(ge=0, le=100)]
    logger: Annotated[str, Field(max_length=200)]
    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    traceback: Traceback = ""
    fields: Annotated[dict[_Name, bool | int | float | _Value | None], Field(max_length=MAX_FIELDS)] = {}


class Emitted(_Frame):
    """Child to worker, any number of times before the answer: a chunk of the job's stream."""

    kind: Literal["emitted"] = "emitted"
    chunk: Any


class OutputFile(_Frame):
    """A file that the handler wrote, by its path relative to the run's directory."""

    path: Annotated[str, Field(max_length=1000)]
    content_type: Annotated[str, Field(max_length=200)]


class Finished(_Frame):
    """Child to worker, last: the handler returned."""

    kind: Literal["finished"] = "finished"
    files: Annotated[dict[Name, OutputFile], Field(max_length=256)]
    value: dict[str, Any] | None = None


class Failed(_Frame):
    """Child to worker, last: the handler raised. `error`: which error class the worker raises for the attempt."""

    kind: Literal["failed"] = "failed"
    error: Literal["permanent", "retryable", "unforeseen", "cancelled"]
    code: Name
    message: Text
    after: Annotated[float | None, Field(ge=0, le=MAX_AFTER)] = None  # seconds
    traceback: Traceback = ""


Answer = Finished | Failed  # the last frame of a child
#: GREETING: the first frame of a zygote. FROM_CHILD: the frames that a child sends.
GREETING: TypeAdapter[Ready | Refused] = TypeAdapter(Annotated[Ready | Refused, Field(discriminator="kind")])
FROM_CHILD: TypeAdapter[Answer | Progress | LogLine | Emitted] = TypeAdapter(
    Annotated[Answer | Progress | LogLine | Emitted, Field(discriminator="kind")]
)


def encode(frame: BaseModel) -> bytes:
    """The bytes of `frame`. Raises FrameError when the frame has no JSON form, when it is too large, or when the other
    side could not read the JSON. (The JSON may be nested too deep, or have an integer of thousands of digits.)
    """
    try:
        body = frame.model_dump_json().encode()
        type(frame).model_validate_json(body)
    except ValueError as error:
        raise FrameError(f"it cannot be converted to JSON: {error}") from error
    if len(body) > MAX_FRAME:
        raise FrameError(f"{len(body)} bytes, at most {MAX_FRAME}")
    return LENGTH.pack(len(body)) + body


def length(header: bytes) -> int:
    """The number of bytes that follow `header`. Raises FrameError when the number exceeds the bound."""
    size = int(LENGTH.unpack(header)[0])
    if size > MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes, at most {MAX_FRAME}")
    return size


def send(fd: int, frame: BaseModel) -> None:
    """Write all of `frame` to a blocking descriptor. Raises FrameError as `encode` does."""
    data = memoryview(encode(frame))
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> bytes | None:
    """The body of the next frame; None when the other side has closed the connection."""
    header = _read_exactly(fd, LENGTH.size)
    return None if header is None else _read_exactly(fd, length(header))


# The next `size` bytes; None: the other side has closed the connection before it sent them.
def _read_exactly(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
