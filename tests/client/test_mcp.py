"""`leasehold mcp` as a client of the protocol meets it: a process that is spoken to over its standard streams."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from mcp import Client as McpClient
from mcp import StdioServerParameters
from typer.testing import CliRunner

from leasehold.app.dev_file import dev_file
from leasehold.cli import mcp_server
from leasehold.cli.main import app
from leasehold.cli.mcp_server import server_of
from leasehold.client import AsyncClient
from leasehold.db import job_lists, job_reads
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.logs import append as append_log
from tests.api.conftest import Running
from tests.jobs.conftest import TENANT_SCOPES, Maker, client, client_with, maker, running
from tests.jobs.test_job_logs import line

__all__ = ["client", "client_with", "maker", "running"]  # fixtures
READS = {
    "list_jobs",
    "get_job",
    "explain_job",
    "job_events",
    "job_logs",
    "list_dead_letters",
    "dead_letter_groups",
    "list_queues",
    "list_workers",
}
WRITES = {"submit_run", "retry_job", "replay_dead_letters", "cancel_job"}


async def parameters(running: Running, rows: Connection, *scopes: str, arguments: tuple[str, ...] = ()) -> Any:
    key = await create_key(rows, tenant_id="acme", client_id="mcp", scopes=scopes)
    environment = dict(os.environ) | {"LEASEHOLD_URL": running.url, "LEASEHOLD_API_KEY": key.text}
    return StdioServerParameters(
        command=sys.executable, args=["-m", "leasehold.cli.main", "mcp", *arguments], env=environment
    )


def text_of(result: Any) -> str:
    return "".join(part.text for part in result.content)


async def test_its_tools_read_and_none_of_them_writes(maker: Maker, running: Running, rows: Connection) -> None:
    job_id = await maker.make("run")
    claimed = await maker.claim(job_id)
    await append_log(rows, [LogChunk(claimed.lease.task_id, 1, 1, 1, [line("sold a hat")])])
    process = await parameters(running, rows, "jobs:read", "runs:read")
    async with asyncio.timeout(60), McpClient(process) as mcp:
        tools = (await mcp.list_tools()).tools
        assert {tool.name for tool in tools} == READS
        assert mcp.server_info is not None
        assert mcp.server_info.version == version("leasehold")
        assert {tool.annotations.read_only_hint for tool in tools if tool.annotations is not None} == {True}
        assert all("Needs the scope" in (tool.description or "") for tool in tools)
        listed = await mcp.call_tool("list_jobs", {"query": "kind:run"})
        assert (not listed.is_error, str(job_id) in text_of(listed)) == (True, True)
        assert "sold a hat" in text_of(await mcp.call_tool("job_logs", {"job_id": str(job_id)}))
        assert "reasons" in text_of(await mcp.call_tool("explain_job", {"job_id": str(job_id)}))
        refused = await mcp.call_tool("list_queues", {})
        assert (refused.is_error, "insufficient_scope" in text_of(refused)) == (True, True)
        unknown = await mcp.call_tool("cancel_job", {"job_id": str(job_id)})
        assert unknown.is_error
    assert await rows.fetchval("SELECT cancel FROM job WHERE id = $1", job_id) is None


async def test_a_search_that_finds_little_ends_after_some_pages_and_says_how_to_go_on(
    maker: Maker, running: Running, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the tenant's whole history."""
    made = [str(await maker.make("run", payload={"n": n, "all": 1})) for n in range(5)]
    monkeypatch.setattr(job_lists, "MAX_SEARCHED", 1)
    monkeypatch.setattr(mcp_server, "_MAX_PAGES", 2)
    key = await create_key(rows, tenant_id="acme", client_id="mcp", scopes=("jobs:read", "runs:read"))
    async with asyncio.timeout(60), AsyncClient(running.url, key.text) as client:
        server = server_of(client, allow_writes=False)
        async with McpClient(server) as mcp:
            answers = await all_answers(mcp, "list_jobs", {"query": "payload./n:0"})
            assert [ids_of(answer) for answer in answers] == [[], [], made[:1]]
            (every,) = await all_answers(mcp, "list_jobs", {})
            created_at = [job["created_at"] for job in reversed(every["jobs"])]
            # Each answer names the first job that it has not searched: after two pages of one job each, the third.
            assert [answer.get("searched_back_to") for answer in answers] == [created_at[2], created_at[0], None]
            pages = await all_answers(mcp, "list_jobs", {"query": "kind:run", "limit": 2})
            assert [ids_of(answer) for answer in pages] == [made[:2:-1], made[2:0:-1], made[:1]]
            assert all("searched_back_to" not in answer for answer in pages)
            monkeypatch.setattr(job_lists, "MAX_SEARCHED", 2)
            pages = await all_answers(mcp, "list_jobs", {"query": "payload./all:1", "limit": 3})
            assert [ids_of(answer) for answer in pages] == [made[:1:-1], made[1::-1]]


async def test_a_search_for_dead_letters_ends_after_some_pages_and_says_how_to_go_on(
    maker: Maker, running: Running, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = [await maker.make("run") for _ in range(5)]
    for number, job_id in enumerate(failed):
        await maker.fail(job_id, "common" if number else "rare")
    monkeypatch.setattr(job_reads, "MAX_SEARCHED", 1, raising=False)
    monkeypatch.setattr(mcp_server, "_MAX_PAGES", 2)
    key = await create_key(rows, tenant_id="acme", client_id="mcp", scopes=("jobs:read", "runs:read"))
    async with asyncio.timeout(60), AsyncClient(running.url, key.text) as client:
        server = server_of(client, allow_writes=False)
        async with McpClient(server) as mcp:
            answers = await all_answers(mcp, "list_dead_letters", {"code": "rare"})
    found = [[letter["job_id"] for letter in answer["dead_letters"]] for answer in answers]
    assert found == [[], [], [str(failed[0])]]


async def all_answers(mcp: McpClient, tool: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of a tool that lists: each goes on where the one before has ended."""
    answers = [json.loads(text_of(await mcp.call_tool(tool, arguments)))]
    while "next_cursor" in answers[-1]:
        arguments = arguments | {"cursor": answers[-1]["next_cursor"]}
        answers.append(json.loads(text_of(await mcp.call_tool(tool, arguments))))
    return answers


def ids_of(answer: dict[str, Any]) -> list[str]:
    return [job["id"] for job in answer["jobs"]]


async def test_with_writes_each_tool_still_needs_its_scope(maker: Maker, running: Running, rows: Connection) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    reader = await parameters(running, rows, "jobs:read", "runs:read", arguments=("--allow-writes",))
    async with asyncio.timeout(60), McpClient(reader) as mcp:
        assert {tool.name for tool in (await mcp.list_tools()).tools} == READS | WRITES
        refused = await mcp.call_tool("retry_job", {"job_id": str(job_id)})
        assert (refused.is_error, "insufficient_scope" in text_of(refused)) == (True, True)
    writer = await parameters(running, rows, *TENANT_SCOPES, arguments=("--allow-writes",))
    async with asyncio.timeout(60), McpClient(writer) as mcp:
        assert "waiting_worker" in text_of(await mcp.call_tool("retry_job", {"job_id": str(job_id)}))
        for _ in range(2):
            submitted = await mcp.call_tool("submit_run", {"template": "outside", "key": "order 7"})
            assert "id" in text_of(submitted)
        assert "cancelled" in text_of(await mcp.call_tool("cancel_job", {"job_id": str(job_id)}))
    assert await rows.fetchval("SELECT count(*) FROM run") == 2


async def test_it_finds_the_dev_of_its_folder(
    running: Running, rows: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="mcp", scopes=("jobs:read",))
    monkeypatch.chdir(tmp_path)
    with dev_file({"LEASEHOLD_URL": running.url, "LEASEHOLD_API_KEY": key.text}):
        process = StdioServerParameters(
            command=sys.executable, args=["-m", "leasehold.cli.main", "mcp"], env=without_api(), cwd=tmp_path
        )
        async with asyncio.timeout(60), McpClient(process) as mcp:
            listed = await mcp.call_tool("list_jobs", {"query": "kind:run"})
    assert not listed.is_error


def test_the_key_of_the_dev_is_not_for_an_api_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEASEHOLD_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("LEASEHOLD_API_KEY", raising=False)
    with dev_file({"LEASEHOLD_URL": "http://127.0.0.1:2", "LEASEHOLD_API_KEY": "lh_of_the_dev"}):
        result = CliRunner().invoke(app, ["mcp"])
    assert (result.exit_code, "set LEASEHOLD_API_KEY" in result.stderr) == (2, True)


def without_api() -> dict[str, str]:
    """The environment of this process, which names no API."""
    return {name: value for name, value in os.environ.items() if name not in ("LEASEHOLD_URL", "LEASEHOLD_API_KEY")}


def test_without_a_key_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEASEHOLD_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["mcp"])
    assert (result.exit_code, "LEASEHOLD_API_KEY" in result.stderr) == (2, True)
