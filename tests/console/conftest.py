"""An API with every kind of work, and people who sign in to its console."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx2
import pytest

from leasehold.api.auth import security
from leasehold.db.database import Connection
from leasehold.pipelines import SHIPPED
from leasehold.security.credentials import NewKey, create_key
from leasehold.security.roles import roles_of
from tests.api.conftest import Running
from tests.jobs.conftest import SCOPES, client, client_with, maker, running

__all__ = ["client", "client_with", "maker", "running"]

#: The roles of the product. The admin here operates all tenants, too.
ROLES = {
    name: scopes | ({security.OPERATE} if name == "admin" else frozenset())
    for name, scopes in roles_of(SHIPPED).items()
}
THEMES = ("light", "dark")
_TOKEN = re.compile(r'name="token" value="([^"]+)"')
HTML = {"Accept": "text/html"}


@dataclass
class Person:
    """A browser's cookies and headers, without the browser."""

    key: NewKey
    http: httpx2.AsyncClient

    async def see(self, path: str, status: int = 200) -> str:
        answer = await self.http.get(f"/console{path}")
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.text

    async def token(self) -> str:
        found = _TOKEN.search(await self.see("/nothing", 404))
        assert found is not None
        return found[1]

    async def send(self, path: str, **fields: str | list[str]) -> httpx2.Response:
        """A form, with the token of the person's session."""
        return await self.http.post(f"/console{path}", data={"token": await self.token(), **fields})

    async def do(self, path: str, **fields: str | list[str]) -> str:
        """A form, and the page that the browser shows after it."""
        answer = await self.send(path, **fields)
        assert answer.status_code == 303, (answer.status_code, answer.text)
        following = await self.http.get(answer.headers["location"])
        return following.text


MakePerson = Callable[..., Awaitable[Person]]


@pytest.fixture
async def person(running: Running, rows: Connection) -> AsyncIterator[MakePerson]:
    """Somebody with these scopes, who has signed in."""
    opened: list[httpx2.AsyncClient] = []

    async def make(scopes: frozenset[str] = SCOPES, tenant: str = "acme", name: str = "somebody") -> Person:
        key = await create_key(rows, tenant_id=tenant, client_id=name, scopes=sorted(scopes))
        http = httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=30)
        opened.append(http)
        answer = await http.post("/console/sign-in", data={"key": key.text})
        assert answer.status_code == 303, answer.text
        return Person(key, http)

    yield make
    for http in opened:
        await http.aclose()
