"""Inspects uploads as housekeeping does, while something else happens to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from leasehold.api.process.services import Services
from leasehold.limits import uploads
from leasehold.pipelines.media.housekeeping import refuse_too_large
from leasehold.storage.store import ObjectStore, Stored


async def inspect_during(services: Services, event: Callable[[], Awaitable[object]]) -> None:
    """Inspect the due upload. `event` happens after its object was read, and before the upload's row changes."""
    left = [event]

    class Store:
        async def head(self, key: str) -> Stored | None:
            found = await services.store.head(key)
            if left:
                await left.pop()()
            return found

        async def delete(self, key: str) -> None:
            await services.store.delete(key)

    on_too_large = partial(refuse_too_large, retention_days=services.settings.retention_days)

    async with services.pool.acquire() as connection:
        due = await uploads.due(connection)
    (upload,) = due
    await uploads.inspect(services.pool.acquire, cast("ObjectStore", Store()), upload, on_too_large)
