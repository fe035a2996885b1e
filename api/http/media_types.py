"""Which media type a request's body has to have: 415 says so before anything tries to read another."""

from __future__ import annotations

from leasehold.domain.errors import Unsupported

JSON = "application/json"
FORM = "multipart/form-data"


def is_json(content_type: str) -> bool:
    """`application/json`, or a type that is JSON by its suffix (RFC 6839)."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and "/" not in subtype and (subtype == "json" or subtype.endswith("+json"))


def wrong_type(accepted: str) -> Unsupported:
    """`Accept` in the answer names what the address takes (RFC 9110, 15.5.16)."""
    said = f"Send the body as {accepted}, and say so in Content-Type."
    return Unsupported("unsupported_media_type", said, headers={"Accept": accepted})
