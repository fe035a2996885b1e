"""How many templates, limits, keys and so on a tenant may have: which rows count."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict
from leasehold.limits.bounds import check_room
from leasehold.security.credentials import create_key

NOW = datetime.now(UTC)


async def declare(rows: Connection, tenant: str, key: str, *, declared: bool = True) -> None:
    await rows.execute(
        "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ($1, $2, 1, $3)", tenant, key, declared
    )


async def test_a_tenant_s_room_is_its_own(rows: Connection) -> None:
    for key in ("a", "b", "c"):
        await declare(rows, "other", key)
    await declare(rows, "acme", "a")
    async with rows.transaction():
        await check_room(rows, "gate", "acme", 2)
    async with rows.transaction():
        with pytest.raises(Conflict) as refused:
            await check_room(rows, "gate", "acme", 1)
    assert refused.value.code == "too_many_limits"
    assert refused.value.message == "A tenant has at most 1 limits: lift one first."


async def test_limits_of_the_code_count_for_nobody(rows: Connection) -> None:
    await declare(rows, "acme", "a", declared=False)
    async with rows.transaction():
        await check_room(rows, "gate", "acme", 1)


async def test_keys_that_open_nothing_any_more_do_not_count(rows: Connection) -> None:
    for changes in ({"revoked_at": NOW}, {"expires_at": NOW - timedelta(minutes=1)}):
        key = await create_key(rows, tenant_id="acme", client_id="c", scopes=["jobs:read"])
        for column, value in changes.items():
            await rows.execute(f"UPDATE api_key SET {column} = $2 WHERE prefix = $1", key.text.split("_")[1], value)
    async with rows.transaction():
        await check_room(rows, "api_key", "acme", 1)
    await create_key(rows, tenant_id="acme", client_id="c", scopes=["jobs:read"])
    later = await create_key(rows, tenant_id="acme", client_id="c", scopes=["jobs:read"])
    await rows.execute(
        "UPDATE api_key SET expires_at = $2 WHERE prefix = $1", later.text.split("_")[1], NOW + timedelta(hours=1)
    )
    async with rows.transaction():
        await check_room(rows, "api_key", "acme", 3)
        with pytest.raises(Conflict) as refused:
            await check_room(rows, "api_key", "acme", 2)
    assert refused.value.code == "too_many_keys"
