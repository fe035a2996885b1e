"""Makes and compares ETags. By an ETag, a GET endpoint finds out whether the client already has the current answer."""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeAlias

from fastapi import Query

#: The parameter of a long poll.
WaitSeconds: TypeAlias = Annotated[
    float,
    Query(
        ge=0,
        le=30,
        allow_inf_nan=False,
        description="Seconds to wait for a change while the job is unfinished. A client whose `If-None-Match` names an "
        "older state gets the current state immediately.",
    ),
]


def weak_etag(version: str | bytes) -> str:
    """A weak ETag. `version`: identifies a state, or is the whole answer. The ETag is weak because two answers with the
    same state may differ in their bytes, for example in the signature of a URL.
    """
    return f'W/"{hashlib.sha256(version.encode() if isinstance(version, str) else version).hexdigest()[:32]}"'


def may_be_current(if_none_match: str | None, etag: str) -> bool:
    """Whether the client may have the current answer already, because it sends the ETag of this answer, or no ETag. If
    so, a long poll waits for a change; otherwise the API answers immediately.
    """
    return if_none_match is None or matches(if_none_match, etag)


def matches(if_none_match: str | None, etag: str) -> bool:
    """Whether one of the client's ETags is `etag`, by RFC 9110's weak comparison."""
    if if_none_match is None:
        return False
    client_tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in client_tags or etag.removeprefix("W/") in client_tags
