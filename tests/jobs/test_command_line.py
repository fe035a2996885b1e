"""`leasehold jobs`: the same surface, on the command line."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner, Result

from leasehold.cli.main import app
from leasehold.cli.running import WRONG_USE
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.transitions import settlements
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.logs import append as append_log
from leasehold.transitions.settlements import Failure
from tests.api.conftest import Running
from tests.client.front import fronting
from tests.jobs.conftest import TENANT_SCOPES, Maker
from tests.jobs.test_job_logs import line

pytestmark = pytest.mark.usefixtures("own_width")

Cli = Callable[..., Awaitable[Result]]
ANY_ID = "0199d3f0-6c1e-7a52-9d1b-3f6a2b8c4d5e"
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[")


@pytest.fixture
async def cli(running: Running, rows: Connection) -> Cli:
    key = await create_key(rows, tenant_id="acme", client_id="cli", scopes=sorted(TENANT_SCOPES))
    environment = {"LEASEHOLD_URL": running.url, "LEASEHOLD_API_KEY": key.text, "COLUMNS": "300"}

    async def call(*arguments: str) -> Result:
        group = () if arguments[0] == "operations" else ("jobs",)
        return await asyncio.to_thread(CliRunner().invoke, app, [*group, *arguments], env=environment)

    return call


async def said(cli: Cli, *arguments: str) -> Any:
    result = await cli(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(last_line(result))


def last_line(result: Result) -> str:
    """The API logs in this process, too: before the command's line, and a moment after its own answer."""
    return [line for line in result.stdout.splitlines() if not LOGGED.match(line)][-1]


async def test_a_failed_picture_is_found_explained_and_retried(cli: Cli, maker: Maker) -> None:
    job_id = str(await maker.make("media", tags={"order": "7"}))
    await maker.fail(await maker.make("run"))
    assert [job["id"] for job in (await said(cli, "list", "kind:media", "tag.order:7"))["jobs"]] == [job_id]
    counted = await cli("list", "--count")
    assert "2 jobs match" in counted.stdout
    assert (await said(cli, "explain", job_id))["reasons"]
    assert (await said(cli, "events", job_id))["events"][0]["kind"] == "submitted"
    claimed = await maker.claim(await maker.rows.fetchval("SELECT id FROM job WHERE pipeline = 'media'"))
    assert (await said(cli, "get", job_id))["steps"][0]["worker"] == str(claimed.lease.owner)


async def test_a_job_is_retried_cancelled_and_deleted(cli: Cli, maker: Maker) -> None:
    job_id = await maker.make("media")
    await maker.fail(job_id)
    shown = await cli("get", str(job_id))
    assert "broken: It did not work." in shown.stdout
    assert last_line(await cli("retry", str(job_id), "--from-step", "resize")) == "queued"
    assert last_line(await cli("cancel", str(job_id), "--reason", "enough")) == "cancelled"
    assert last_line(await cli("delete", str(job_id))) == "deleted"
    gone = await cli("get", str(job_id))
    assert (gone.exit_code, "job_deleted" in gone.stderr) == (1, True)


async def test_a_wrong_filter_is_pointed_at_before_anybody_is_asked(cli: Cli) -> None:
    result = await cli("list", "kind:media", "statuss:failed")
    assert result.exit_code == WRONG_USE
    first, second, third = result.stderr.splitlines()[:3]
    assert (first, second) == ("kind:media statuss:failed", "           ^")
    assert "There is no term `statuss:`" in third


async def test_the_log_of_a_job_is_printed_and_followed(running: Running, maker: Maker, rows: Connection) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="cli", scopes=sorted(TENANT_SCOPES))
    environment = {"LEASEHOLD_URL": running.url, "LEASEHOLD_API_KEY": key.text, "COLUMNS": "300"}

    async def logs(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["logs", *arguments], env=environment)

    job_id = await maker.make("run")
    claimed = await maker.claim(job_id)
    lines = [line("one"), line("two", fields={"hats": 2}, traceback="Traceback\nValueError: three\n")]
    await append_log(rows, [LogChunk(claimed.lease.task_id, 1, 1, 1, lines)])
    printed = await logs(str(job_id))
    assert "a#1 info    shop: one\n" in printed.stdout
    assert "shop: two hats=2\nTraceback\nValueError: three\n" in printed.stdout
    as_json = [json.loads(text) for text in (await logs(str(job_id), "--json")).stdout.splitlines() if '"n"' in text]
    assert [entry["message"] for entry in as_json] == ["one", "two"]
    assert "one" not in (await logs(str(job_id), "--after", "1")).stdout
    following = asyncio.create_task(logs(str(job_id), "--follow"))
    await append_log(rows, [LogChunk(claimed.lease.task_id, 1, 1, 3, [line("three")])])
    await settlements.fail(rows, [Failure(claimed.lease, "error", "broken", "It did not work.", False, 0.0)])
    async with asyncio.timeout(60):
        followed = await following
    assert followed.exit_code == 0
    assert [word for word in ("one", "two", "three") if f"shop: {word}" in followed.stdout] == ["one", "two", "three"]
    missing = await logs("01a20382-ea04-742b-b35b-91b46ec7bc5b")
    assert (missing.exit_code, "job_not_found" in missing.stderr) == (1, True)


@pytest.mark.parametrize("failures", [[], ["", "503", "429", "502", "break", "", "503"]])
async def test_a_quiet_job_is_followed_through_streams_that_end_and_failures_of_the_api(
    running: Running, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch, failures: list[str]
) -> None:
    monkeypatch.setattr("leasehold.api.jobs.following.MAX_SECONDS", 0.2)
    monkeypatch.setattr("leasehold.api.jobs.following.KEEP_ALIVE", 0.1)
    monkeypatch.setattr("leasehold.cli.logs._PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("leasehold.cli.api_client._PAUSE_SECONDS", 0.1)
    key = await create_key(rows, tenant_id="acme", client_id="cli", scopes=sorted(TENANT_SCOPES))
    claimed = await maker.claim(job_id := await maker.make("run"))
    async with fronting(running.url) as front:
        front.failures = list(failures)
        environment = {"LEASEHOLD_URL": front.url, "LEASEHOLD_API_KEY": key.text, "COLUMNS": "300"}
        arguments = ["logs", str(job_id), "--follow"]
        command = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment))
        while (front.failures or len(front.seen) < 5) and not command.done():
            await asyncio.sleep(0.01)
        await append_log(rows, [LogChunk(claimed.lease.task_id, 1, 1, 1, [line("at last")])])
        await settlements.fail(rows, [Failure(claimed.lease, "error", "broken", "It did not work.", False, 0.0)])
        async with asyncio.timeout(60):
            followed = await command
    assert (followed.exit_code, "shop: at last" in followed.stdout) == (0, True), followed.output


async def test_all_that_match_are_retried_as_an_operation_that_is_shown_and_aborted(cli: Cli, maker: Maker) -> None:
    broken = [str(await maker.make("media")) for _ in range(3)]
    for job_id in broken:
        await maker.fail(UUID(job_id))
    preview = await cli("retry", "--filter", "kind:media", "--dry-run")
    assert "3 jobs" in preview.stdout
    assert broken[0] in preview.stdout
    operation = last_line(await cli("retry", "--filter", "kind:media", "--canary", "1", "--rate", "5"))
    shown = await said(cli, "operations", "show", operation)
    assert (shown["action"], shown["filter"], shown["rate"], shown["canary"]["jobs"]) == ("retry", "kind:media", 5, 1)
    assert [listed["id"] for listed in (await said(cli, "operations", "list"))["operations"]] == [operation]
    assert "kind:media" in (await cli("operations", "show", operation)).stdout
    assert (await cli("operations", "abort", broken[0])).exit_code == 1
    assert last_line(await cli("operations", "abort", operation)) == "cancelled"
    for action in ("cancel", "delete"):
        body = await said(cli, action, "--filter", "kind:media created:>1h")
        assert body["action"] == action


@pytest.mark.parametrize("action", ["retry", "cancel", "delete"])
async def test_a_rate_of_nothing_is_not_a_rate_without_a_limit(cli: Cli, action: str) -> None:
    refused = await cli(action, "--filter", "kind:media", "--rate", "0", "--dry-run")
    assert (refused.exit_code, "invalid_request" in refused.stderr) == (1, True), refused.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("retry",), "name one job"),
        (("cancel", ANY_ID, "--filter", "kind:media"), "name one job"),
        (("retry", "--filter", "kind:media", "--from-step", "a"), "for one job"),
        (("retry", "--filter", "kind:media", "--payload", ""), "for one job"),
        (("retry", "--filter", "kind:media", "--from-step", ""), "for one job"),
        (("delete", ANY_ID, "--dry-run"), "go with --filter"),
        (("cancel", ANY_ID, "--rate", "0"), "go with --filter"),
        (("retry", ANY_ID, "--canary", "0"), "go with --filter"),
        (("cancel", ANY_ID, "--idempotency-key", ""), "go with --filter"),
        (("delete", "--filter", "kindd:media"), "There is no term"),
    ],
)
async def test_options_that_do_not_fit_are_refused(cli: Cli, arguments: tuple[str, ...], sentence: str) -> None:
    result = await cli(*arguments)
    assert (result.exit_code, sentence in result.stderr) == (WRONG_USE, True)
