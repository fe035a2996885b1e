"""The API keeps its own document: a fuzzer reads /openapi.json, and asks a running API whatever comes to its mind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import hypothesis
import pytest
import schemathesis
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.api.app import make_app
from leasehold.api.auth import security
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import workers
from tests.api.conftest import Running, client_of, serving
from tests.api.driver import finish_all
from tests.api.fuzz_hooks import change, judge_null_rightly
from tests.api.media_api import MediaApi, problem
from tests.api.test_conversion_result import convert
from tests.support.seeds import seed_of_this_commit

CONFIG = Path(__file__).with_name("schemathesis.toml")
ROOT = Path(__file__).parent.parent.parent
SECONDS = 300  # it takes 75 to 90 on two cores
#: What schemas cannot say: a file of a form that has to have a name ending in .onnx, and an order whose answer a killed
#: worker lost (tests/generation/test_settling.py).
NEVER = frozenset({"createConversion", "settleJob"})
ONE_EXAMPLE = hypothesis.settings(max_examples=1, database=None, deadline=None, derandomize=True)
UNTIL_FOUND = hypothesis.settings(ONE_EXAMPLE, max_examples=2000)
SCOPES = tuple(value for name, value in vars(security).items() if name.isupper() and ":" in str(value))


@pytest.fixture
async def everything(settings: Settings, tmp_path: Path) -> AsyncIterator[Running]:
    """An API with every endpoint open. It is a cell, alone in its map."""
    cells = tmp_path / "cells.json"
    await asyncio.to_thread(cells.write_text, '{"cells": {"a": "http://127.0.0.1:9"}}')
    configured = settings.model_copy(
        update={
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "generation_credentials": {"jimeng": SecretStr("id:secret")},
            "generation_provider": "jimeng",
            "egress_allow": "127.0.0.0/8",
            "log_level": "error",
            "cell": "a",
            "cells_file": str(cells),
            "conversion_posts_per_key": 6000,
            "webhooks_per_tenant": 10_000,
            "operations_per_tenant": 10_000,
            "schedules_per_tenant": 10_000,
            "limits_per_tenant": 10_000,
            "promote_bucket": f"{settings.s3_bucket}-served",
        }
    )
    served = ObjectStore.from_settings(configured.model_copy(update={"s3_bucket": configured.promote_bucket}))
    await served.open()
    await served.ensure_bucket()
    async with serving(configured) as running:
        yield running
    await served.close()


@pytest.fixture
async def client(everything: Running, rows: Connection) -> AsyncIterator[httpx2.AsyncClient]:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with client_of(everything.url, key.text) as client:
        yield client


@pytest.fixture
async def things(everything: Running, client: httpx2.AsyncClient, rows: Connection) -> dict[str, list[str]]:
    """What a client alone cannot make: see tests/api/fuzz_things.py."""
    media = MediaApi(client)
    pictures = [await media.submitted() for _ in range(3)]
    for picture in pictures:
        await finish_all(rows, picture.media_id)
    paths = [await convert(client, rows, everything, user=f"made-{number}") for number in range(4)]
    ids = [new_id() for _ in range(3)]
    for worker in ids:
        await workers.register(rows, worker, host="h", pid=1, version="v", queues=["default"])
    somebody = [new_id() for _ in range(3)]
    for person in somebody:
        await rows.execute(
            "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes)"
            " VALUES ($1, 'acme', 'https://id.example', $2, $2, 'Somebody', '{role:viewer}')",
            person, str(person),
        )  # fmt: skip
    return {
        "people": [str(person) for person in somebody],
        "media": [picture.media_id for picture in pictures],
        "conversions": [path.rpartition("/")[2] for path in paths],
        "workers": [str(worker) for worker in ids],
    }


def unmet(answers: dict[str, dict[str, int]]) -> list[str]:
    """The operations that never did what they are for."""
    document = make_app(Settings(_env_file=None)).openapi()
    names = {one["operationId"] for item in document["paths"].values() for one in item.values()}
    return sorted(name for name in names - NEVER if not any(status.startswith("2") for status in answers.get(name, ())))


def summary(answers: dict[str, dict[str, int]]) -> str:
    lines = [
        f"  {name:28}" + "  ".join(f"{status}: {count}" for status, count in sorted(met.items()))
        for name, met in sorted(answers.items())
    ]
    return "\n".join(["what each operation answered:", *lines])


@pytest.mark.timeout(SECONDS + 60)
async def test_the_fuzzer_finds_nothing(
    everything: Running, rows: Connection, things: dict[str, list[str]], tmp_path: Path
) -> None:
    """Each commit looks elsewhere. LEASEHOLD_TEST_FUZZ_SEED says where; LEASEHOLD_TEST_FUZZ_ARGS adds to the command"""
    seed = os.environ.get("LEASEHOLD_TEST_FUZZ_SEED") or str(await asyncio.to_thread(seed_of_this_commit))
    key = await create_key(rows, tenant_id="acme", client_id="fuzzer", scopes=SCOPES)
    answers = tmp_path / "answers.json"
    told = {
        "NO_COLOR": "1",
        "COLUMNS": "120",
        "PYTHONPATH": str(ROOT),
        "LEASEHOLD_FUZZ_KEY": key.text,
        "LEASEHOLD_FUZZ_URL": everything.url,
        "LEASEHOLD_FUZZ_SEED": seed,
        "LEASEHOLD_FUZZ_THINGS": json.dumps(things),
        "LEASEHOLD_FUZZ_ANSWERS": str(answers),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG),
        "run", f"{everything.url}/openapi.json", "--seed", seed,
        *os.environ.get("LEASEHOLD_TEST_FUZZ_ARGS", "").split(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
        env={**os.environ, **told, "SCHEMATHESIS_HOOKS": "tests.api.fuzz_hooks"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(SECONDS):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report = said.decode(errors="replace")
    sys.stdout.write(f"LEASEHOLD_TEST_FUZZ_SEED={seed}\n{report[report.rfind('= SUMMARY =') :]}")
    met = json.loads(answers.read_text())
    sys.stdout.write(summary(met))
    assert process.returncode == 0, f"LEASEHOLD_TEST_FUZZ_SEED={seed}\n{report[-20_000:]}"
    assert unmet(met) == [], "these never answered 2xx: give tests/api/fuzz_things.py what they need"


@pytest.mark.parametrize(
    ("path", "allows_null"),
    [("/v1/runs/{run_id}/signals/{name}", True), ("/v1/jobs/{job_id}/cancel", True), ("/v1/runs", False)],
)
def test_null_is_a_violation_for_the_fuzzer_only_where_a_body_is_needed(path: str, allows_null: bool) -> None:
    document = make_app(Settings(_env_file=None)).openapi()
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    case = hypothesis.find(operation.as_strategy(), lambda _: True, settings=ONE_EXAMPLE)
    case.body = None  # as a link does
    judge_null_rightly(case)
    assert case.meta is not None
    assert case.meta.generation.mode.is_positive == allows_null
    assert case.body == ({} if allows_null else None)


def test_a_name_with_a_colon_stays_valid_for_the_fuzzer_when_the_run_beside_it_is_put_in() -> None:
    document = make_app(Settings(_env_file=None)).openapi()
    operation = schemathesis.openapi.from_dict(document)["/v1/runs/{run_id}/signals/{name}"]["POST"]
    case = hypothesis.find(
        operation.as_strategy(), lambda case: "%3A" in case.path_parameters["name"], settings=UNTIL_FOUND
    )
    name = case.path_parameters["name"].replace("%3A", ":")
    run = str(new_id())
    change(case, "path_parameters", {"run_id": run})
    assert case.path_parameters == {"run_id": run, "name": name}
    assert case.meta is not None
    assert case.meta.generation.mode.is_positive


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/runs", "GET, POST"),
        ("PUT", "/v1/schedules/01a20296-efa1-77b5-9562-ef1771e31abb", "DELETE, GET, PATCH"),
        ("GET", "/v1/runs/batch", "POST"),
        ("PATCH", "/v1/runs/batch", "POST"),
        ("GET", "/v1/dead-letters/replay", "POST"),
        ("OPTIONS", "/api/v1/jobs", "GET, POST"),
        ("POST", "/livez", "GET"),
    ],
)
async def test_a_method_that_an_address_does_not_know_is_told_all_that_it_knows(
    client: httpx2.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await client.request(method, path)
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/external/claim", {"worker_id": "w", "queues": ["q"], "wait": False}),
        ("POST", "/v1/external/claim", {"worker_id": "w", "queues": ["q"], "limit": "1"}),
        ("PUT", "/v1/limits", {"key": "tenant", "at_most": True}),
        ("PUT", "/v1/limits", {"key": "tenant", "per_minute": "5"}),
        ("PUT", "/v1/limits", {"key": "tenant", "at_most": None}),
        ("POST", "/v1/templates", {"type": "t", "steps": [{"id": "a"}], "schedulable": 0}),
        ("POST", "/v1/templates", {"type": "t", "steps": [{"id": "a", "timeout_seconds": True}]}),
        ("POST", "/v1/runs", {"template": "t", "version": 32_768}),
        ("POST", "/v1/runs", {"template": "t", "version": 10**15}),
        ("POST", "/v1/runs", {"template": "t", "version": True}),
        ("POST", "/v1/runs", {"template": "t", "scheduled_at": 1_795_000_000}),
        ("POST", "/v1/runs", {"template": "t", "scheduled_at": "1795000000"}),
        ("POST", "/v1/runs", {"template": "t", "scheduled_at": "2026-11-22"}),
        ("POST", "/v1/runs", {"template": "t", "delay_seconds": 0}),
        ("POST", "/v1/runs", {"template": "t", "delay_seconds": "5"}),
        ("POST", "/v1/runs", {"template": "t", "delay_seconds": True}),
        ("POST", "/v1/runs", {"template": "t", "delay_seconds": 3660 * 86_400 + 1}),
        ("POST", "/v1/runs/batch", {"template": "t", "version": 10**15, "runs": [{}]}),
        ("POST", "/v1/schedules", {"template": "t", "cron": "@daily", "version": 10**15}),
        ("POST", "/v1/external/tasks/01a20296-efa1-77b5-9562-ef1771e31abb/complete",
         {"worker_id": "w", "epoch": 2**31}),
        ("POST", "/v1/images/query", {"task_id": "order-1", "consume": 0}),
    ],
)  # fmt: skip
async def test_what_breaks_the_schema_is_refused(
    client: httpx2.AsyncClient, method: str, path: str, body: dict[str, Any]
) -> None:
    problem(await client.request(method, path, json=body), 422, "invalid_request")


async def test_a_version_beyond_its_column_is_the_version_of_nothing(client: httpx2.AsyncClient) -> None:
    for version in (0, -1, 32_768, 2**31, 2**63, 10**30):
        problem(await client.get(f"/v1/templates/t/{version}"), 404, "not_found")
        answer = await client.patch(f"/v1/templates/t/{version}", json={"enabled": True})
        problem(answer, 404, "not_found")


async def test_any_cursor_of_the_documented_form_and_those_of_before_are_taken(client: httpx2.AsyncClient) -> None:
    for cursor in ("A" * 22, "_" * 21 + "w", "MDFhMjAyOTYtZWZhMS03N2I1LTk1NjItZWYxNzcxZTMxYWJi"):
        for path in ("/v1/runs", "/v1/schedules"):
            assert (await client.get(path, params={"cursor": cursor})).status_code == 200
    before = "MjAyNi0xMS0yMlQxMDowMDowMCswMDowMAowMWEyMDI5Ni1lZmExLTc3YjUtOTU2Mi1lZjE3NzFlMzFhYmI"
    for cursor in ("A" * 32, "f" + "_" * 31, "g" + "_" * 31, before):
        assert (await client.get("/v1/dead-letters", params={"cursor": cursor})).status_code == 200
    for cursor in ("A" * 21, "A" * 33, "!" * 22, "\u00e9" * 22):
        problem(await client.get("/v1/runs", params={"cursor": cursor}), 422, "invalid_cursor")
        problem(await client.get("/v1/dead-letters", params={"cursor": cursor}), 422, "invalid_cursor")


def test_every_link_leads_from_an_answer_to_an_operation_that_takes_its_value() -> None:
    document = make_app(Settings(_env_file=None)).openapi()
    by_name = {one["operationId"]: one for item in document["paths"].values() for one in item.values()}
    linked = [
        (name, link)
        for name, operation in by_name.items()
        for answer in operation["responses"].values()
        for link in answer.get("links", {}).values()
    ]
    assert len(linked) > 30
    for name, link in linked:
        takes = {one["name"] for one in by_name[link["operationId"]].get("parameters", [])}
        assert link.get("parameters", {}).keys() <= takes, name


def test_the_document_names_what_the_edge_answers_for_every_operation() -> None:
    document = make_app(Settings(_env_file=None)).openapi()
    for path, item in document["paths"].items():
        for operation in item.values():
            wanted = {"401", "403", "422", "431", "500", "503"}
            wanted |= {"404"} if "{" in path else set()
            wanted |= {"400", "408", "413", "415"} if "requestBody" in operation else set()
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            wanted |= {"409"} if "Idempotency-Key" in names else set()
            assert wanted <= operation["responses"].keys(), operation["operationId"]


def test_the_document_names_every_code_that_a_key_of_a_request_or_a_wrong_value_is_answered_with() -> None:
    document = make_app(Settings(_env_file=None)).openapi()
    codes = {"409": ["idempotency_key_in_flight"], "422": ["idempotency_key_reused", "idempotency_key_malformed"]}
    keyed = 0
    for item in document["paths"].values():
        for operation in item.values():
            texts = {status: answer["description"] for status, answer in operation["responses"].items()}
            parameters = operation.get("parameters", ())
            has_json = "application/json" in operation.get("requestBody", {}).get("content", {})
            if has_json or any(parameter["in"] == "query" for parameter in parameters):
                assert "`invalid_request`" in texts["422"], operation["operationId"]
            if any(parameter["name"] == "Idempotency-Key" for parameter in parameters):
                keyed += 1
                missing = [(at, code) for at, of in codes.items() for code in of if texts[at].count(f"`{code}`") != 1]
                assert missing == [], operation["operationId"]
    assert keyed > 15


def test_every_bound_gets_into_the_document() -> None:
    """Pydantic writes `ge` for `minimum` where a bound stands after a validator."""
    document = make_app(Settings(_env_file=None)).openapi()
    waiting: list[Any] = [document]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            assert not {"ge", "le", "gt", "lt"} & found.keys(), found
        waiting += found.values() if isinstance(found, dict) else found if isinstance(found, list) else []


async def test_a_nul_character_in_a_text_has_a_code_of_its_own(client: httpx2.AsyncClient) -> None:
    """The schema of a text allows it, so it is not `invalid_request`."""
    answer = await client.post("/v1/templates", json={"type": "t", "name": "a\u0000b", "steps": [{"id": "a"}]})
    problem(answer, 422, "text_not_storable")
