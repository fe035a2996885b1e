"""What protects the fleet from a client: submissions a minute, by key and by tenant, and how deep a queue may get."""

from __future__ import annotations

from api.keyring import Caller
from api.services import Services
from leasehold import rates, run_reads
from leasehold.database import Connection
from leasehold.errors import TooMany
from leasehold.pipeline import Pipeline
from leasehold.transitions.jobs import external_queue

_SHED_SECONDS = 5.0


async def check_rate(services: Services, caller: Caller, count: int = 1) -> dict[str, str]:
    """The RateLimit fields of `count` submissions. Raises TooMany `rate_limited`, with when to come again."""
    settings = services.settings
    fields: dict[str, str] = {}
    for key, per_minute in (
        (f"submit:key:{caller.quota_key}", settings.submissions_per_key),
        (f"submit:tenant:{caller.tenant_id}", settings.submissions_per_tenant),
    ):
        if per_minute is None:
            continue
        async with services.pool.acquire() as connection:
            quota = await rates.take(connection, key, per_minute, count)
        if not quota.allowed:
            name = "key" if key.startswith("submit:key") else "tenant"
            raise TooMany(
                "rate_limited", f"At most {per_minute} submissions a minute a {name}.", retry_after=quota.wait
            )
        fields["RateLimit-Policy"] = f'"submissions";q={per_minute};w=60'
        fields["RateLimit"] = f'"submissions";r={quota.remaining};t=60'
    return fields


async def check_depth(services: Services, connection: Connection, tenant_id: str, pipeline: Pipeline) -> None:
    """Raises TooMany `queue_full`: what nobody could work off soon is better not accepted."""
    most = services.settings.queue_depth_limit
    if most is None:
        return
    for queue in {
        external_queue(tenant_id, step.queue) if step.external else step.queue
        for step in pipeline.steps
        if not step.needs
    }:
        if await run_reads.depth(connection, queue, most) >= most:
            said = f"{most} tasks wait in the queue already: try again later."
            raise TooMany("queue_full", said, retry_after=_SHED_SECONDS)
