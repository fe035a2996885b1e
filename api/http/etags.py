"""ETags: whether the client already has the current answer."""

from __future__ import annotations

import hashlib


def weak(version: str | bytes) -> str:
    """A weak ETag of the state's `version`, or of the whole answer. Weak, because the bytes may differ: in
    the signature of a URL, for example.
    """
    return f'W/"{hashlib.sha256(version.encode() if isinstance(version, str) else version).hexdigest()[:32]}"'


def matches(if_none_match: str | None, etag: str) -> bool:
    """RFC 9110's weak comparison."""
    if if_none_match is None:
        return False
    client_tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in client_tags or etag.removeprefix("W/") in client_tags
