"""Limits how often an API key may call the conversion endpoints. PostgreSQL counts the calls of all API processes."""

from __future__ import annotations

from typing import Literal

from fastapi import Request

from leasehold.api.process.keyring import Caller
from leasehold.api.process.replica_reads import on_primary
from leasehold.api.process.services import Services
from leasehold.domain.errors import TooMany
from leasehold.limits import rates


async def check_rate_once(
    request: Request, services: Services, caller: Caller, operation: Literal["posts", "reads"]
) -> dict[str, str]:
    """Does the same as `check_rate`, but charges a request only once, even if this function is called twice for the
    request. An endpoint that may read from a standby calls it twice if the standby fails, because the endpoint then
    runs again on the primary.
    """
    state = request.scope.setdefault("state", {})
    if "conversion_rate" not in state:
        state["conversion_rate"] = await check_rate(services, caller, operation)
    rate_fields: dict[str, str] = state["conversion_rate"]
    return rate_fields


async def check_rate(services: Services, caller: Caller, operation: Literal["posts", "reads"]) -> dict[str, str]:
    """Charge one request to the caller's key. `operation`: whether the request is a POST or a read, because the two
    have limits of their own. Returns the RateLimit headers. If the installation sets no such limit, nothing is charged,
    and there are no headers. Raises TooMany `rate_limited`.
    """
    settings = services.settings
    per_minute = settings.conversion_posts_per_key if operation == "posts" else settings.conversion_reads_per_key
    if per_minute is None:
        return {}
    with on_primary():  # an endpoint may read from a standby, but the charge writes a row
        async with services.pool.acquire() as connection:
            quota = await rates.take(connection, f"conversion:{operation}:{caller.quota_key}", per_minute)
    policy = f"conversion-{operation}"
    if not quota.allowed:
        message = f"At most {per_minute} {operation} of conversions a minute."
        raise TooMany(
            "rate_limited", message, policy=policy, at_most=per_minute, window=60, retry_after=quota.wait_seconds
        )
    return {
        "RateLimit-Policy": f'"{policy}";q={per_minute};w=60',
        "RateLimit": f'"{policy}";r={quota.remaining};t=60',
    }
