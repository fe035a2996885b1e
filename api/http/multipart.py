"""Reads multipart/form-data from the socket, piece by piece, so that only one piece is in memory. The endpoints that
take a form call `events`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from leasehold.api.http.media_types import FORM, wrong_type
from leasehold.domain.errors import BodyTooSlow, Invalid

#: The headers of one part have at most this many bytes.
_MAX_HEADERS_BYTES = 8 * 1024
#: The longest name of a field or of a file, in bytes.
_MAX_NAME_BYTES = 4096
#: If a client sends nothing for this many seconds, the API refuses the form.
MAX_SILENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Begin:
    """A part begins. `file_name`: None if the part is a field, and not a file."""

    name: str
    file_name: str | None


@dataclass(frozen=True, slots=True)
class Data:
    """A piece of the part's content."""

    piece: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The part ends."""


Event: TypeAlias = Begin | Data | End


class _Events:
    """The callbacks that the parser calls. They collect the events of the piece that the parser is reading."""

    def __init__(self) -> None:
        self.collected_events: list[Event] = []
        self.is_complete = False  # the boundary that ends the form has arrived
        self._field = self._value = b""  # the header that is arriving
        self._disposition = b""
        self._header_bytes = 0

    def on_part_begin(self) -> None:
        self._field = self._value = self._disposition = b""
        self._header_bytes = 0

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += self._count_header_bytes(data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._count_header_bytes(data[start:end])

    def on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field = self._value = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, file_name = options.get(b"name"), options.get(b"filename")
        if name is None or max(len(name), len(file_name or b"")) > _MAX_NAME_BYTES:
            raise _malformed_form()
        self.collected_events.append(Begin(_decode(name), None if file_name is None else _unescape(_decode(file_name))))

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.collected_events.append(Data(data[start:end]))

    def on_part_end(self) -> None:
        self.collected_events.append(End())

    def on_end(self) -> None:
        self.is_complete = True

    def _count_header_bytes(self, piece: bytes) -> bytes:
        self._header_bytes += len(piece)
        if self._header_bytes > _MAX_HEADERS_BYTES:
            raise _malformed_form()
        return piece


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _unescape(name: str) -> str:
    """The name as the user wrote it. Browsers escape three characters (HTML, multipart/form-data encoding)."""
    for escaped, plain in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        name = name.replace(escaped, plain)
    return name


def _malformed_form() -> HTTPException:
    return HTTPException(400)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The pieces of the body as they arrive. Raises BodyTooSlow if the client sends nothing for MAX_SILENT_SECONDS."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(MAX_SILENT_SECONDS):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise form_too_slow() from None
        yield piece


def form_too_slow() -> BodyTooSlow:
    return BodyTooSlow("body_too_slow", "The form did not arrive in time.")


async def events(request: Request, max_bytes: int) -> AsyncIterator[Event]:
    """Parse the request's form, event by event.

    Raises Unsupported for another media type; HTTPException(400) for a malformed or truncated form; BodyTooSlow for a
    silent client; Invalid("too_large") beyond `max_bytes`. The size is the number of bytes that arrive. The
    Content-Length does not count, because a client may send any number there.
    """
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if media_type != FORM.encode():
        raise wrong_type(FORM)
    if not boundary:
        raise _malformed_form()
    callbacks = _Events()
    names = (
        "part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "part_end", "end",
    )  # fmt: skip
    received_bytes = 0
    try:
        parser = MultipartParser(boundary, {f"on_{name}": getattr(callbacks, f"on_{name}") for name in names})  # type: ignore[arg-type]  # its callbacks are a TypedDict
        async for piece in _pieces(request):
            received_bytes += len(piece)
            if received_bytes > max_bytes:
                raise Invalid("too_large", f"A form has at most {max_bytes} bytes.")
            parser.write(piece)
            for event in callbacks.collected_events:
                yield event
            callbacks.collected_events.clear()
    except (FormParserError, ClientDisconnect) as error:
        raise _malformed_form() from error
    if not callbacks.is_complete:
        raise _malformed_form()
