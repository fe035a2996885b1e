"""The media types of request bodies. A wrong type is refused (415) before any parser reads the body."""

from __future__ import annotations

from leasehold.domain.errors import Unsupported

JSON = "application/json"
FORM = "multipart/form-data"


def is_json(content_type: str) -> bool:
    """Whether the type is `application/json`, or is JSON by its suffix `+json` (RFC 6839)."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and "/" not in subtype and (subtype == "json" or subtype.endswith("+json"))


def wrong_type(accepted: str) -> Unsupported:
    """The error 415. Its `Accept` header names the type to send (RFC 9110, 15.5.16)."""
    message = f"Send the body as {accepted}, with this Content-Type."
    return Unsupported("unsupported_media_type", message, headers={"Accept": accepted})
