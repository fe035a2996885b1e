"""Bounds on the number of a tenant's templates, schedules, webhooks, concurrency limits, API keys, people and saved
views.

The API calls `check_room` in the transaction that inserts a row, before the insert. `check_room` counts the rows
under a lock.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from leasehold.db.database import Connection, lock_name
from leasehold.domain.errors import Conflict

#: A table with a bound on its rows. The table `gate` has the concurrency limits. Only limits that an operator has
#: declared count. Limits that the code of pipelines declares do not count.
Thing: TypeAlias = Literal["template", "schedule", "webhook", "gate", "api_key", "person", "saved_view"]

#: Table -> SQL condition of the rows that count.
_CONDITIONS = {
    "template": "true",
    "schedule": "true",
    "webhook": "true",
    "gate": "declared",
    "person": "true",
    "saved_view": "true",
    "api_key": "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())",
}
#: Table -> the plural word for its rows in error messages.
_PLURALS = {
    "template": "versions of templates",
    "schedule": "schedules",
    "webhook": "webhooks",
    "gate": "limits",
    "api_key": "keys",
    "person": "people",
    "saved_view": "views",
}

#: Table -> how a person makes room for one more row.
_REMEDIES = {
    "template": "first delete a version that nothing uses",
    "schedule": "delete one first",
    "webhook": "delete one first",
    "gate": "lift one first",
    "api_key": "revoke one first",
    "saved_view": "delete one first",
    "person": "an operator of the platform raises LEASEHOLD_PEOPLE_PER_TENANT",
}


async def lock_additions(connection: Connection, thing: Thing, tenant_id: str) -> None:
    """Take the lock of `check_room`. Until the caller's transaction ends, no request to the API adds a row to the table
    `thing` for the tenant. (Exception: a worker writes the schedules that an app declares without this lock.)
    """
    await lock_name(connection, f"{thing} of {tenant_id}")


async def check_room(connection: Connection, thing: Thing, tenant_id: str, at_most: int) -> None:
    """Check that the tenant has fewer than `at_most` rows in the table `thing`. The caller then inserts one row, in the
    same transaction. This function takes the lock of `lock_additions`.

    Raises Conflict `too_many_templates`, `too_many_schedules`, `too_many_webhooks`, `too_many_limits`, `too_many_keys`,
    `too_many_people`, `too_many_views`.
    """
    await lock_additions(connection, thing, tenant_id)
    row_count = await connection.fetchval(
        f"SELECT count(*) FROM {thing} WHERE tenant_id = $1 AND {_CONDITIONS[thing]}", tenant_id
    )
    if row_count >= at_most:
        code = "templates" if thing == "template" else _PLURALS[thing]
        raise Conflict(f"too_many_{code}", f"A tenant has at most {at_most} {_PLURALS[thing]}: {_REMEDIES[thing]}.")
