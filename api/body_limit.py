"""How large a JSON body may be, and how long it may take to arrive: by bytes that came, not by what was announced."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.edge import Identity
from api.nesting import refusal
from api.problems import Problem

MOST_BYTES = 64 * 1024
#: Of the runs door, whose bodies carry payloads and schemas (leasehold.template says how large those may be).
MOST_BYTES_OF_RUNS = 512 * 1024
_RUNS = "/v1/"
#: What is read and thrown away of a body that is too large: a connection closed on a client that still sends is
#: reset, and the client never sees the answer.
_THROWN_AWAY_BYTES = 1024 * 1024
MOST_SECONDS = 20.0
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


def _too_large(most: int) -> Problem:
    said = f"A request body has at most {most} bytes here; pictures go to the upload URL."
    return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", said, {"Connection": "close"})


_TOO_SLOW = Problem(
    HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", "The request body did not arrive in time.", {"Connection": "close"}
)


class _Gone(Exception):
    pass


class BodyLimit:
    """Reads the body before the doors do. Doors that stream large bodies are left out by path in `streaming`."""

    def __init__(self, app: ASGIApp, *, most_depth: int, streaming: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._most_depth = most_depth
        self._streaming = streaming

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _BODILESS or scope["path"] in self._streaming:
            await self._app(scope, receive, send)
            return
        identity: Identity = scope["state"]["identity"]
        most = MOST_BYTES_OF_RUNS if scope["path"].startswith(_RUNS) else MOST_BYTES
        try:
            async with asyncio.timeout(MOST_SECONDS):
                body = await _read(scope, receive, most)
        except _Gone:
            return
        except TimeoutError:
            await _TOO_SLOW.response(identity.request_id)(scope, receive, send)
            return
        if body is None:
            await _too_large(most).response(identity.request_id)(scope, receive, send)
            return
        unfit = refusal(body, self._most_depth)
        if unfit is not None:
            await unfit.response(identity.request_id)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)


async def _read(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """The whole body, or None when it has more than `most` bytes."""
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and int(announced) > _THROWN_AWAY_BYTES:
        return None
    body = bytearray()
    came = 0
    while came <= _THROWN_AWAY_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        piece = message.get("body", b"")
        came += len(piece)
        if came <= most:
            body += piece
        if not message.get("more_body", False):
            return bytes(body) if came <= most else None
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
