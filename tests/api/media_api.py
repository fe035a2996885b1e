"""A client of the media endpoints, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2

#: A header is enough for the API; the rest is the worker's business.
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(64)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


@dataclass
class Ticket:
    media_id: str
    upload_url: str
    original_key: str

    @property
    def completion(self) -> dict[str, Any]:
        return {"media_id": self.media_id, "original_key": self.original_key}


@dataclass
class MediaApi:
    client: httpx2.AsyncClient

    async def ask(self, **body: Any) -> httpx2.Response:
        return await self.client.post("/upload-url", json={"content_type": "image/jpeg", "file_name": "a.jpg"} | body)

    async def ticket(self, **body: Any) -> Ticket:
        answer = await self.ask(**body)
        assert answer.status_code == 201, answer.text
        said = answer.json()
        return Ticket(said["media_id"], said["upload_url"], said["original_key"])

    async def upload(self, data: bytes = JPEG, content_type: str = "image/jpeg", **body: Any) -> Ticket:
        ticket = await self.ticket(content_type=content_type, **body)
        stored = await put(ticket.upload_url, data, content_type)
        assert stored.status_code == 200, stored.text
        return ticket

    async def complete(self, ticket: Ticket, **body: Any) -> httpx2.Response:
        return await self.client.post("/complete-upload", json=ticket.completion | body)

    async def submitted(self, **body: Any) -> Ticket:
        """A picture that was uploaded and taken in."""
        ticket = await self.upload()
        answer = await self.complete(ticket, **body)
        assert answer.status_code == 202, answer.text
        return ticket

    async def look(self, ticket: Ticket, **options: Any) -> httpx2.Response:
        return await self.client.get(f"/media/{ticket.media_id}", **options)


async def put(url: str, data: bytes, content_type: str) -> httpx2.Response:
    """What the client's browser or app sends straight to the store."""
    async with httpx2.AsyncClient(timeout=40) as client:
        return await client.put(url, content=data, headers={"Content-Type": content_type})


#: The pattern of an instant in a sentence.
TO_THE_SECOND = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"


def problem(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """The problem in `answer`, which must be one, complete, of that status and code."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    said: dict[str, Any] = answer.json()
    assert (answer.status_code, said["status"], said["code"]) == (status, status, code), said
    assert said["type"] == f"urn:leasehold:problem:{code}"
    assert said["title"]
    assert said["detail"]
    assert said["request_id"] == answer.headers["x-request-id"]
    return said
