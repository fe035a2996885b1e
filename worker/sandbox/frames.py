"""What a worker and its child processes say to each other: length-prefixed JSON, never pickle.

A child runs code that a hostile picture may have taken over. So the parent reads a bounded number of bytes
and checks them against these models, and a child can make it believe things but not do things.
"""

from __future__ import annotations

import os
import struct
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

LENGTH = struct.Struct(">I")
#: Larger frames are refused by whoever would read them.
MAX_FRAME = 1024 * 1024
MAX_TEXT = 2000
#: A file of this name beside a run's directory asks its handler to stop.
CANCEL = "cancel"
MAX_TRACEBACK = 16 * 1024
MAX_AFTER = 366 * 86400.0  # seconds

#: The descriptor of the protocol in a child.
CHANNEL = 3
#: What a worker asks of a zygote, and its answer: a process id to reap and its status, or FORK and a process id.
NUMBER = struct.Struct("=i")
FORK = 0

#: The status of a child that could not get memory: saying so in a frame might need some.
OUT_OF_MEMORY = 86

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Traceback = Annotated[str, Field(max_length=MAX_TRACEBACK)]


class FrameError(Exception):
    """The other side sent something that is no frame."""


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Place(_Frame):
    """Parent to child, first: the only files that it will read, and the only directory that it will write to."""

    files: list[str]
    directory: str


class Run(_Frame):
    """Parent to child, then: run this step now, in `directory`, on `files`."""

    pipeline: str
    step: str
    params: dict[str, Any]
    files: dict[str, str]
    directory: str
    item: Any = None


class Ready(_Frame):
    """Zygote to worker, once: the handlers are loaded. `threads`: how many it has; a fork takes only one along."""

    kind: Literal["ready"] = "ready"
    isolation: Text
    threads: int


class Refused(_Frame):
    """Zygote to worker, once, instead of Ready: what is wrong with the declarations."""

    kind: Literal["refused"] = "refused"
    reason: Text
    traceback: Traceback = ""


class Progress(_Frame):
    """Child to parent, any number of times before the answer."""

    kind: Literal["progress"] = "progress"
    percent: Annotated[float, Field(ge=0, le=100)]
    summary: Annotated[str, Field(max_length=500)] = ""


class Made(_Frame):
    """A file, by its path relative to the run's directory."""

    path: Annotated[str, Field(max_length=1000)]
    content_type: Annotated[str, Field(max_length=200)]


class Finished(_Frame):
    kind: Literal["finished"] = "finished"
    files: Annotated[dict[Name, Made], Field(max_length=256)]
    value: dict[str, Any] | None = None


class Failed(_Frame):
    """The handler raised: `error` is the class of errors.py that the parent raises in its turn."""

    kind: Literal["failed"] = "failed"
    error: Literal["permanent", "retryable", "unforeseen", "cancelled"]
    code: Name
    message: Text
    after: Annotated[float | None, Field(ge=0, le=MAX_AFTER)] = None  # seconds
    traceback: Traceback = ""


Answer = Finished | Failed
GREETING: TypeAdapter[Ready | Refused] = TypeAdapter(Annotated[Ready | Refused, Field(discriminator="kind")])
SAID: TypeAdapter[Answer | Progress] = TypeAdapter(Annotated[Answer | Progress, Field(discriminator="kind")])


def encode(frame: BaseModel) -> bytes:
    """Put `frame` into bytes. Raises FrameError when it has no JSON form or is too large."""
    try:
        body = frame.model_dump_json().encode()
    except ValueError as error:
        raise FrameError(f"no JSON form: {error}") from error
    if len(body) > MAX_FRAME:
        raise FrameError(f"{len(body)} bytes, at most {MAX_FRAME}")
    return LENGTH.pack(len(body)) + body


def length(header: bytes) -> int:
    """How many bytes follow `header`. Raises FrameError when they are too many."""
    size = int(LENGTH.unpack(header)[0])
    if size > MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes, at most {MAX_FRAME}")
    return size


def send(fd: int, frame: BaseModel) -> None:
    """Write all of `frame` to a blocking descriptor. Raises FrameError as `encode`."""
    data = memoryview(encode(frame))
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> bytes | None:
    """Read the next frame's body; None when the other side has closed."""
    header = _exactly(fd, LENGTH.size)
    return None if header is None else _exactly(fd, length(header))


def _exactly(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
