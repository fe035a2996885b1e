"""Reads objects of the store by signed URLs, for the API's clients."""

from __future__ import annotations

import hashlib

import httpx2

from leasehold.domain.errors import LeaseholdError


class OtherBytes(LeaseholdError):
    """The store sent other bytes than those that were stored."""


def check_answer(answer: httpx2.Response) -> None:
    """Raises httpx2.HTTPStatusError for an answer that is no success. The error's message leaves out the URL, because
    anybody who reads a signed URL can use it. (The message of httpx2's own `raise_for_status` has the URL.)
    """
    if not answer.is_success:
        sentence = f"the store answered {answer.status_code}"
        raise httpx2.HTTPStatusError(sentence, request=answer.request, response=answer)


async def read_object(store: httpx2.AsyncClient, url: str, *, size: int, sha256: str) -> bytes:
    """Read an object, and check its size and SHA-256. Stop once more than `size` bytes have come, because a long answer
    could fill the memory.

    Raises OtherBytes, and httpx2.HTTPError when the store does not answer or refuses.
    """
    content = bytearray()
    async with store.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer:
        check_answer(answer)
        async for piece in answer.aiter_raw():  # not decompressed, because a small answer could become a huge one
            content += piece
            if len(content) > size:
                raise OtherBytes("the store sent more bytes than were stored")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise OtherBytes("the store sent bytes with another SHA-256")
    return bytes(content)
