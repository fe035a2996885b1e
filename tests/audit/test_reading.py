"""The audit over HTTP and on the command line, and the sign-ins that were refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from typer.testing import CliRunner, Result

from leasehold.api.process import refusals as refusing
from leasehold.api.process.refusals import Refusals
from leasehold.cli.main import app
from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import Connection, Pool
from leasehold.domain.audit import Actor
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, api, client_of, make_key, serving
from tests.api.media_api import problem
from tests.audit.test_chain import older

pytestmark = pytest.mark.usefixtures("own_width")

__all__ = ["api", "make_key"]
ANNA = Actor("key", "anna", "acme", "abcdefghijkl", "192.0.2.7", "r1")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API writes refusals when a test says so, and not after ten seconds between two of them."""
    monkeypatch.setattr(refusing, "_FLUSH_SECONDS", 3600.0)


async def act(rows: Connection, *tenants: str, action: str = "job.cancelled") -> None:
    for number, tenant in enumerate(tenants):
        await audit.record(rows, ANNA, action, Target("job", f"j{number}", tenant), reason="enough")


@pytest.fixture
async def reader(api: Running, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    key = await make_key(scopes=("audit:read",))
    async with client_of(api.url, key.text) as client:
        yield client


@pytest.fixture
async def operator(api: Running, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    key = await make_key("ops", scopes=("audit:read", "fleet:operate"))
    async with client_of(api.url, key.text) as client:
        yield client


async def listed(client: httpx2.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["rows"]
    return found


async def test_a_tenant_reads_its_own_chain_whatever_it_names(
    reader: httpx2.AsyncClient, operator: httpx2.AsyncClient, rows: Connection
) -> None:
    await act(rows, "acme", "other", "*", "acme")
    for tenant in ({}, {"tenant": "other"}, {"tenant": "*"}, {"tenant": "acme"}):
        assert [row["tenant_id"] for row in await listed(reader, **tenant)] == ["acme", "acme"]
        exported = (await reader.get("/v1/audit/export", params=tenant)).text.splitlines()
        assert {json.loads(line).get("tenant_id", "acme") for line in exported} == {"acme"}
    assert [row["tenant_id"] for row in await listed(operator)] == ["acme", "*", "other", "acme"]
    assert [row["tenant_id"] for row in await listed(operator, tenant="other")] == ["other"]
    assert [row["seq"] for row in await listed(operator, tenant="acme")] == [2, 1]


async def test_a_row_says_who_did_what_to_what_when_and_from_where(
    reader: httpx2.AsyncClient, rows: Connection
) -> None:
    await act(rows, "acme")
    (row,) = await listed(reader, actor="anna", action="job.cancelled", target="j0")
    assert {name: row[name] for name in ("actor", "key_prefix", "action", "target", "source_ip", "request_id")} == {
        "actor": "anna", "key_prefix": "abcdefghijkl", "action": "job.cancelled", "target": "j0",
        "source_ip": "192.0.2.7", "request_id": "r1",
    }  # fmt: skip
    assert row["details"] == {"reason": "enough"}
    for other in ({"actor": "bob"}, {"action": "job"}, {"target": "j1"}, {"since": "2100-01-01T00:00:00Z"},
                  {"until": "2020-01-01T00:00:00Z"}):  # fmt: skip
        assert await listed(reader, **other) == []
    assert len(await listed(reader, since="2020-01-01T00:00:00Z", until="2100-01-01T00:00:00Z")) == 1


async def test_pages_follow_one_another_without_a_gap(reader: httpx2.AsyncClient, rows: Connection) -> None:
    await act(rows, *["acme"] * 7)
    seen: list[int] = []
    query: dict[str, Any] = {"limit": 3}
    while True:
        page = (await reader.get("/v1/audit", params=query)).json()
        seen += [row["seq"] for row in page["rows"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert seen == [7, 6, 5, 4, 3, 2, 1]
    problem(await reader.get("/v1/audit", params={"cursor": "x" * 31}), 422, "invalid_cursor")


async def test_equal_refusals_are_one_row_with_their_number(api: Running, rows: Connection, make_key: MakeKey) -> None:
    unable = await make_key(scopes=("media:read",))
    async with client_of(api.url) as nobody:
        for text in ("nonsense", "lh_abcdefghijkl_" + "x" * 43, "lh_abcdefghijkl_" + "x" * 43, unable.text):
            await nobody.get("/v1/audit", headers={"Authorization": f"Bearer {text}"})
        await nobody.get("/v1/jobs")
        await nobody.get("/v1/runs")
    await api.services.refusals.flush()
    found = await rows.fetch("SELECT tenant_id, actor, key_prefix, target, details FROM audit ORDER BY at, id")
    told = [(row["tenant_id"], row["key_prefix"], row["target"], json.loads(row["details"])["count"]) for row in found]
    assert sorted(told, key=str) == sorted([
        ("*", None, "invalid_api_key", 1),
        ("*", "abcdefghijkl", "invalid_api_key", 2),
        ("*", None, "missing_api_key", 2),
        ("acme", unable.prefix, "insufficient_scope", 1),
    ], key=str)  # fmt: skip
    assert "x" * 43 not in str(found)
    assert unable.text not in str(found)


async def test_a_stranger_that_asks_without_end_fills_no_table(settings: Settings, rows: Connection) -> None:
    async with serving(settings.model_copy(update={"audit_refusals": 3})) as api, client_of(api.url) as nobody:
        for number in range(10):
            key = f"lh_{number:012}_{'x' * 43}"
            await nobody.get("/v1/audit", headers={"Authorization": f"Bearer {key}"})
        await api.services.refusals.flush()
        found = await rows.fetch("SELECT actor, (details::json ->> 'count')::int AS n FROM audit ORDER BY n")
    assert [(row["actor"], row["n"]) for row in found] == [("", 1), ("", 1), ("", 1), ("others", 7)]


async def test_neither_strangers_nor_another_tenant_take_a_refusal_out_of_a_tenants_audit(
    settings: Settings, rows: Connection
) -> None:
    async with serving(settings.model_copy(update={"audit_refusals": 2})) as api:
        refusals = api.services.refusals
        for number in range(5):
            refusals.add("invalid_api_key", Actor("key", "", key_prefix=f"{number:012}"), "/v1/jobs")
            refusals.add("insufficient_scope", Actor("key", f"client {number}", "loud"), "/v1/jobs")
        refusals.add("insufficient_scope", Actor("key", "mine", "acme"), "/v1/audit")
        await refusals.flush()
    found = await rows.fetch("SELECT tenant_id, actor, actor_tenant, (details::json ->> 'count')::int AS n FROM audit")
    assert sorted(tuple(row) for row in found) == sorted([
        ("*", "", None, 1), ("*", "", None, 1), ("*", "others", None, 3),
        ("acme", "mine", "acme", 1),
        ("loud", "client 0", "loud", 1), ("loud", "client 1", "loud", 1), ("loud", "others", "loud", 3),
    ])  # fmt: skip


async def test_refusals_are_not_lost_while_the_database_refuses(api: Running, rows: Connection) -> None:
    await rows.execute("ALTER TABLE audit ADD CONSTRAINT nothing CHECK (false) NOT VALID")
    async with client_of(api.url) as nobody:
        await nobody.get("/v1/jobs")
        await api.services.refusals.flush()
        await nobody.get("/v1/jobs")
    await rows.execute("ALTER TABLE audit DROP CONSTRAINT nothing")
    await api.services.refusals.flush()
    assert json.loads(await rows.fetchval("SELECT details FROM audit"))["count"] == 2


async def test_refusals_stay_bounded_however_long_the_database_is_away() -> None:
    """Strangers go on while a turn waits for the database in vain."""
    numbers = itertools.count()

    def refuse() -> None:
        for _ in range(10):
            refusals.add("invalid_api_key", Actor("key", "", key_prefix=f"{next(numbers):012}"), "/v1/jobs")

    class Away:
        def acquire(self) -> Any:
            refuse()
            raise ConnectionRefusedError

    refusals = Refusals(cast("Pool", Away()), at_most=3)
    for _ in range(5):
        refuse()
        await refusals.flush()
    (counts,) = refusals._counts.values()
    assert len(counts) == len(refusals._firsts) == 3 + 1  # one counts the others together
    assert counts.total() == next(numbers)


Cli = Callable[..., Awaitable[Result]]


@pytest.fixture
async def cli(settings: Settings, api: Running, make_key: MakeKey) -> Cli:
    key = await make_key(scopes=("audit:read",))
    environment = {
        "LEASEHOLD_URL": api.url,
        "LEASEHOLD_API_KEY": key.text,
        "LEASEHOLD_DATABASE_URL": settings.database_url.get_secret_value(),
        "COLUMNS": "300",
    }

    async def call(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, [*arguments], env=environment)

    return call


async def test_the_command_line_lists_exports_and_verifies(cli: Cli, rows: Connection, tmp_path: Path) -> None:
    await act(rows, "acme", "acme", "acme", "other")
    listing = await cli("audit", "list", "--actor", "anna", "--limit", "2")
    assert listing.exit_code == 0, listing.output
    assert "job.cancelled" in listing.stdout
    assert "--cursor" in listing.stdout
    good = await cli("audit", "verify", "--json")
    assert good.exit_code == 0, good.output
    chains = json.loads(good.stdout.splitlines()[-1])["chains"]
    assert [(one["tenant_id"], one["seq"], one["broken"]) for one in chains] == [("acme", 3, None), ("other", 1, None)]
    file = tmp_path / "audit.jsonl"
    assert (await cli("audit", "export", str(file))).exit_code == 0
    assert (await cli("audit", "verify", str(file))).exit_code == 0
    await rows.execute("UPDATE audit SET target = 'j9' WHERE tenant_id = 'acme' AND seq = 2")
    bad = await cli("audit", "verify")
    assert (bad.exit_code, "row 2: its content is not what was written" in bad.stdout) == (1, True)
    assert (await cli("audit", "verify", "--tenant", "other")).exit_code == 0


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"anna", b"emma"), *lines[2:]], "row 1: its content"),
        (lambda lines: [*lines[:2], *lines[3:]], "row 2: the row is missing"),
        (lambda lines: lines[:-1], "row 3: the row is missing, and all after it"),
        (lambda lines: [lines[0].replace(b'"first_seq":1', b'"first_seq":2'), *lines[2:]], "row 2: it does not follow"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "is not JSON"),
        (lambda lines: lines[1:], "does not begin with the head"),
        (lambda lines: [b'{"head": 7}\n', *lines[1:]], "line 1 of the file is not the head of a chain"),
        (lambda lines: [lines[0].replace(b'"seq":3', b'"seq":"x"'), *lines[1:]], "line 1 of the file is not the head"),
        (
            lambda lines: [lines[0], b'{"at": "2026-01-01T00:00:00Z", "details": {}}\n'],
            "line 2 of the file is not a",
        ),
    ],
)
async def test_an_export_that_was_changed_is_found_out(
    cli: Cli, rows: Connection, tmp_path: Path, spoil: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    await act(rows, "acme", "acme", "acme")
    file = tmp_path / "audit.jsonl"
    assert (await cli("audit", "export", str(file))).exit_code == 0
    file.write_bytes(b"".join(spoil(file.read_bytes().splitlines(keepends=True))))
    result = await cli("audit", "verify", str(file))
    assert (result.exit_code, says in result.output) == (1, True), result.output


async def test_an_export_beside_which_retention_deletes_rows_is_verified(
    cli: Cli, operator: httpx2.AsyncClient, rows: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_part = audit.read_part
    for tenant in ("acme", "other"):
        await act(rows, *[tenant] * 4)
        await older(rows, 50, "1,2", tenant)

    async def forget_and_read(*arguments: Any) -> list[dict[str, Any]]:
        await audit.forget(rows, 40)
        return await read_part(*arguments)

    monkeypatch.setattr(audit, "read_part", forget_and_read)
    answer = await operator.get("/v1/audit/export")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["seq"] for line in lines if "seq" in line] == [1, 2, 3, 4, 3, 4]
    (tmp_path / "audit.jsonl").write_text(answer.text)
    result = await cli("audit", "verify", str(tmp_path / "audit.jsonl"))
    assert result.exit_code == 0, result.output


async def test_a_check_that_found_nothing_to_check_is_no_success(cli: Cli, rows: Connection, tmp_path: Path) -> None:
    empty, file = tmp_path / "empty.jsonl", tmp_path / "audit.jsonl"
    empty.touch()
    for arguments in ((), (str(empty),), (str(empty), "--json")):
        nothing = await cli("audit", "verify", *arguments)
        assert (nothing.exit_code, "nothing was checked" in nothing.stderr) == (1, True), nothing.output
    await act(rows, "acme")
    assert (await cli("audit", "export", str(file))).exit_code == 0
    for options in (("--tenant", "nobody"), (str(file), "--tenant", "nobody")):
        nothing = await cli("audit", "verify", *options)
        assert nothing.exit_code == 1
        assert "nothing was checked: there is no chain of nobody" in nothing.stderr
    assert (await cli("audit", "verify", str(file), "--tenant", "acme")).exit_code == 0


async def test_what_the_command_line_does_to_keys_names_the_user_of_the_machine(cli: Cli, rows: Connection) -> None:
    made = await cli("keys", "create", "--tenant", "acme", "--client", "me", "--scope", "runs:read", "--json")
    prefix = json.loads(made.stdout.splitlines()[-1])["prefix"]
    await cli("keys", "rotate", prefix)
    await cli("keys", "expire", prefix, "--in", "1h")
    await cli("keys", "revoke", prefix)
    found = await rows.fetch("SELECT * FROM audit WHERE target = $1 ORDER BY at", prefix)
    assert [row["action"] for row in found] == ["key.created", "key.rotated", "key.expired", "key.revoked"]
    assert {(row["actor_kind"], row["tenant_id"]) for row in found} == {("command", "acme")}
    assert all("@" in row["actor"] for row in found)
    assert json.loads(made.stdout.splitlines()[-1])["key"].split("_", 2)[2] not in str(found)
