"""Downloading and promoting what came out of a conversion: limits, quotas, audit, all or nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx2
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from leasehold.api.auth.security import CONVERSION_READ, CONVERSION_WRITE
from leasehold.db.database import Connection
from leasehold.domain.errors import StoreUnavailable
from leasehold.domain.ids import new_id
from leasehold.limits import downloads
from leasehold.limits.downloads import GB, MAX_AT_ONCE, RATES, forget_downloads
from leasehold.settings import Settings
from leasehold.transitions import claims, settlements
from leasehold.transitions.settlements import Completion, Output
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.driver import TERMS
from tests.api.test_conversion import FORM
from tests.support.file_service import FileService, serving_files

SCOPES = (CONVERSION_WRITE, CONVERSION_READ)
NEF = bytes(range(256)) * 20_000  # 5 MB: several pieces
STEPS = {"onnx": "out.onnx", "bie": "out.bie", "nef": "out.nef"}


@pytest.fixture
async def client(api: Running, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    key = await make_key(scopes=SCOPES)
    async with client_of(api.url, key.text) as opened:
        yield opened


async def convert(client: httpx2.AsyncClient, rows: Connection, api: Running, *, user: str = "u1") -> str:
    """A conversion that a worker has finished; its path."""
    answer = await client.post(
        "/api/v1/jobs", data=FORM | {"user_id": user}, files={"model": ('my "model"\n模.onnx', b"x")}
    )
    path: str = answer.headers["Location"]
    job_id = UUID(path.rpartition("/")[2])
    for step, name in STEPS.items():
        task = await rows.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = $2", job_id, step)
        (claimed,) = await claims.claim(rows, TERMS, [task])
        key = f"jobs/{job_id}/output/{name}"
        await api.services.store.put(key, NEF, content_type="application/octet-stream", metadata={})
        made = Output(f"output/{name}", key, len(NEF), hashlib.sha256(NEF).hexdigest(), "application/octet-stream")
        await settlements.complete(rows, [Completion(claimed.lease, [made])])
    return path


async def spend(rows: Connection, *, count: int = 1, size: int = 1, ago: int = 0, open_: bool = False) -> None:
    """Downloads that the client's key has made already."""
    for _ in range(count):
        await rows.execute(
            "INSERT INTO download (id, tenant_id, key_prefix, bytes, started_at, lapses_at, finished_at)"
            " SELECT $1, tenant_id, prefix, $2, clock_timestamp() - make_interval(secs => $3),"
            " clock_timestamp() + interval '5 minutes', CASE WHEN NOT $4 THEN clock_timestamp() END"
            " FROM api_key ORDER BY created_at LIMIT 1",
            new_id(),
            size,
            ago,
            open_,
        )


async def until_written(rows: Connection) -> None:
    """The client has the last byte before the API logs and writes that the download is over."""
    async with asyncio.timeout(60):
        while not await rows.fetchval("SELECT bool_and(finished_at IS NOT NULL) FROM download"):
            await asyncio.sleep(0.01)


async def test_a_result_is_the_whole_object_under_a_name_that_cannot_break_out(
    api: Running, client: httpx2.AsyncClient, rows: Connection
) -> None:
    path = await convert(client, rows, api)
    result = await client.get(f"{path}/result", headers={"Range": "bytes=0-9"})
    assert (result.status_code, result.content) == (200, NEF)
    assert result.headers["Accept-Ranges"] == "none"
    assert result.headers["Content-Disposition"] == (
        "attachment; filename=\"my _model__.nef\"; filename*=UTF-8''my%20%22model%22%E6%A8%A1.nef"
    )
    assert await rows.fetchval("SELECT bytes FROM download") == len(NEF)
    await until_written(rows)
    other = await client.get(f"{path}/result", params={"artifact": "onnx"})
    assert other.headers["Content-Disposition"].endswith(".onnx")


async def test_a_result_that_is_not_there_is_missing_not_ready_or_gone(
    api: Running, client: httpx2.AsyncClient, rows: Connection
) -> None:
    answer = await client.post("/api/v1/jobs", data=FORM | {"user_id": "u2"}, files={"model": ("a.onnx", b"x")})
    early = await client.get(f"{answer.headers['Location']}/result")
    assert (early.status_code, early.json()["code"]) == (409, "not_ready")
    path = await convert(client, rows, api)
    await api.services.store.delete(f"{path.replace('/api/v1/', '').strip('/')}/output/out.bie")
    swept = await client.get(f"{path}/result", params={"artifact": "bie"})
    assert (swept.status_code, swept.json()["code"]) == (410, "expired")
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 s' WHERE finished_at IS NOT NULL")
    late = await client.get(f"{path}/result")
    assert (late.status_code, late.json()["code"]) == (410, "expired")
    assert (await client.get(f"/api/v1/jobs/{new_id()}/result")).status_code == 404


BURST, MINUTE = RATES
#: A window of ten seconds is over soon on a busy machine: downloads of a moment to come leave it later.
LATER = -30
LIMITED: dict[str, tuple[dict[str, int], str, range]] = {
    "burst": ({"count": BURST[0], "ago": LATER}, "too_many_downloads", range(BURST[1] + 1, BURST[1] - LATER + 1)),
    "minute": ({"count": MINUTE[0], "ago": 20}, "too_many_downloads", range(20, 41)),
    "hour": ({"size": GB - 100, "ago": 1800}, "download_quota_exceeded", range(1700, 1801)),
    "day": ({"size": 6 * GB - 100, "ago": 40_000}, "download_quota_exceeded", range(46_000, 46_401)),
    "at once": ({"count": MAX_AT_ONCE, "ago": 90, "open_": True}, "too_many_at_once", range(1, 10)),
}


@pytest.mark.parametrize("name", LIMITED)
async def test_a_key_beyond_a_limit_is_told_when_to_come_again(
    api: Running, client: httpx2.AsyncClient, rows: Connection, name: str
) -> None:
    spent, code, wait = LIMITED[name]
    path = await convert(client, rows, api)
    await spend(rows, **spent)  # type: ignore[arg-type]  # open_ is a bool
    limited = await client.get(f"{path}/result")
    assert (limited.status_code, limited.json()["code"]) == (429, code)
    assert int(limited.headers["Retry-After"]) in wait
    assert ";r=0;t=" in limited.headers["RateLimit"]
    assert ";q=" in limited.headers["RateLimit-Policy"]


async def test_limits_are_one_for_all_api_processes_and_by_key(
    api: Running,
    settings: Settings,
    client: httpx2.AsyncClient,
    rows: Connection,
    make_key: MakeKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downloads, "RATES", ((BURST[0], 600), MINUTE))  # its ten seconds are over soon
    path = await convert(client, rows, api)
    async with serving(settings) as second, client_of(second.url) as elsewhere:
        elsewhere.headers.update({"Authorization": client.headers["Authorization"]})
        answers = await asyncio.gather(*(one.get(f"{path}/result") for one in (client, elsewhere) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 5
    another = await make_key(scopes=SCOPES)
    async with client_of(api.url, another.text) as fresh:
        assert (await fresh.get(f"{path}/result")).status_code == 200


async def test_old_downloads_are_forgotten_and_those_that_count_are_kept(rows: Connection, make_key: MakeKey) -> None:
    await make_key()
    await spend(rows, ago=100_000)
    await spend(rows, ago=50_000)
    await forget_downloads(rows)
    assert await rows.fetchval("SELECT count(*) FROM download") == 1


async def test_every_access_is_audited(
    api: Running, client: httpx2.AsyncClient, rows: Connection, make_key: MakeKey
) -> None:
    path = await convert(client, rows, api)
    with capture_logs() as lines:
        await client.get(f"{path}/result")
        await until_written(rows)
        await client.get(f"/api/v1/jobs/{new_id()}/result")
        await client.get(f"{path}/result", params={"artifact": "report"})
        await spend(rows, size=GB)
        await client.get(f"{path}/result")
        await spend(rows, count=5, ago=LATER)
        await client.get(f"{path}/result")
        async with client_of(api.url) as nobody:
            await nobody.get(path)
            for text in ("nonsense", "lh_abcdefghijkl_" + "x" * 43):
                await nobody.get(path, headers={"Authorization": f"Bearer {text}"})
    said = [line["event"] for line in lines if line.get("audit")]
    ok = ["auth.success", "result.requested"]
    assert said == [
        *ok, "result.streamed", *ok, "result.missing", *ok, "result.not_ready", *ok, "result.over_quota",
        *ok, "result.limited", "auth.missing", "auth.malformed", "auth.rejected",
    ]  # fmt: skip
    assert all(line["source_ip"] == "127.0.0.1" for line in lines if line.get("audit"))
    assert client.headers["Authorization"].removeprefix("Bearer ") not in str(lines)
    (row,) = await rows.fetch("SELECT * FROM audit WHERE action = 'job.downloaded'")
    assert (row["target"], row["actor"], row["source_ip"]) == (path.rpartition("/")[2], "tests", "127.0.0.1")
    assert json.loads(row["details"]) == {"artifact": "nef", "bytes": len(NEF), "outcome": "streamed"}


async def test_a_result_that_the_store_does_not_give_is_audited_and_charged_with_nothing(
    api: Running, client: httpx2.AsyncClient, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await convert(client, rows, api)

    async def fail(key: str) -> AsyncIterator[bytes]:
        if key:
            raise StoreUnavailable("away")
        yield b""

    monkeypatch.setattr(api.services.store, "pieces", fail)
    with capture_logs() as lines:
        answer = await client.get(f"{path}/result")
    assert answer.status_code == 503
    said = [line["event"] for line in lines if line.get("audit")]
    assert said == ["auth.success", "result.requested", "result.failed"]
    assert await rows.fetchval("SELECT bytes FROM download WHERE finished_at IS NOT NULL") == 0


async def test_a_client_that_goes_away_is_charged_for_what_it_got(
    api: Running, client: httpx2.AsyncClient, rows: Connection
) -> None:
    path = await convert(client, rows, api)
    big = bytes(64 * 1024 * 1024)
    key = await rows.fetchval("UPDATE output SET size = $1 WHERE name = 'output/out.nef' RETURNING key", len(big))
    await api.services.store.delete(key)
    await api.services.store.put(key, big, content_type="application/octet-stream", metadata={})
    with capture_logs() as lines:
        async with client.stream("GET", f"{path}/result") as result:
            await anext(result.aiter_raw())
        async with asyncio.timeout(60):
            while not await rows.fetchval("SELECT count(*) FROM download WHERE finished_at IS NOT NULL"):
                await asyncio.sleep(0.02)
    assert "result.aborted" in [line["event"] for line in lines]
    assert 0 < await rows.fetchval("SELECT bytes FROM download") < len(big)


# --- promoting


@pytest.fixture
def file_service() -> Iterator[FileService]:
    with serving_files() as service:
        yield service


TARGETS = {"targets": [{"artifact": "nef", "key": "a/out.nef"}, {"artifact": "onnx", "key": "a/out.onnx"}]}
KEYS = ["acme/a/out.nef", "acme/a/out.onnx"]


@dataclass
class Promoting:
    running: Running
    client: httpx2.AsyncClient
    path: str

    async def promote(self, wanted: Any = TARGETS) -> httpx2.Response:
        return await self.client.post(f"{self.path}/promote", json=wanted)


@pytest.fixture
async def promoting(
    settings: Settings,
    rows: Connection,
    make_key: MakeKey,
    file_service: FileService,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    monkeypatch.setattr("leasehold.security.egress._CONNECT_SECONDS", 60.0)
    changed = settings.model_copy(
        update={
            "promote_url": file_service.url,
            "promote_token": SecretStr("service-token"),
            "egress_allow": "127.0.0.0/8",
        }
    )
    key = await make_key(scopes=SCOPES)
    async with serving(changed) as running, client_of(running.url, key.text) as client:
        yield Promoting(running, client, await convert(client, rows, running))


async def test_promoting_copies_all_artifacts_and_repeating_it_copies_nothing(
    promoting: Promoting, file_service: FileService
) -> None:
    answer = await promoting.promote()
    assert (answer.status_code, answer.json()["promoted_object_keys"]) == (200, KEYS)
    assert file_service.files == {f"/models/{key}": NEF for key in KEYS}
    assert file_service.tokens == {"Bearer service-token"}
    file_service.files.clear()
    again = await promoting.promote()
    assert (again.status_code, again.json()) == (200, answer.json())
    assert file_service.files == {}
    job = (await promoting.client.get(promoting.path)).json()
    assert (job["promoted"], job["promoted_object_keys"]) == (True, KEYS)
    other = await promoting.promote({"targets": [{"artifact": "bie"}]})
    assert (other.status_code, other.json()["code"]) == (409, "already_promoted")


async def test_a_target_that_fails_takes_the_others_back_and_the_next_try_may_succeed(
    promoting: Promoting, file_service: FileService
) -> None:
    file_service.refuses = lambda path: path.endswith(".onnx")
    failed = await promoting.promote()
    assert (failed.status_code, failed.json()["code"]) == (502, "promotion_failed")
    assert file_service.files == {}
    assert (await promoting.client.get(promoting.path)).json()["promoted"] is False
    file_service.refuses = lambda _path: False
    assert (await promoting.promote()).status_code == 200


async def test_of_requests_at_once_one_promotes(promoting: Promoting, rows: Connection) -> None:
    await rows.execute("UPDATE conversion SET promoting_until = clock_timestamp() + interval '1 minute'")
    second = await promoting.promote()
    assert (second.status_code, second.json()["code"]) == (409, "promotion_in_progress")
    await rows.execute("UPDATE conversion SET promoting_until = clock_timestamp() - interval '1 minute'")
    assert (await promoting.promote()).status_code == 200


@pytest.mark.parametrize("key", ["../up", "/root", "a//b", "a b", "x" * 600])
async def test_a_key_that_climbs_out_is_refused(promoting: Promoting, key: str) -> None:
    answer = await promoting.promote({"targets": [{"artifact": "nef", "key": key}]})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_models_are_promoted_to_a_second_bucket(
    settings: Settings, rows: Connection, make_key: MakeKey, api: Running
) -> None:
    changed = settings.model_copy(update={"promote_bucket": f"{settings.s3_bucket}-served"})
    served = api.services.store.__class__(changed.model_copy(update={"s3_bucket": changed.promote_bucket}))
    await served.open()
    await served.ensure_bucket()
    key = await make_key(scopes=SCOPES)
    async with serving(changed) as running, client_of(running.url, key.text) as client:
        path = await convert(client, rows, running)
        answer = await client.post(f"{path}/promote", json=TARGETS)
    assert answer.status_code == 200
    assert await served.fetch_bytes(KEYS[0], max_bytes=len(NEF)) == NEF
    await served.delete(*KEYS)
    await served.close()


async def test_a_private_file_service_is_not_asked_unless_it_is_allowed(
    settings: Settings, rows: Connection, make_key: MakeKey, file_service: FileService
) -> None:
    changed = settings.model_copy(update={"promote_url": file_service.url})
    key = await make_key(scopes=SCOPES)
    async with serving(changed) as running, client_of(running.url, key.text) as client:
        path = await convert(client, rows, running)
        answer = await client.post(f"{path}/promote", json=TARGETS)
    assert (answer.status_code, answer.json()["code"]) == (502, "promotion_failed")
    assert file_service.tokens == set()


async def test_without_a_target_nothing_is_promoted(api: Running, client: httpx2.AsyncClient, rows: Connection) -> None:
    path = await convert(client, rows, api)
    answer = await client.post(f"{path}/promote", json=TARGETS)
    assert (answer.status_code, answer.json()["code"]) == (503, "promotion_not_configured")
