"""How many of a thing a tenant may have: counted under a lock, in the transaction that adds the next one."""

from __future__ import annotations

from typing import Literal

from leasehold.db.database import Connection, lock_name
from leasehold.domain.errors import Conflict

#: What is bounded, and what counts of it. Each is the name of a table, too.
_COUNTS = {
    "template": "true",
    "schedule": "true",
    "webhook": "true",
    "gate": "declared",
    "api_key": "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())",
}
_WORDS = {
    "template": "versions of templates",
    "schedule": "schedules",
    "webhook": "webhooks",
    "gate": "limits",
    "api_key": "keys",
}


async def make_room(
    connection: Connection,
    thing: Literal["template", "schedule", "webhook", "gate", "api_key"],
    tenant_id: str,
    most: int,
) -> None:
    """Before one more is inserted, in the same transaction: whoever else adds one to this tenant waits for its end.

    Raises Conflict `too_many_templates`, `too_many_schedules`, `too_many_webhooks`, `too_many_limits`, `too_many_keys`.
    """
    await lock_name(connection, f"{thing} of {tenant_id}")
    counted = await connection.fetchval(
        f"SELECT count(*) FROM {thing} WHERE tenant_id = $1 AND {_COUNTS[thing]}", tenant_id
    )
    if counted >= most:
        code = "templates" if thing == "template" else _WORDS[thing]
        raise Conflict(f"too_many_{code}", f"A tenant has at most {most} {_WORDS[thing]}: delete one first.")
