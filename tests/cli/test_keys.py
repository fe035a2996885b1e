"""An operator makes, lists, rotates, expires and revokes keys from the command line."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from leasehold.app.dev_file import dev_file
from leasehold.cli.main import app
from leasehold.db.database import Connection
from leasehold.security.credentials import find_key
from leasehold.settings import as_variables, servers_of_database

HOUR = timedelta(hours=1)


class Keys:
    def __init__(self, database_url: str, **more: str) -> None:
        self._environment = {"LEASEHOLD_DATABASE_URL": database_url, "COLUMNS": "300"} | more

    async def __call__(self, *arguments: str) -> Result:
        runner = CliRunner(env=self._environment)
        return await asyncio.to_thread(runner.invoke, app, ["keys", *arguments])

    async def said(self, *arguments: str) -> Any:
        result = await self(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    async def create(self, *more: str) -> str:
        said = await self.said("create", "--tenant", "acme", "--client", "me", "--scope", "runs:read", *more)
        return str(said["prefix"])


@pytest.fixture
def keys(database_url: str) -> Keys:
    return Keys(database_url)


async def ends(rows: Connection, prefix: str) -> datetime | None:
    found: datetime | None = await rows.fetchval("SELECT expires_at FROM api_key WHERE prefix = $1", prefix)
    return found


def soon(instant: datetime | None, after: timedelta) -> bool:
    return instant is not None and abs(instant - datetime.now(UTC) - after) < timedelta(minutes=2)


async def test_a_key_is_made_with_its_end(keys: Keys, rows: Connection) -> None:
    assert soon(await ends(rows, await keys.create("--expires-in", "90d")), timedelta(days=90))
    assert await ends(rows, await keys.create()) is None
    refused = await keys("create", "--tenant", "a", "--client", "b", "--scope", "runs:read", "--expires-in", "soon")
    assert refused.exit_code == 2


async def test_keys_are_listed_by_tenant_without_their_secrets(keys: Keys, rows: Connection) -> None:
    kept, gone = await keys.create(), await keys.create()
    await keys("revoke", gone)
    await keys.said("create", "--tenant", "other", "--client", "me", "--scope", "runs:read")
    assert [row["prefix"] for row in await keys.said("list", "--tenant", "acme")] == [kept]
    everything = {row["prefix"]: row["state"] for row in await keys.said("list", "--tenant", "acme", "--all")}
    assert everything == {kept: "active", gone: "revoked"}
    assert len(await keys.said("list")) == 2
    shown = (await keys("list", "--all")).stdout
    assert kept in shown
    secret = await rows.fetchval("SELECT encode(secret_hash, 'hex') FROM api_key WHERE prefix = $1", kept)
    assert secret not in json.dumps(await keys.said("list"))


async def test_a_key_is_rotated_and_the_old_one_ends_with_the_overlap(keys: Keys, rows: Connection) -> None:
    old = await keys.create("--expires-in", "90d")
    said = await keys.said("rotate", old, "--overlap", "1h")
    new = said["prefix"]
    assert soon(datetime.fromisoformat(said["expires_at"]), timedelta(days=90))
    assert soon(await ends(rows, old), HOUR)
    assert soon(await ends(rows, new), timedelta(days=90))
    newer = (await keys.said("rotate", new))["prefix"]
    assert soon(await ends(rows, new), timedelta(days=1))
    assert newer not in (old, new)


async def test_a_rotation_says_when_the_new_key_ends(keys: Keys, rows: Connection) -> None:
    """That of a key that was rotated before ends with the first overlap."""
    old = await keys.create()
    assert (await keys.said("rotate", old, "--overlap", "1h"))["expires_at"] is None
    again = await keys("rotate", old, "--overlap", "90d")
    assert again.exit_code == 0, again.output
    (text,) = again.stdout.split()  # alone, for a script
    ends_at = await ends(rows, text.split("_")[1])
    assert soon(ends_at, HOUR)
    assert f"{ends_at:%Y-%m-%d %H:%M:%S} UTC" in again.stderr


async def test_a_key_is_made_to_end_earlier_and_never_later(keys: Keys, rows: Connection) -> None:
    prefix = await keys.create("--expires-in", "1h")
    assert (await keys("expire", prefix, "--in", "30m")).exit_code == 0
    assert soon(await ends(rows, prefix), HOUR / 2)
    await keys("expire", prefix, "--in", "90d")
    assert soon(await ends(rows, prefix), HOUR / 2)
    await keys("expire", prefix, "--in", "0s")
    found = await find_key(rows, prefix)
    assert found is not None
    assert not found.usable


@pytest.mark.parametrize("verb", [("rotate",), ("expire", "--in", "1h"), ("revoke",)])
async def test_a_prefix_that_nobody_has_is_told_in_a_sentence(keys: Keys, verb: tuple[str, ...]) -> None:
    result = await keys(verb[0], "nosuchprefix", *verb[1:])
    assert result.exit_code == 1
    assert "has this prefix" in result.stderr


async def test_the_keys_of_a_tenant_that_work_are_bounded_also_at_once(database_url: str) -> None:
    keys = Keys(database_url, LEASEHOLD_KEYS_PER_TENANT="2")
    made = [
        await keys("create", "--tenant", "acme", "--client", "me", "--scope", "runs:read", "--json") for _ in range(3)
    ]
    assert [one.exit_code for one in made] == [0, 0, 1]
    assert "at most 2 keys" in made[-1].stderr
    prefix = json.loads(made[0].stdout)["prefix"]
    assert (
        await keys("rotate", prefix, "--overlap", "0s")
    ).exit_code == 0  # a leaked one is replaced at the bound, too
    await keys("revoke", json.loads(made[1].stdout)["prefix"])
    await keys.create()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("keys", "create", "--tenant", "acme", "--client", "me", "--scope", "runs:read"), '"prefix"'),
        (("people", "list"), "["),
        (("audit", "verify"), "{"),
        (("doctor",), '{"part": "database", "ok": true'),
    ],
)
async def test_a_command_works_on_the_dev_of_its_folder_where_nothing_names_a_database(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], shown: str
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    # Only `doctor` asks a broker and a store: it would wait for those of the default addresses.
    monkeypatch.setattr(os, "environ", own | {"LEASEHOLD_BROKER": "postgres", "LEASEHOLD_OBJECT_STORE": "none"})
    monkeypatch.chdir(tmp_path)
    with dev_file(as_variables(servers_of_database(database_url))):
        result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"])
    assert shown in result.stdout, result.output
    assert "joins the `leasehold dev` of this folder" in result.stderr
