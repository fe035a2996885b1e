"""Signs requests to Volcengine's open API, for the provider Jimeng: HMAC-SHA256 over a canonical request.

https://www.volcengine.com/docs/6369/67269 defines the signature. It is AWS Signature Version 4 with three differences:
the signing key starts from the secret key without a prefix, the scope ends in `request`, and the date header is X-Date.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote

_ALGORITHM = "HMAC-SHA256"
_SIGNED_HEADERS = "content-type;host;x-content-sha256;x-date"


def signed_headers(
    access_key: str,
    secret_key: str,
    *,
    host: str,
    query: Mapping[str, str],
    body: bytes,
    region: str,
    service: str,
    now: datetime,
) -> dict[str, str]:
    """The headers of a signed POST to `/`. The signature also covers the header `host`. But this header is not among
    the returned headers, because the HTTP client itself sends it.
    """
    instant = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    day = instant[:8]
    digest = hashlib.sha256(body).hexdigest()
    headers = {
        "content-type": "application/json",
        "host": host,
        "x-content-sha256": digest,
        "x-date": instant,
    }
    canonical = "\n".join(
        (
            "POST",
            "/",
            canonical_query(query),
            *(f"{name}:{headers[name]}" for name in _SIGNED_HEADERS.split(";")),
            "",  # an empty line ends the headers
            _SIGNED_HEADERS,
            digest,
        )
    )
    scope = f"{day}/{region}/{service}/request"
    to_sign = "\n".join((_ALGORITHM, instant, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = secret_key.encode()
    for part in (day, region, service, "request"):
        key = _mac(key, part)
    credential = f"{access_key}/{scope}"
    authorization = (
        f"{_ALGORITHM} Credential={credential}, SignedHeaders={_SIGNED_HEADERS}, Signature={_mac(key, to_sign).hex()}"
    )
    return {name: value for name, value in headers.items() if name != "host"} | {"authorization": authorization}


def canonical_query(query: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))


def _mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
