"""The runs door reaches runs alone: a key for runs does nothing to a tenant's other jobs, and does not see them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.generation.pipeline import generation, withdrawal
from leasehold.pipelines.media.pipeline import media
from leasehold.pipelines.webhooks.pipeline import webhooks
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.settlements import Failure
from tests.api.conftest import client_of, serving
from tests.api.media_api import problem
from tests.factories import terms

TENANT = "acme"
OTHERS = [media, conversion, generation, withdrawal, webhooks]


@pytest.fixture
async def http(settings: Settings, rows: Connection) -> AsyncIterator[httpx2.AsyncClient]:
    key = await create_key(rows, tenant_id=TENANT, client_id="runs", scopes=[RUNS_READ, RUNS_WRITE])
    async with serving(settings) as running, client_of(running.url, key.text) as client:
        yield client


@pytest.mark.parametrize("pipeline", OTHERS, ids=lambda pipeline: pipeline.name)
async def test_a_key_for_runs_neither_sees_nor_ends_nor_revives_a_job_of_another_kind(
    http: httpx2.AsyncClient, rows: Connection, pipeline: Pipeline
) -> None:
    live, dead = (NewJob(pipeline, TENANT, id=new_id()) for _ in range(2))
    await jobs.submit(rows, [live])
    (hint,) = await jobs.submit(rows, [dead])
    (claimed,) = await claims.claim(rows, terms(), [hint.hint.task_id])
    await settlements.fail(rows, [Failure(claimed.lease, "error", "broken", "", retryable=False, delay=0)])
    before = await rows.fetch("SELECT id, status, event_seq FROM job ORDER BY id")
    for job in (live.id, dead.id):
        for verb in ("cancel", "retry", "rerun"):
            problem(await http.post(f"/v1/runs/{job}/{verb}"), 404, "run_not_found")
        problem(await http.post(f"/v1/runs/{job}/signals/go", json={"payload": 1}), 404, "run_not_found")
        for view in ("", "/events", "/explain", "/logs", "/stream"):
            problem(await http.get(f"/v1/runs/{job}{view}"), 404, "run_not_found")
    problem(await http.post(f"/v1/dead-letters/{hint.hint.task_id}/replay"), 404, "dead_letter_not_found")
    assert (await http.post("/v1/dead-letters/replay", json={"code": "broken"})).json()["replayed"] == []
    assert (await http.get("/v1/dead-letters")).json()["dead_letters"] == []
    assert (await http.get("/v1/dead-letters/groups")).json()["groups"] == []
    for params in ({}, {"status": "failed"}, {"template": pipeline.name}):
        assert (await http.get("/v1/runs", params=params)).json()["runs"] == []
    problem(await http.post("/v1/runs", json={"template": pipeline.name}), 404, "template_not_found")
    assert await rows.fetch("SELECT id, status, event_seq FROM job ORDER BY id") == before


async def test_every_route_of_a_run_is_tried_above(http: httpx2.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    views = ("", "/events", "/explain", "/logs", "/stream", "/cancel", "/retry", "/rerun", "/signals/{name}")
    tried = {"/v1/runs/{run_id}" + view for view in views}
    assert {path for path in paths if "{run_id}" in path} == tried
