"""What an operator sets is what counts: settings that the API alone reads, each at a value that no default has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx2
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.db.database import Connection
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, client_of, serving
from tests.api.media_api import MediaApi, problem
from tests.crossings.stage import SCOPES
from tests.pictures import encoded, noisy

DAYS = 3
SET: dict[str, Any] = {
    "backfill_max_days": 2,
    "external_silent_seconds": 100.0,
    "json_max_depth": 12,
    "retention_days": DAYS,
    "views_per_tenant": 1,
    "picture_max_bytes": 3_000_001,
    "picture_max_frames": 31,
    "picture_max_pixels": 5_000_002,
    "picture_max_total_pixels": 20_000_003,
    "upload_unfinished_seconds": 1234,
    "generation_provider": "jimeng",
    "generation_credentials": {"jimeng": SecretStr("id:secret")},
    "generation_default_server": "somewhere",
    "generation_image_seconds": 111,
    "generation_video_seconds": 222,
    "generation_source_max_bytes": 1000,
}


@pytest.fixture
async def client(settings: Settings, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    key = await make_key(scopes=SCOPES)
    sealed = {"sealing_keys": SecretStr(Fernet.generate_key().decode())}
    async with serving(settings.model_copy(update=SET | sealed)) as running, client_of(running.url, key.text) as client:
        yield client


async def template(client: httpx2.AsyncClient) -> None:
    steps = [{"id": "only", "worker_type": "external", "queue": "q"}]
    answer = await client.post("/v1/templates", json={"type": "mine", "steps": steps, "retry_policy": {}})
    assert answer.status_code == 201, answer.text


async def test_a_tenant_saves_as_many_views_as_the_installation_says(client: httpx2.AsyncClient) -> None:
    for name in ("a", "a"):  # the second time it only changes
        answer = await client.put("/v1/views", json={"name": name, "filter": "kind:run"})
        assert answer.status_code == 200, answer.text
    problem(await client.put("/v1/views", json={"name": "b", "filter": "kind:run"}), 409, "too_many_views")


async def test_a_body_is_as_deep_as_the_installation_says(client: httpx2.AsyncClient) -> None:
    deepest, deeper = ({"template": "nothing", "payload": {"a": _nested(levels)}} for levels in (10, 11))
    problem(await client.post("/v1/runs", json=deepest), 404, "template_not_found")
    assert "12 deep" in problem(await client.post("/v1/runs", json=deeper), 422, "body_too_deep")["detail"]


def _nested(levels: int) -> list[Any]:
    return [] if levels == 1 else [_nested(levels - 1)]


async def test_a_backfill_begins_as_far_back_as_the_installation_says(client: httpx2.AsyncClient) -> None:
    await template(client)
    made = await client.post("/v1/schedules", json={"template": "mine", "cron": "0 0 1 1 *"})
    now = datetime.now(UTC)
    for age, status in ((timedelta(days=2) - timedelta(minutes=5), 202), (timedelta(days=2, minutes=5), 422)):
        body = {"start": (now - age).isoformat(), "end": (now - timedelta(hours=1)).isoformat()}
        answer = await client.post(f"/v1/schedules/{made.json()['id']}/backfill", json=body)
        assert answer.status_code == status, answer.text
    problem(answer, 422, "range_too_long")


async def test_jobs_of_every_way_in_are_kept_for_as_long_as_the_installation_says(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    await template(client)
    schedule = (await client.post("/v1/schedules", json={"template": "mine", "cron": "0 0 * * *"})).json()["id"]
    run = (await client.post("/v1/runs", json={"template": "mine"})).json()["id"]
    requests: list[tuple[str, Any, dict[str, str]]] = [
        ("/v1/runs", {"template": "mine"}, {"Idempotency-Key": "k"}),
        ("/v1/runs/batch", {"template": "mine", "runs": [{}]}, {}),
        (f"/v1/runs/{run}/rerun", None, {}),
        (f"/v1/schedules/{schedule}/run-now", None, {}),
        (f"/v1/schedules/{schedule}/backfill", {"start": _ago(47), "end": _ago(1)}, {}),
        ("/v1/operations", {"action": "cancel", "filter": "kind:run"}, {}),
    ]
    for path, body, headers in requests:
        answer = await client.post(path, json=body, headers=headers)
        assert answer.status_code == 202, answer.text
    kept = await rows.fetch("SELECT keep_seconds FROM job")
    assert len(kept) > len(requests)
    assert {row["keep_seconds"] for row in kept} == {DAYS * 86_400}


def _ago(hours: int) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours)).isoformat()


async def test_a_picture_is_bounded_as_the_installation_says(client: httpx2.AsyncClient, rows: Connection) -> None:
    media = MediaApi(client)
    problem(await media.ask(content_length=3_000_002), 422, "too_large")
    ticket = await media.submitted()
    (params,) = [row["params"] for row in await rows.fetch("SELECT params FROM job")]
    assert params["limits"] == {
        "max_bytes": 3_000_001, "max_pixels": 5_000_002, "max_total_pixels": 20_000_003, "max_frames": 31,
    }  # fmt: skip
    unfinished = await media.ticket()
    lives = await rows.fetchval("SELECT expires_at - created_at FROM media WHERE id = $1", UUID(unfinished.media_id))
    assert abs(lives - timedelta(seconds=1234)) < timedelta(seconds=60)
    assert ticket.media_id != unfinished.media_id


@pytest.mark.parametrize(("kind", "seconds"), [("images", 111), ("video", 222)])
async def test_an_order_has_as_long_as_the_installation_says_and_the_server_of_all_others(
    client: httpx2.AsyncClient, rows: Connection, kind: str, seconds: int
) -> None:
    answer = await client.post(f"/v1/{kind}/generations", json={"prompt": "a cat"})
    assert answer.status_code == 202, answer.text
    joined = "generation g JOIN job j ON j.id = g.job_id"
    (row,) = await rows.fetch(f"SELECT j.params, j.created_at, g.server_id FROM {joined}")
    lasts = datetime.fromisoformat(row["params"]["deadline_at"]) - row["created_at"]
    assert abs(lasts - timedelta(seconds=seconds)) < timedelta(seconds=60)
    assert row["server_id"] == "somewhere"
    assert (await client.get("/v1/generations/statistics", params={"server_id": "somewhere"})).json()["tasks"]
    assert [gate["key"] for gate in await rows.fetch("SELECT key FROM gate")] == ["server:somewhere"]


async def test_a_source_image_is_as_large_as_the_installation_says(client: httpx2.AsyncClient) -> None:
    png = encoded(noisy(200, 200), "PNG")
    assert len(png) > 1000
    answer = await client.post("/v1/upload/images", files=[("file", ("a.png", png, "image/png"))])
    problem(answer, 422, "too_large")


@pytest.mark.parametrize(("waited", "is_listed"), [(99, False), (101, True)])
async def test_a_step_without_its_worker_is_listed_when_the_installation_says(
    client: httpx2.AsyncClient, rows: Connection, waited: int, is_listed: bool
) -> None:
    await template(client)
    run = (await client.post("/v1/runs", json={"template": "mine"})).json()["id"]
    ago = timedelta(seconds=waited)
    await rows.execute("UPDATE task SET available_at = clock_timestamp() - $1::interval", ago)
    found = (await client.get("/v1/unsettled", params={"what": "external"})).json()["items"]
    assert [item["job_id"] for item in found] == [run] * is_listed
