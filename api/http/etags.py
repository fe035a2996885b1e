"""Whether a client knows an answer already."""

from __future__ import annotations

import hashlib


def weak(version: str) -> str:
    """A weak ETag for the state's `version`: the bytes may differ, in a URL's signature for example."""
    return f'W/"{hashlib.sha256(version.encode()).hexdigest()[:32]}"'


def matches(if_none_match: str | None, etag: str) -> bool:
    """RFC 9110's weak comparison."""
    if if_none_match is None:
        return False
    asked = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in asked or etag.removeprefix("W/") in asked
