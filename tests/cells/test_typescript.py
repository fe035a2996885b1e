"""The TypeScript client between two cells: it follows a 421 once, and its key never leaves https."""

from __future__ import annotations

import asyncio
import json
import os
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.api.conftest import client_of
from tests.cells.conftest import Two
from tests.client.test_typescript import NODE, needs_node

pytestmark = needs_node
HERE = Path(__file__).parent


async def said(mode: str, url: str, key: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        str(NODE),
        str(HERE / "typescript_cells.mjs"),
        mode,
        env=dict(os.environ) | {"LEASEHOLD_URL": url, "LEASEHOLD_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        output, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (0, "")
    found: dict[str, Any] = json.loads(output)
    return found


async def test_it_follows_its_tenant_to_the_other_cell_and_asks_there_from_then_on(two: Two) -> None:
    key = await two.a.key()
    await two.b.take_over(key)
    two.tell(two.a, acme="b")
    two.tell(two.b, acme="b")
    printed = await said("follows", two.a.running.url, key)
    assert [url for url, _ in groupby(printed["asked"])] == [two.a.running.url, two.b.running.url]
    assert len(printed["asked"]) >= 3
    async with client_of(two.b.running.url, key) as client:
        assert (await client.get(f"/v1/runs/{printed['run']}")).status_code == 200


async def test_it_follows_once_and_two_cells_that_disagree_are_an_error(two: Two) -> None:
    key = await two.a.key()
    await two.b.take_over(key)
    two.tell(two.a, acme="b")
    two.tell(two.b, acme="a")
    printed = await said("disagree", two.a.running.url, key)
    assert printed == {"refused": [421, "wrong_cell"], "asked": [two.a.running.url, two.b.running.url]}


async def test_its_key_never_leaves_https(two: Two) -> None:
    """The cell's own answer names an http address. The client believes that it has asked by https."""
    key = await two.a.key()
    await two.b.take_over(key)
    two.tell(two.a, acme="b")
    printed = await said("https", two.a.running.url, key)
    https = two.a.running.url.replace("http:", "https:")
    assert printed == {"refused": [421, "wrong_cell"], "asked": [https]}
