"""Inspects uploads as housekeeping does, while something else happens to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from leasehold.api.process.services import Services
from leasehold.limits import uploads
from leasehold.storage.store import ObjectStore, Stored


async def inspect_during(services: Services, event: Callable[[], Awaitable[object]]) -> None:
    """Inspect the due uploads. `event` happens after an object was read, and before the upload's row changes."""

    class Store:
        async def head(self, key: str) -> Stored | None:
            found = await services.store.head(key)
            await event()
            return found

    async def none_is_too_large(*_arguments: object) -> None:
        raise AssertionError

    async with services.pool.acquire() as connection:
        due = await uploads.due(connection)
    for upload in due:
        await uploads.inspect(services.pool.acquire, cast("ObjectStore", Store()), upload, none_is_too_large)
