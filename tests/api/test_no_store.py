"""An installation that stores nothing, and says so."""

from __future__ import annotations

import pytest

from leasehold.cli.doctor import examine
from leasehold.db.database import Connection
from leasehold.domain.errors import StoreAbsent
from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from leasehold.worker.attempts.failures import as_step_error
from tests.api.conftest import MakeKey, client_of, serving
from tests.api.media_api import problem

SCOPES = ("media:write", "conversion:write", "generation:write", "runs:write", "templates:write")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"object_store": "none", "s3_endpoint": "http://127.0.0.1:1"})


@pytest.mark.usefixtures("patient_readiness")
async def test_what_needs_objects_is_refused_with_a_clear_answer_and_runs_are_taken(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    async with serving(settings) as api, client_of(api.url, (await make_key(scopes=SCOPES)).text) as client:
        refused = [
            await client.post("/upload-url", json={"content_type": "image/jpeg", "file_name": "a.jpg"}),
            await client.post("/api/v1/jobs", data={"user_id": "u"}, files={"model": ("a.onnx", b"x")}),
            await client.post("/v1/upload/images", files={"image": ("a.jpg", b"x")}),
            await client.post("/v1/images/generations", json={"prompt": "a cat"}),
        ]
        for answer in refused:
            said = problem(answer, 503, "store_not_configured")
            assert "LEASEHOLD_OBJECT_STORE" in said["detail"]
        step = {"id": "a", "name": "a", "worker_type": "external", "queue": "q"}
        template = {"type": "mine", "version": 1, "name": "mine", "steps": [step]}
        assert (await client.post("/v1/templates", json=template)).status_code == 201
        assert (await client.post("/v1/runs", json={"template": "mine"})).status_code == 202
        assert (await client.get("/readyz")).status_code == 200
    assert await rows.fetchval("SELECT count(*) FROM job") == 1


async def test_housekeeping_has_nothing_to_delete_and_reading_and_writing_say_why_not(settings: Settings) -> None:
    store = ObjectStore.from_settings(settings)
    await store.open()
    assert await store.probe() is False
    await store.delete("a")
    assert [found async for found in store.list("")] == []
    assert await store.abort_uploads("jobs/") == 0
    for work in (store.head("a"), store.fetch_bytes("a", max_bytes=1)):
        with pytest.raises(StoreAbsent, match="LEASEHOLD_OBJECT_STORE"):
            await work
    with pytest.raises(StoreAbsent, match="LEASEHOLD_OBJECT_STORE"):
        store.sign_get("a", seconds=60)
    with pytest.raises(StoreAbsent) as refused:
        await store.put("a", b"x", content_type="a/b", metadata={})
    failed = as_step_error(refused.value)
    assert (failed.code, failed.retryable) == ("store_not_configured", False)
    await store.close()


async def test_the_doctor_says_that_there_is_none(settings: Settings, rows: Connection) -> None:
    assert rows is not None
    (finding,) = [finding for finding in await examine(settings) if finding.part == "store"]
    assert (finding.ok, finding.found) == (True, "none")
