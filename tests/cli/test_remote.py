"""The command line speaks to a running API, tells refusals in a sentence, and prints JSON where it is asked to."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from leasehold.cli.running import FAILED, UNREACHABLE, WRONG_USE
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.worker.worker import Worker
from tests.api.conftest import Running
from tests.client.front import fronting
from tests.runs.conftest import SCOPES, running, runs_settings, worker  # noqa: F401 - fixtures

RUN = "00000000-0000-0000-0000-000000000000"


class Cli:
    def __init__(self, url: str, key: str) -> None:
        self._environment = os.environ | {"LEASEHOLD_URL": url, "LEASEHOLD_API_KEY": key, "COLUMNS": "300"}

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "leasehold.cli.main", *arguments, env=self._environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def said(self, *arguments: str) -> Any:
        code, out, err = await self(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
async def cli(running: Running, rows: Connection) -> Cli:  # noqa: F811 - fixtures
    key = await create_key(rows, tenant_id="acme", client_id="cli", scopes=SCOPES)
    return Cli(running.url, key.text)


async def test_a_run_is_submitted_watched_listed_and_explained(cli: Cli, worker: Worker) -> None:  # noqa: F811
    code, out, _ = await cli("submit", "scripted", '{"number": 3}', "--watch")
    assert code == 0
    assert "succeeded" in out
    (listed,) = (await cli.said("runs"))["runs"]
    explained = await cli.said("explain", listed["id"])
    assert explained["reasons"][0]["code"] == "ended"
    code, out, _ = await cli("explain", listed["id"])
    assert "The job has ended: succeeded." in out


async def test_a_failed_run_fails_its_watcher_and_is_replayed_by_its_fingerprint(
    cli: Cli,
    worker: Worker,  # noqa: F811
) -> None:
    code, out, _ = await cli("submit", "scripted", '{"do": "fail"}', "--watch")
    assert (code, "broken" in out) == (1, True)
    (group,) = (await cli.said("dead-letters", "list"))["groups"]
    replayed = await cli.said("dead-letters", "replay", group["fingerprint"], "--canary")
    assert len(replayed["replayed"]) == 1


async def test_schedules_queues_and_workers_are_seen_and_steered(cli: Cli, worker: Worker) -> None:  # noqa: F811
    made = await cli.said("schedules", "create", "scripted", "0 9 * * *", "--timezone", "Asia/Taipei")
    assert (await cli.said("schedules", "pause", made["id"]))["enabled"] is False
    assert (await cli("schedules", "resume", made["id"]))[1].startswith("next at 20")
    assert (await cli("schedules", "pause", made["id"]))[1] == "is paused\n"
    assert (await cli.said("schedules", "list"))["schedules"][0]["id"] == made["id"]
    await cli.said("queues", "pause", "default", "--reason", "a look")
    queues = {one["queue"]: one for one in (await cli.said("queues", "list"))["queues"]}
    assert queues["default"]["paused_because"] == "a look"
    (seen,) = (await cli.said("workers", "list"))["workers"]
    assert seen["id"] == str(worker.id)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("submit", "nothing"), "template_not_found"),
        (("cancel", "00000000-0000-0000-0000-000000000000"), "run_not_found"),
        (("schedules", "create", "scripted", "nonsense"), "invalid_cron"),
        (("runs", "--status", "nope"), "status: Input should be"),
        (("submit", "scripted", "{"), "not JSON"),
        (("submit", "scripted", '{"a": NaN}'), "the payload is not JSON: "),
        (("submit", "scripted", '{"a": 1e999}'), "the payload is not JSON: "),
        (("submit", "scripted", "[" * 100_000), "the payload is nested too deep"),
        (("submit", "scripted", '{"a": "\\ud800"}'), "the payload has a text that cannot be encoded as UTF-8"),
        (("submit", "\udcff"), "an argument has bytes that are not UTF-8 text"),
        (("queues", "pause", "a\udcff"), "an argument has bytes that are not UTF-8 text"),
        (("submit", "scripted", "--tag", "x"), "NAME=VALUE"),
        (("explain", "nonsense"), "'nonsense' is not the id of a run: an id looks like "),
        (("logs", "nonsense"), "'nonsense' is not the id of a job: an id looks like "),
        (("jobs", "cancel", "nonsense"), "'nonsense' is not the id of a job: an id looks like "),
        (("jobs", "settle", "nonsense", "--again"), "'nonsense' is not the id of a job: an id looks like "),
        (("operations", "show", "nonsense"), "'nonsense' is not the id of an operation: an id looks like "),
        (("schedules", "pause", "nonsense"), "'nonsense' is not the id of a schedule: an id looks like "),
        (("workers", "drain", "nonsense"), "'nonsense' is not the id of a worker: an id looks like "),
    ],
)
async def test_a_refusal_is_a_sentence_and_an_exit_code(cli: Cli, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, err = await cli(*arguments)
    wrong_use = ("not JSON", "NAME=VALUE", "is not the id of", "the payload ", "an argument has bytes")
    is_wrong_use = any(words in sentence for words in wrong_use)
    assert (code, out) == (WRONG_USE if is_wrong_use else FAILED, "")
    assert err.endswith("\n")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("page", "answered 200 without JSON: is it a Leasehold API?"),
        ("list", "answered 200 with JSON that is not an object: is it a Leasehold API?"),
        ("refusing list", "answered 400 with JSON that is not an object: is it a Leasehold API?"),
        ("another object", "answered 200 with JSON that has no 'runs': is it a Leasehold API?"),
        ("no errors", "invalid_request: no"),
        ("moved", "307: no reason given"),
    ],
)
async def test_an_answer_of_another_server_is_a_sentence(running: Running, answer: str, sentence: str) -> None:  # noqa: F811
    async with fronting(running.url) as front:
        front.failures = [answer]
        code, _, err = await Cli(front.url, "lh_x_y")("runs")
    assert (code, err.strip().endswith(sentence)) == (FAILED, True), err


@pytest.mark.parametrize(
    ("answer", "arguments", "sentence"),
    [
        ("503", ("runs",), "database_unavailable: away"),
        ("429", ("cancel", RUN), "rate_limited: too many"),
        ("502", ("logs", RUN, "--follow"), "502: no reason given"),
        ("503", ("watch", RUN), "database_unavailable: away"),
        ("break", ("watch", RUN), "does not answer: Server disconnected without sending a response."),
    ],
)
async def test_what_cannot_be_answered_now_may_be_tried_again(
    running: Running,  # noqa: F811
    answer: str,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    async with fronting(running.url) as front:
        front.failures = [answer]
        code, _, err = await Cli(front.url, "lh_x_y")(*arguments)
    assert (code, err.strip().endswith(sentence), len(front.seen)) == (UNREACHABLE, True, 1), err


@pytest.mark.parametrize(("is_submitted", "as_json"), [(True, ()), (True, ("--json",)), (False, ())])
async def test_a_run_is_watched_through_failures_of_the_api(
    running: Running,  # noqa: F811
    rows: Connection,
    is_submitted: bool,
    as_json: tuple[str, ...],
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="cli", scopes=SCOPES)
    direct = Cli(running.url, key.text)
    arguments: tuple[str, ...] = ("submit", "scripted", "--watch")
    if not is_submitted:
        arguments = ("watch", (await direct.said("submit", "scripted"))["id"])
    async with fronting(running.url) as front:
        front.failures = ["", "503", "break", "502", "429"]
        watching = asyncio.create_task(Cli(front.url, key.text)(*arguments, *as_json))
        while front.failures and not watching.done():
            await asyncio.sleep(0.01)
        await direct("cancel", str(await rows.fetchval("SELECT id FROM job")))
        code, out, err = await watching
    assert (code, "cancelled" in out) == (FAILED, True)
    assert not as_json or json.loads(out)["status"] == "cancelled"
    assert err.splitlines() == [
        "leasehold: database_unavailable: away. Trying again until the API answers.",
        "leasehold: The API answers again.",
    ]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(("submit", "scripted", "--watch"), "id"), (("watch", RUN), "progress"), (("jobs", "list"), "jobs")],
)
async def test_an_object_of_another_server_is_a_sentence_of_every_command(
    running: Running,  # noqa: F811
    arguments: tuple[str, ...],
    field: str,
) -> None:
    async with fronting(running.url) as front:
        front.failures = ["another object"]
        code, _, err = await Cli(front.url, "lh_x_y")(*arguments)
    assert (code, f"JSON that has no '{field}'" in err, "Traceback" in err) == (FAILED, True, False), err


async def test_an_export_that_is_sent_elsewhere_fails(running: Running, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "audit"
    async with fronting(running.url) as front:
        front.failures = ["moved"]
        code, out, err = await Cli(front.url, "lh_x_y")("audit", "export", str(file))
    assert (code, out, "307: no reason given" in err) == (FAILED, "", True), err
    assert not await asyncio.to_thread(file.exists)


async def test_without_a_key_or_an_api_it_says_so() -> None:
    code, _, err = await Cli("http://127.0.0.1:9", "")("runs")
    assert (code, "LEASEHOLD_API_KEY" in err) == (WRONG_USE, True)
    code, _, err = await Cli("http://127.0.0.1:9", "lh_x_y")("runs")
    assert (code, "does not answer" in err) == (UNREACHABLE, True)
