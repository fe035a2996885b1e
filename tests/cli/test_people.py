"""An operator lists and changes people from the command line, when nobody can sign in to do it."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from leasehold.cli.main import app
from leasehold.db.database import Connection
from leasehold.limits import people
from leasehold.security.openid import Identity


class People:
    def __init__(self, database_url: str) -> None:
        self._runner = CliRunner(env={"LEASEHOLD_DATABASE_URL": database_url, "COLUMNS": "300"})

    async def __call__(self, *arguments: str) -> Result:
        return await asyncio.to_thread(self._runner.invoke, app, ["people", *arguments])

    async def json(self, *arguments: str) -> Any:
        result = await self(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
async def ann(rows: Connection) -> str:
    """A viewer of acme, beside somebody of another tenant."""
    (row,) = await people.record_sign_in(
        rows, Identity("https://idp", "1", "ann@acme", "Ann [x]", frozenset()), {"acme": ["role:viewer"]}, 9
    )
    await people.record_sign_in(
        rows, Identity("https://idp", "2", "bob@globex", "Bob", frozenset()), {"globex": ["role:admin"]}, 9
    )
    return str(row["id"])


@pytest.fixture
def cli(database_url: str) -> People:
    return People(database_url)


async def acts(rows: Connection) -> list[tuple[str, str]]:
    found = await rows.fetch("SELECT action, actor_kind FROM audit WHERE target_kind = 'person' ORDER BY at")
    return [(row["action"], row["actor_kind"]) for row in found]


async def test_people_are_listed_by_tenant_and_text(cli: People, ann: str) -> None:
    assert {person["login"] for person in await cli.json("list")} == {"ann@acme", "bob@globex"}
    (person,) = await cli.json("list", "--tenant", "acme")
    assert (person["id"], person["role"], person["disabled_at"]) == (ann, "viewer", None)
    assert [person["login"] for person in await cli.json("list", "--text", "BOB")] == ["bob@globex"]
    shown = await cli("list")
    assert ann in shown.stdout
    assert "Ann [x]" in shown.stdout


async def test_a_person_is_disabled_and_enabled_and_the_sessions_end(cli: People, ann: str, rows: Connection) -> None:
    async def state() -> tuple[bool, int]:
        row = await rows.fetchrow("SELECT disabled_at, generation FROM person WHERE id = $1", ann)
        assert row is not None
        return row["disabled_at"] is not None, row["generation"]

    before = (await state())[1]
    assert await cli.json("disable", ann) == {"id": ann, "disabled": True}
    assert await state() == (True, before + 1)
    assert (await cli("enable", ann)).stdout == f"{ann} is enabled.\n"
    assert await state() == (False, before + 1)
    await cli.json("end-sessions", ann)
    assert await state() == (False, before + 2)
    assert [action for action, _ in await acts(rows)] == [
        "person.disabled", "person.enabled", "person.sessions_ended",
    ]  # fmt: skip
    assert {kind for _, kind in await acts(rows)} == {"command"}


async def test_a_role_is_set_and_given_back_to_the_provider(cli: People, ann: str) -> None:
    await cli.json("set-role", ann, "admin")
    (person,) = await cli.json("list", "--tenant", "acme")
    assert (person["role"], person["set_role"]) == ("admin", "admin")
    await cli.json("set-role", ann, "provider")
    (person,) = await cli.json("list", "--tenant", "acme")
    assert (person["role"], person["set_role"]) == ("viewer", None)


async def test_what_is_no_person_and_no_role_is_refused_with_a_sentence(cli: People, ann: str) -> None:
    for arguments, status in (
        (("disable", str(uuid4())), 1), (("end-sessions", str(uuid4())), 1), (("disable", "ann"), 2),
        (("set-role", ann, "king"), 2),
    ):  # fmt: skip
        result = await cli(*arguments)
        assert (result.exit_code, "Traceback" in result.output) == (status, False), result.output
