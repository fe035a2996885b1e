"""Two cells, each a real API with its own database and a map of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.security.credentials import create_key, parse_key
from leasehold.settings import Settings
from tests.api.conftest import Running, serving
from tests.support.databases import Databases

DEMONSTRATIONS = "leasehold.pipelines:with_demonstrations"
SCOPES = ("runs:read", "runs:write", "jobs:read", "external:work", "keys:write")


@dataclass
class Cell:
    name: str
    running: Running
    database_url: str
    path: Path  # of its map

    async def key(self, tenant: str = "acme") -> str:
        connection = await asyncpg.connect(self.database_url)
        try:
            made = await create_key(connection, tenant_id=tenant, client_id="tests", scopes=SCOPES, cell=self.name)
            return made.text
        finally:
            await connection.close()

    async def take_over(self, key: str, tenant: str = "acme") -> None:
        """The key's row, as a move of the tenant brings it here."""
        connection = await asyncpg.connect(self.database_url)
        try:
            presented = parse_key(key)
            assert presented is not None
            made = await create_key(connection, tenant_id=tenant, client_id="tests", scopes=SCOPES)
            own = parse_key(made.text)
            assert own is not None
            await connection.execute("UPDATE api_key SET prefix = $2, secret_hash = sha256($3::text::bytea)"
                                     " WHERE prefix = $1", own.prefix, presented.prefix, presented.secret)  # fmt: skip
        finally:
            await connection.close()


@dataclass
class Two:
    a: Cell
    b: Cell

    def place(self, **tenants: str) -> None:
        for cell in (self.a, self.b):
            self.tell(cell, **tenants)

    def tell(self, cell: Cell, **tenants: str) -> None:
        """Change the map of one cell alone."""
        _write(cell.path, {one.name: one.running.url for one in (self.a, self.b)}, tenants)


def _write(path: Path, addresses: dict[str, str], tenants: dict[str, str]) -> None:
    replace_file(path, {"cells": addresses, "tenants": tenants})


def replace_file(path: Path, document: Any) -> None:
    """Another file takes its place: two writes of one file within a tick of the clock may look the same."""
    new = path.with_suffix(".new")
    new.write_bytes(orjson.dumps(document))
    new.replace(path)


def last_json(printed: str) -> Any:
    """What a command printed as JSON. The cells of the test log to the same output."""
    return orjson.loads([line for line in printed.splitlines() if line[:1] in ("[", "{")][-1])


@pytest.fixture
def cell_settings() -> dict[str, Any]:
    """What the settings of both cells have in common."""
    return {}


@pytest.fixture
def settings_of_b() -> dict[str, Any]:
    """What the cell `b` has otherwise than the cell `a`."""
    return {}


@pytest.fixture
async def two(
    settings: Settings,
    postgres: Databases,
    migrated_template: str,
    tmp_path: Path,
    cell_settings: dict[str, Any],
    settings_of_b: dict[str, Any],
) -> AsyncIterator[Two]:
    other = await postgres.lend(migrated_template)
    urls = {"a": settings.database_url.get_secret_value(), "b": other}
    async with AsyncExitStack() as stack:
        cells = {}
        for name, url in urls.items():
            path = tmp_path / f"cells-of-{name}.json"
            _write(path, {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:9"}, {})
            own = {
                "cell": name,
                "cells_file": str(path),
                "database_url": SecretStr(url),
                "pipelines": DEMONSTRATIONS,
                "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            }
            chosen = own | cell_settings | (settings_of_b if name == "b" else {})
            running = await stack.enter_async_context(serving(settings.model_copy(update=chosen)))
            cells[name] = Cell(name, running, url, path)
        made = Two(cells["a"], cells["b"])
        made.place()
        yield made
    await postgres.give_back(other, migrated_template)
