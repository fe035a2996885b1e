"""One API for all cases of a module, each with a tenant and a key of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import httpx2

from leasehold.api.auth import security
from leasehold.db.database import Pool
from leasehold.security.credentials import NewKey, create_key
from tests.api.conftest import Running, client_of

_T = TypeVar("_T")
_TENANTS = count()
SCOPES = tuple(value for name, value in vars(security).items() if name.isupper() and ":" in str(value))
#: Cases under way at once: one waits for its answer while another is asked.
AT_ONCE = 6


@dataclass
class Tenant:
    name: str
    key: NewKey
    http: httpx2.AsyncClient

    async def post(self, path: str, **body: Any) -> Any:
        """Of what must succeed: the answer's body."""
        answer = await self.http.post(path, json=body)
        assert answer.is_success, (path, answer.status_code, answer.text)
        return answer.json()


@dataclass
class Stage:
    running: Running
    pool: Pool

    @asynccontextmanager
    async def tenant(self, scopes: tuple[str, ...] = SCOPES) -> AsyncIterator[Tenant]:
        name = f"tenant-{next(_TENANTS)}"
        key = await self.key(name, scopes)
        async with client_of(self.running.url, key.text) as http:
            yield Tenant(name, key, http)

    async def key(self, tenant: str, scopes: tuple[str, ...] = SCOPES) -> NewKey:
        async with self.pool.acquire() as connection:
            return await create_key(connection, tenant_id=tenant, client_id="tests", scopes=scopes)


async def side_by_side(cases: Iterable[_T], judge: Callable[[_T], Awaitable[object | None]]) -> list[object]:
    """What `judge` finds odd of any case."""
    waiting = iter(cases)

    async def some() -> list[object]:
        return [one for case in waiting if (one := await judge(case)) is not None]

    found = await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return [one for of_some in found for one in of_some]
