"""A client of the HTTP API that is cut off again and again: it repeats each request, with its key, until an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx2

#: How long a client repeats what was not answered: both APIs of a busy machine may be starting for half of that.
PATIENCE = 40.0
ANSWER_SECONDS = 6.0
AGAIN_SECONDS = 0.3
_IN_FLIGHT = "idempotency_key_in_flight"
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status`: of the last answer, 0 when the outcome is unknown. `answered`: the bodies of all 2xx, in order."""

    status: int
    body: dict[str, Any]
    asked_at: float
    answered_at: float
    tries: int
    answered: tuple[dict[str, Any], ...] = ()

    @property
    def good(self) -> bool:
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    @property
    def code(self) -> str:
        """Of the problem that the last answer is; "" for another answer."""
        return str(self.body.get("code", ""))

    @property
    def answer(self) -> str:
        """As `Request.answer` says it."""
        return "accepted" if self.good else "refused" if self.status else "unknown"


class Client:
    """One tenant's client. Each try goes to the next of the APIs."""

    def __init__(self, http: httpx2.AsyncClient, urls: list[str], api_key: str) -> None:
        self._http = http
        self._urls = urls
        self._authorization = {"Authorization": f"Bearer {api_key}"}
        self._turn = 0

    def url(self) -> str:
        """The next API's."""
        self._turn += 1
        return self._urls[self._turn % len(self._urls)]

    async def ask(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        key: str = "",
        again: bool = False,
        patience: float = PATIENCE,
        **sent: Any,
    ) -> Outcome:
        """Send until there is an answer that is final. `again`: send it once more after that, as a client may.

        `sent`: as httpx2 takes it, for what is no JSON. A `patience` of 0 is a single try.
        """
        headers = self._authorization | ({"Idempotency-Key": key} if key else {})
        if body is not None:
            sent["json"] = body
        asked_at, until = time.time(), time.monotonic() + patience
        tries, final = 0, None
        answered: list[dict[str, Any]] = []
        while True:
            tries += 1
            answer = await self._try(method, path, headers, sent)
            if answer is not None and not _is_passing(answer):
                final = answer
                if not answer.is_success:
                    break
                answered.append(_body_of(answer))
                if not again:
                    break
                again = False
            elif answered or time.monotonic() > until:
                break
            else:
                await asyncio.sleep(AGAIN_SECONDS)
        status, body = (0, {}) if final is None else (final.status_code, _body_of(final))
        return Outcome(status, body, asked_at, time.time(), tries, tuple(answered))

    async def _try(
        self, method: str, path: str, headers: Mapping[str, str], sent: Mapping[str, Any]
    ) -> httpx2.Response | None:
        try:
            return await self._http.request(method, f"{self.url()}{path}", headers=dict(headers), **sent)
        except httpx2.HTTPError:
            return None

    async def put(self, url: str, content: bytes, content_type: str) -> bool:
        """Upload to a signed URL, until the store has taken it."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                answer = await self._http.put(url, content=content, headers={"Content-Type": content_type})
            except httpx2.HTTPError:
                answer = None
            if answer is not None and answer.is_success:
                return True
            await asyncio.sleep(AGAIN_SECONDS)
        return False

    # --- events, as a client sees them that is cut off again and again

    async def follow(self, path: str, pieces: list[tuple[int, list[int]]], most: int = 3) -> None:
        """Read a job's events in pieces of `most`, resuming, until the job has ended. `pieces` gets each cursor with
        the numbers after it.
        """
        cursor, over = 0, False
        while not over:
            seen: list[int] = []
            try:
                over = await self._read_some(path, cursor, seen, most)
            except httpx2.HTTPError:
                await asyncio.sleep(AGAIN_SECONDS)
            if seen:
                pieces.append((cursor, seen))
                cursor = seen[-1]

    async def _read_some(self, path: str, cursor: int, seen: list[int], most: int) -> bool:
        headers = self._authorization | {"Last-Event-ID": str(cursor)}
        async with self._http.stream("GET", f"{self.url()}{path}", headers=headers) as stream:
            if stream.status_code == HTTPStatus.NO_CONTENT:
                return True
            if stream.status_code != HTTPStatus.OK:
                await asyncio.sleep(AGAIN_SECONDS)
                return False
            async for line in stream.aiter_lines():
                if line.startswith("id:"):
                    seen.append(int(line[3:]))
                    if len(seen) == most:
                        break
        return False


def _body_of(answer: httpx2.Response) -> dict[str, Any]:
    if not answer.content or "json" not in answer.headers.get("content-type", ""):
        return {}
    body = answer.json()
    return dict(body) if isinstance(body, dict) else {}


def _is_passing(answer: httpx2.Response) -> bool:
    """Whether another try may be answered otherwise."""
    if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR or answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return True
    return answer.status_code == HTTPStatus.CONFLICT and _body_of(answer).get("code") == _IN_FLIGHT
