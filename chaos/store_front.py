"""A proxy before the S3 server: it makes the HTTP faults of a store, and adds conditional puts, which rclone lacks.

Before a put with `If-None-Match: *` or `If-Match` it looks at the file that rclone serves, one put at a time for each
key. So the platform runs against a store that refuses to overwrite, as S3 does.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from leasehold.embedded.s3 import S3

_MAX_BYTES = 64 * 1024 * 1024
_CHUNK = 4096
#: A worker begins and ends a multipart upload within this time.
_UPLOAD_SECONDS = 20.0
_UPLOAD_ID = re.compile("<UploadId>([^<]+)</UploadId>")
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "expect", "date", "server"}


class Trouble(StrEnum):
    ERROR = "error"  # 500 or 503 instead of an answer
    SLOW = "slow"  # 16 KB a second
    CUT = "cut"  # the connection ends in the middle of an answer
    CORRUPT = "corrupt"  # one byte of a step's object is changed
    REFUSE = "refuse"  # 412 or 409 to a conditional put, even if its condition holds
    HANG = "hang"  # no answer at all, until the trouble is over
    LATE = "late"  # 503 or 500 after the write was done
    MUTE = "mute"  # the write is done, and the connection ends before the first byte of an answer
    DENY = "deny"  # 412 or 409 to a conditional put after the write was done
    OVERWRITE = "overwrite"  # as LATE; then the repeated put replaces the object in spite of its condition


_AFTER_A_WRITE = {Trouble.LATE, Trouble.MUTE, Trouble.DENY, Trouble.OVERWRITE}


@dataclass
class StoreFaults:
    """The present trouble, the share of the requests that it hits, and how many it has hit.

    `overwritten`: keys of objects that a put has replaced in spite of its `If-None-Match: *`.
    `excused`: ids of multipart uploads that may be open at the end of a run, because their worker could not end them:
    the trouble hit the answer with the id, or the worker's request to end the upload. Housekeeping ends such uploads
    once they are old.
    """

    trouble: Trouble | None = None
    share: float = 0.0
    fired: int = 0
    hold_put: str = ""  # the next put whose key contains this text waits for `released`
    held_of: str = ""  # the client of that put
    held: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    overwritten: set[str] = field(default_factory=set)
    excused: set[str] = field(default_factory=set)

    def begin(self, trouble: Trouble, share: float) -> None:
        self.trouble, self.share, self.fired = trouble, share, 0
        self.over.clear()

    def heal(self) -> None:
        self.trouble, self.hold_put = None, ""
        self.over.set()
        self.released.set()


class StoreFront:
    """The proxy. `ports`: name of a client -> its port. By the port the proxy knows the client of each request."""

    def __init__(self, s3: S3, seed: int = 0) -> None:
        self.faults = StoreFaults()
        self.ports: dict[str, int] = {}
        self._s3 = s3
        self._rng = random.Random(seed)  # noqa: S311 - which request is hit
        self._begun: dict[str, float] = {}  # id of a multipart upload -> when it began
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._runner: web.AppRunner | None = None
        self._client: aiohttp.ClientSession | None = None

    async def open(self, clients: Sequence[str]) -> None:
        """Listen on a port of its own for each client."""
        self._client = aiohttp.ClientSession(auto_decompress=False)
        application = web.Application(client_max_size=_MAX_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        for name in clients:
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            self.ports[name] = self._runner.addresses[-1][1]

    async def close(self) -> None:
        self.faults.heal()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._client is not None:
            await self._client.close()

    def excuse_cut(self, cuts: Iterable[tuple[float, float]]) -> None:
        """Excuse the uploads that were open while a link to the store was cut: their worker may not know the id, or
        could not send its request to end the upload. `cuts`: (since, until), in seconds since 1970.
        """
        spans = list(cuts)
        self.faults.excused.update(
            upload_id
            for upload_id, at in self._begun.items()
            if any(since < at + _UPLOAD_SECONDS and at < until for since, until in spans)
        )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        trouble = self._trouble_of(request)
        if trouble is not None and (upload_id := request.query.get("uploadId")):
            self.faults.excused.add(upload_id)
        if trouble is Trouble.HANG:
            self.faults.fired += 1
            await self.faults.over.wait()
        if trouble is Trouble.ERROR:
            return self._fail()
        if trouble is Trouble.REFUSE:
            return self._refuse()
        if request.method == "PUT" and self.faults.hold_put and self.faults.hold_put in request.path:
            await self._hold(request)
        if not _makes_object(request):
            return await self._forward(request, body, trouble)
        async with self._locks[request.path]:
            if not await asyncio.to_thread(self._may_put, request):
                if trouble is not Trouble.OVERWRITE:
                    return _refused(HTTPStatus.PRECONDITION_FAILED)
                self.faults.fired += 1  # the object exists, and this put replaces it
                self.faults.overwritten.add(_key(request))
                trouble = None
            return await self._forward(request, body, trouble)

    def _fail(self) -> web.Response:
        self.faults.fired += 1
        return web.Response(status=self._rng.choice((500, 503)))

    def _refuse(self) -> web.Response:
        self.faults.fired += 1
        return _refused(self._rng.choice((HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT)))

    def _trouble_of(self, request: web.Request) -> Trouble | None:
        """The trouble that hits the request, if any."""
        trouble = self.faults.trouble
        if trouble is None or self._rng.random() >= self.faults.share or not _can_hit(trouble, request):
            return None
        return trouble

    async def _hold(self, request: web.Request) -> None:
        assert request.transport is not None
        port = request.transport.get_extra_info("sockname")[1]
        self.faults.hold_put = ""  # hold only one
        self.faults.held_of = next(client for client, own_port in self.ports.items() if own_port == port)
        self.faults.released.clear()
        self.faults.held.set()
        await self.faults.released.wait()

    def _may_put(self, request: web.Request) -> bool:
        """Whether the request's condition holds; True without a condition."""
        file = self._s3.directory / "buckets" / unquote(request.path.lstrip("/"))
        exists = file.is_file()
        if request.headers.get("If-None-Match") == "*":
            return not exists
        if wanted_etag := request.headers.get("If-Match"):
            return exists and wanted_etag.strip('"') == _etag(file)
        return True

    async def _forward(self, request: web.Request, body: bytes, trouble: Trouble | None) -> web.StreamResponse:
        assert self._client is not None
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
        target = URL(f"http://127.0.0.1:{self._s3.port}{request.raw_path}", encoded=True)
        try:
            async with self._client.request(
                request.method, target, headers=headers, data=io.BytesIO(body) if body else None,
                skip_auto_headers=["Content-Type"], allow_redirects=False,
            ) as upstream:  # fmt: skip
                answer_body = await upstream.read()
                if _begins_upload(request):
                    ids = _UPLOAD_ID.findall(answer_body.decode())
                    self._begun |= dict.fromkeys(ids, time.time())
                    self.faults.excused.update(ids if trouble is not None else ())
                if trouble in _AFTER_A_WRITE and upstream.status < HTTPStatus.BAD_REQUEST:
                    return self._wrong_answer(request, trouble)
                return await self._answer(request, upstream, answer_body, trouble)
        except aiohttp.ClientConnectionError:
            return web.Response(status=HTTPStatus.BAD_GATEWAY)

    def _wrong_answer(self, request: web.Request, trouble: Trouble | None) -> web.Response:
        """The wrong answer to a write that was done."""
        if trouble is Trouble.DENY:
            return self._refuse()
        if trouble is Trouble.OVERWRITE:  # `fired` counts it when the write is repeated
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE)
        answer = self._fail()
        if trouble is Trouble.MUTE:
            assert request.transport is not None
            request.transport.abort()
        return answer

    async def _answer(
        self, request: web.Request, upstream: aiohttp.ClientResponse, body: bytes, trouble: Trouble | None
    ) -> web.StreamResponse:
        headers = [(name, value) for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP]
        answer = web.StreamResponse(status=upstream.status)
        answer.headers.extend(headers)
        if request.method != "HEAD":
            answer.content_length = len(body)
        if trouble in (Trouble.CORRUPT, Trouble.SLOW, Trouble.CUT) and body:
            self.faults.fired += 1
        if trouble is Trouble.CORRUPT and body:
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        await answer.prepare(request)
        for start in range(0, len(body), _CHUNK):
            await answer.write(body[start : start + _CHUNK])
            if trouble is Trouble.CUT:
                assert request.transport is not None
                request.transport.abort()
                break
            if trouble is Trouble.SLOW:
                await asyncio.sleep(_CHUNK / 16_384)
        return answer


def _begins_upload(request: web.Request) -> bool:
    return request.method == "POST" and "uploads" in request.query


def _makes_object(request: web.Request) -> bool:
    """Whether the request is a put, or ends a multipart upload."""
    return request.method == "PUT" or (request.method == "POST" and "uploadId" in request.query)


def _can_hit(trouble: Trouble, request: web.Request) -> bool:
    if trouble is Trouble.CORRUPT:  # it spares originals: no row has their digests, so the platform could not notice
        return request.method == "GET" and "original" not in request.path and "list-type" not in request.query_string
    if trouble is Trouble.OVERWRITE and "/probe/" in request.path:
        return False  # the process would learn that the store does not refuse, and would not rely on it
    if trouble in (Trouble.REFUSE, Trouble.DENY, Trouble.OVERWRITE):
        return request.method == "PUT" and "If-None-Match" in request.headers
    if trouble in _AFTER_A_WRITE:
        return request.method not in {"GET", "HEAD"}
    return True


def _key(request: web.Request) -> str:
    """The key of the request's object: the path without the bucket."""
    return unquote(request.path.lstrip("/")).partition("/")[2]


def _refused(status: HTTPStatus) -> web.Response:
    code = "PreconditionFailed" if status is HTTPStatus.PRECONDITION_FAILED else "ConditionalRequestConflict"
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>no</Message></Error>'
    return web.Response(status=status, text=text, content_type="application/xml")


def _etag(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
