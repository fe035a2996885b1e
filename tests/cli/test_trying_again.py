"""A command that makes something makes it once, although its answer was lost, and says how to try it again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import httpx2
import pytest
from typer.testing import CliRunner, Result

from leasehold.cli.main import app
from leasehold.cli.running import FAILED, UNREACHABLE, WRONG_USE
from leasehold.db.database import Connection
from leasehold.limits.admission import Admission
from leasehold.security.credentials import create_key
from tests.api.conftest import Running
from tests.client.front import Front, fronting
from tests.jobs.conftest import TENANT_SCOPES, Maker, client, client_with, maker, running

__all__ = ["client", "client_with", "maker", "running"]  # fixtures
SUBMIT = ("submit", "outside", '{"n": 1}')
OPTION = re.compile(r"--idempotency-key (\w+)")


class Cli:
    """Commands that reach the API through `front`."""

    def __init__(self, front: Front, key: str) -> None:
        self.front = front
        self._environment = {"LEASEHOLD_URL": front.url, "LEASEHOLD_API_KEY": key, "COLUMNS": "300"}

    async def __call__(self, *arguments: str, failures: tuple[str, ...] = ()) -> Result:
        self.front.failures, self.front.seen = list(failures), []
        return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=self._environment)

    def keys(self) -> list[str | None]:
        """The idempotency keys of the command's requests."""
        return [key for _, _, key in self.front.seen]


@pytest.fixture
async def cli(
    running: Running,
    rows: Connection,
    maker: Maker,
    client: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Cli]:
    monkeypatch.setattr("leasehold.cli.api_client._PAUSE_SECONDS", 0.01)
    await maker.make("run")  # and the template `outside`
    key = await create_key(rows, tenant_id="acme", client_id="cli", scopes=sorted(TENANT_SCOPES))
    async with fronting(running.url) as front:
        yield Cli(front, key.text)


@pytest.mark.parametrize(
    "failures", [("lose",), ("502",), ("503",), ("break",), ("in flight",), ("lose", "503", "429", "lose")]
)
async def test_a_run_is_started_once_whatever_the_network_does(
    cli: Cli, rows: Connection, failures: tuple[str, ...]
) -> None:
    runs = await rows.fetchval("SELECT count(*) FROM run")
    submitted = await cli(*SUBMIT, failures=failures)
    assert submitted.exit_code == 0, submitted.output
    # It does not wait without a word. Its stdout is for scripts.
    assert submitted.stderr.count("Trying again for up to 20 s.") == 1
    assert submitted.stderr.count("The API answers again.") == 1
    assert "again" not in submitted.stdout
    assert await rows.fetchval("SELECT count(*) FROM run") == runs + 1
    assert len(cli.keys()) == len(failures) + 1
    (key,) = set(cli.keys())
    again = await cli(*SUBMIT)
    assert (again.exit_code, cli.keys() == [key]) == (0, False)  # another command starts another run
    assert await rows.fetchval("SELECT count(*) FROM run") == runs + 2


async def test_a_command_whose_answer_is_lost_for_good_says_how_to_try_it_again(
    cli: Cli, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = await rows.fetchval("SELECT count(*) FROM run")
    monkeypatch.setattr("leasehold.cli.api_client._REPEAT_SECONDS", 0.1)
    lost = await cli(*SUBMIT, failures=("lose",) * 1000)
    assert lost.exit_code == UNREACHABLE, lost.output
    option = OPTION.search(lost.stderr)
    assert option is not None, lost.stderr
    assert set(cli.keys()) == {option[1]}
    again = await cli(*SUBMIT, *option[0].split())
    assert (again.exit_code, cli.keys()) == (0, [option[1]])
    assert await rows.fetchval("SELECT count(*) FROM run") == runs + 1
    own = await cli(*SUBMIT, "--idempotency-key", "order 7", failures=("lose",) * 1000)
    assert (own.exit_code, "--idempotency-key 'order 7': then" in own.stderr) == (UNREACHABLE, True), own.stderr
    another = await cli("submit", "outside", '{"n": 2}', *option[0].split())
    assert (another.exit_code, "idempotency_key_reused" in another.stderr) == (FAILED, True)


@pytest.mark.parametrize("failure", ["429", "nobody"])
async def test_what_is_surely_not_done_is_not_sent_again(cli: Cli, failure: str, running: Running) -> None:
    if failure == "nobody":
        cli._environment["LEASEHOLD_URL"] = "http://127.0.0.1:9"
    refused = await cli(*SUBMIT, failures=(failure,))
    assert (refused.exit_code, OPTION.search(refused.stderr)) == (UNREACHABLE, None), refused.output
    assert len(cli.keys()) == (0 if failure == "nobody" else 1)


async def test_a_key_of_the_caller_makes_each_command_safe_to_try_again(cli: Cli, rows: Connection) -> None:
    made = await cli("schedules", "create", "outside", "0 9 * * *")
    schedule = str(await rows.fetchval("SELECT id FROM schedule"))
    assert schedule in made.stdout
    counts = {"run": "SELECT count(*) FROM run", "schedule": "SELECT count(*) FROM schedule",
              "operation": "SELECT count(*) FROM job WHERE pipeline = 'bulk_operation'"}  # fmt: skip
    commands = [
        ("run", SUBMIT),
        ("schedule", ("schedules", "create", "outside", "0 8 * * *")),
        ("run", ("schedules", "run-now", schedule)),
        *(("operation", ("jobs", action, "--filter", "kind:media")) for action in ("retry", "cancel", "delete")),
    ]
    for number, (what, command) in enumerate(commands):
        before = await rows.fetchval(counts[what])
        for _ in range(2):
            done = await cli(*command, "--idempotency-key", f"order {number}", failures=("lose",))
            assert (done.exit_code, set(cli.keys())) == (0, {f"order {number}"}), done.output
        assert await rows.fetchval(counts[what]) == before + 1, command


@pytest.mark.parametrize("key", ["", " a", "a\n", "é", "a" * 256])
async def test_a_key_that_no_request_can_have_is_refused_at_once(cli: Cli, key: str) -> None:
    refused = await cli(*SUBMIT, "--idempotency-key", key)
    assert (refused.exit_code, "A key has 1 to 255" in refused.stderr, cli.keys()) == (WRONG_USE, True, [])


async def test_a_replay_of_dead_letters_whose_answer_is_lost_replays_no_further_ones(
    cli: Cli, maker: Maker, running: Running
) -> None:
    for place in range(4):
        await maker.fail(await maker.make("run", scope="user", scope_id=str(place)))
    (group,) = (await maker.client.get("/v1/dead-letters/groups")).json()["groups"]
    replay = ("dead-letters", "replay", group["fingerprint"])
    canary = await cli(*replay, "--canary", failures=("lose",))
    assert (canary.exit_code, len(cli.keys())) == (0, 2), canary.output
    assert canary.stdout.endswith("\nreplayed 1\n")  # after the log of the API, which runs in this process
    services = running.services
    limited = services.settings.model_copy(update={"submissions_per_tenant": 2})
    services.admission = Admission(limited, services.kinds)
    rest = await cli(*replay, failures=("lose",))
    assert rest.exit_code == 0, rest.output
    assert rest.stdout.endswith("\nreplayed 2\nleft 1: At most 2 submissions a minute.\n")
