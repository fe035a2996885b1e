"""A fifth kind of work, from outside the package: rows, endpoints, retention, a metric and a setting of its own, and no
file of the platform knows of it. `tests/kinds/outside/printing` is all there is to it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
from pydantic import SecretStr

from leasehold.db.database import Connection
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

HERE = Path(__file__).parent / "outside"
ROOT = Path(__file__).parent.parent.parent
PASSED = datetime.now(UTC) - timedelta(hours=1)
WITHIN = 60.0


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    """Of a machine where the kind's package lies in the current folder."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    for name in ("database_url", "s3_endpoint", "s3_bucket", "s3_access_key", "s3_secret_key"):
        value = getattr(settings, name)
        given[f"LEASEHOLD_{name.upper()}"] = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    return given | {
        "LEASEHOLD_BROKER": "postgres",
        "LEASEHOLD_PIPELINES": "printing:pipelines",
        "LEASEHOLD_METRICS_PUBLIC": "true",
        "LEASEHOLD_POLL_SECONDS": "0.1",
        "LEASEHOLD_PRINTING_MOST_COPIES": "7",
    }


async def leasehold(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "leasehold.cli.main", *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, cwd=HERE, env=environment, capture_output=True, text=True, check=False, timeout=180
    )


@asynccontextmanager
async def running(environment: dict[str, str], module: str, *arguments: str) -> AsyncIterator[None]:
    """The process, told to stop at the end; it must have met no error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", module, *arguments,
        cwd=HERE, env=environment | {"LEASEHOLD_LOG_FORMAT": "json"}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    reading = asyncio.create_task(process.communicate())
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        log = (await reading)[1].decode()
        print(log)  # noqa: T201 - pytest shows it where the test fails
    assert process.returncode == 0, log
    assert '"level":"error"' not in log.replace(" ", ""), log


async def until(asked: Callable[[], Awaitable[Any]], said: Callable[[Any], bool] = bool) -> Any:
    """What `asked` answers, once `said` holds of it."""
    async with asyncio.timeout(WITHIN):
        while True:
            try:
                answer = await asked()
            except httpx2.TransportError:
                answer = None
            if answer is not None and said(answer):
                return answer
            await asyncio.sleep(0.1)


async def test_a_kind_with_rows_endpoints_retention_a_metric_and_a_setting_of_its_own(
    environment: dict[str, str], settings: Settings, rows: Connection
) -> None:
    key = (await create_key(rows, tenant_id="acme", client_id="t", scopes=("printing:read", "printing:write"))).text
    port = str(free_port())
    client = httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key}"}, timeout=60
    )
    async with running(environment, "leasehold.api", "--port", port), client:
        # Its schema: the platform's is there, its own is not.
        unready = await until(lambda: client.get("/readyz"))
        assert unready.status_code == 503
        assert unready.json()["checks"]["migrations"]["detail"] == "printing at None, but p0002 is needed"
        assert "schema of printing" in (await leasehold(environment, "doctor", "--json")).stdout
        named = environment["LEASEHOLD_PIPELINES"]
        unnamed = {name: value for name, value in environment.items() if name != "LEASEHOLD_PIPELINES"}
        assert "schema of printing" not in (await leasehold(unnamed, "doctor", "--json")).stdout
        assert "schema of printing" in (await leasehold(unnamed, "doctor", named, "--json")).stdout
        migrated = await leasehold(environment, "migrate")
        assert migrated.returncode == 0, migrated.stdout + migrated.stderr
        assert await rows.fetchval("SELECT version_num FROM alembic_version_printing") == "p0002"
        assert await rows.fetchval("SELECT count(*) FROM alembic_version") == 1
        assert (await leasehold(environment, "migrate")).returncode == 0  # once more changes nothing
        assert (await until(lambda: client.get("/readyz"), lambda answer: answer.status_code == 200)).is_success

        # Its endpoints and its setting.
        assert {"/v1/prints", "/v1/runs"} <= (await client.get("/openapi.json")).json()["paths"].keys()
        assert (await client.post("/v1/prints", headers={"Authorization": ""})).status_code == 401
        refused = await client.post("/v1/prints", json={"title": "Two Towers", "copies": 8})
        assert (refused.status_code, refused.json()["code"]) == (422, "too_many_copies")
        accepted = await client.post("/v1/prints", json={"title": "Two Towers", "copies": 7})
        assert accepted.status_code == 202, accepted.text
        job_id = UUID(accepted.json()["job_id"])
        assert await rows.fetchval("SELECT copies FROM print_order WHERE job_id = $1", job_id) == 7

        # Its step.
        async with running(environment, "leasehold.worker"):
            done = await until(
                lambda: client.get(f"/v1/prints/{job_id}"), lambda answer: answer.json()["status"] == "succeeded"
            )
            assert done.json()["value"] == {"pages": 14}

        # Its retention: rows with their job, and objects before their rows.
        store = ObjectStore.from_settings(settings)
        await store.open()
        try:
            await store.put("proofs/old", b"a proof", content_type="text/plain", metadata={})
            await rows.execute("INSERT INTO print_proof VALUES ('proofs/old', 'acme', $1)", PASSED)
            await rows.execute("INSERT INTO print_proof VALUES ('proofs/new', 'acme', now() + interval '1 hour')")
            await rows.execute("UPDATE job SET expires_at = $1", PASSED)
            async with running(environment, "leasehold.worker"):
                await until(lambda: rows.fetchval("SELECT copies FROM print_total WHERE tenant_id = 'acme'"))
                await until(lambda: rows.fetchval("SELECT count(*) = 1 FROM print_proof"))
            assert await store.head("proofs/old") is None
        finally:
            await store.close()
        assert await rows.fetchval("SELECT count(*) FROM print_order") == 0
        assert await rows.fetchval("SELECT copies FROM print_total") == 7

        # Its metric.
        shown = await until(lambda: client.get("/metrics"), lambda answer: "leasehold_printing_orders" in answer.text)
        assert re.search(r"^leasehold_printing_orders \d", shown.text, re.MULTILINE)


async def test_a_wrong_setting_of_a_kind_lets_no_process_start(environment: dict[str, str]) -> None:
    environment |= {"LEASEHOLD_PRINTING_MOST_COPIES": "hunter2", "LEASEHOLD_LOG_FORMAT": "json"}
    for module in ("leasehold.api", "leasehold.worker"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module, cwd=HERE, env=environment, stderr=asyncio.subprocess.PIPE
        )
        log = (await process.communicate())[1].decode()
        assert process.returncode == 1, log
        assert "LEASEHOLD_PRINTING_MOST_COPIES" in log
        assert "hunter2" not in log


async def test_settings_of_a_kind_are_listed(environment: dict[str, str]) -> None:
    listed = await leasehold(environment | {"COLUMNS": "300"}, "settings")
    assert "LEASEHOLD_PRINTING_MOST_COPIES" in listed.stdout
    assert "LEASEHOLD_DATABASE_URL" in listed.stdout


def test_no_file_of_the_platform_knows_of_it() -> None:
    for folder in ("leasehold", "api", "worker", "migrations"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "printing" not in path.read_text(), path
