"""A client of the HTTP API. Faults cut its connections, so it repeats each request until it gets an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx2

#: For how many seconds a client repeats a request without an answer. On a busy machine both APIs may need half of this
#: to start.
PATIENCE_SECONDS = 40.0
ANSWER_SECONDS = 6.0
#: The pause before a request is repeated.
AGAIN_SECONDS = 0.3
_IN_FLIGHT = "idempotency_key_in_flight"
_NO_ENDPOINT = "not_found"
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request with all its tries. `status`: of the last answer; 0: none came. `answered`: the bodies
    of all 2xx answers, in order.
    """

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
        """The code of the problem in the last answer; "" if the answer is not a problem."""
        return str(self.body.get("code", ""))

    @property
    def is_gone(self) -> bool:
        """Whether the last answer says that the thing is not there. A release that lacks the endpoint answers 404 too,
        with the code `not_found`.
        """
        return self.status == HTTPStatus.NOT_FOUND and self.code != _NO_ENDPOINT

    @property
    def answer(self) -> str:
        """The value of `Request.answer`."""
        return "accepted" if self.good else "refused" if self.status else "unknown"


class Client:
    """One tenant's client. Each try goes to the next of the APIs."""

    def __init__(self, http: httpx2.AsyncClient, urls: list[str], api_key: str) -> None:
        self._http = http
        self._urls = urls
        self._authorization = {"Authorization": f"Bearer {api_key}"}
        self._turn = 0

    def url(self) -> str:
        """The URL of the next API."""
        self._turn += 1
        return self._urls[self._turn % len(self._urls)]

    async def request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        key: str = "",
        again: bool = False,
        patience: float = PATIENCE_SECONDS,
        **content: Any,
    ) -> Outcome:
        """Send the request until its answer is final. `again`: after a success send it once more, as clients may do.

        `patience`: for how many seconds to repeat it; 0: send it once. `content`: arguments of httpx2 for a body that
        is not JSON.
        """
        headers = self._authorization | ({"Idempotency-Key": key} if key else {})
        if body is not None:
            content["json"] = body
        asked_at, until = time.time(), time.monotonic() + patience
        final, tries = await self._until_final(method, path, headers, content, until)
        answers = [] if final is None else [final]
        if again and final is not None and final.is_success:
            second, more_tries = await self._until_final(method, path, headers, content, until=0.0)
            tries += more_tries
            answers += [] if second is None else [second]
        status, body = (answers[-1].status_code, _body_of(answers[-1])) if answers else (0, {})
        accepted = tuple(_body_of(answer) for answer in answers if answer.is_success)
        return Outcome(status, body, asked_at, time.time(), tries, accepted)

    async def _until_final(
        self, method: str, path: str, headers: Mapping[str, str], content: Mapping[str, Any], until: float
    ) -> tuple[httpx2.Response | None, int]:
        """Repeat the request until a final answer, or until `until` (of the monotonic clock). Returns the final answer
        or None, and the number of tries.
        """
        tries = 0
        while True:
            tries += 1
            answer = await self._try(method, path, headers, content)
            if answer is not None and not _is_temporary(answer):
                return answer, tries
            if time.monotonic() > until:
                return None, tries
            await asyncio.sleep(AGAIN_SECONDS)

    async def _try(
        self, method: str, path: str, headers: Mapping[str, str], content: Mapping[str, Any]
    ) -> httpx2.Response | None:
        try:
            return await self._http.request(method, f"{self.url()}{path}", headers=dict(headers), **content)
        except httpx2.HTTPError:
            return None

    async def put(self, url: str, content: bytes, content_type: str) -> bool:
        """Upload to a signed URL. Returns whether the store has accepted it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            try:
                answer = await self._http.put(url, content=content, headers={"Content-Type": content_type})
            except httpx2.HTTPError:
                answer = None
            if answer is not None and answer.is_success:
                return True
            await asyncio.sleep(AGAIN_SECONDS)
        return False

    # --- the events of a job

    async def follow(self, path: str, pieces: list[tuple[int, list[int]]], at_most: int = 3) -> None:
        """Read a job's events until the job has ended. Disconnect and resume after each `at_most` events. Append to
        `pieces` each cursor, with the numbers of the events that came after it.
        """
        cursor, has_ended = 0, False
        while not has_ended:
            numbers: list[int] = []
            try:
                has_ended = await self._read_some(path, cursor, numbers, at_most)
            except httpx2.HTTPError:
                await asyncio.sleep(AGAIN_SECONDS)
            if numbers:
                pieces.append((cursor, numbers))
                cursor = numbers[-1]

    async def _read_some(self, path: str, cursor: int, numbers: list[int], at_most: int) -> bool:
        """Append the numbers of the next events. Returns whether the job has ended and all its events were read."""
        headers = self._authorization | {"Last-Event-ID": str(cursor)}
        async with self._http.stream("GET", f"{self.url()}{path}", headers=headers) as stream:
            if stream.status_code == HTTPStatus.NO_CONTENT:
                return True
            if stream.status_code != HTTPStatus.OK:
                await asyncio.sleep(AGAIN_SECONDS)
                return False
            async for line in stream.aiter_lines():
                if line.startswith("id:"):
                    numbers.append(int(line[3:]))
                    if len(numbers) == at_most:
                        break
        return False


def _body_of(answer: httpx2.Response) -> dict[str, Any]:
    if not answer.content or "json" not in answer.headers.get("content-type", ""):
        return {}
    body = answer.json()
    return dict(body) if isinstance(body, dict) else {}


def _is_temporary(answer: httpx2.Response) -> bool:
    """Whether a repetition of the request may get another answer."""
    if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR or answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return True
    return answer.status_code == HTTPStatus.CONFLICT and _body_of(answer).get("code") == _IN_FLIGHT
