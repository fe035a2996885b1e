"""Conversions end, are cancelled, counted and remembered; who asked, from where, is known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import httpx2
import pytest
import time_machine
from structlog.testing import capture_logs

from leasehold.db.database import Connection
from leasehold.pipelines.conversion.housekeeping import remember_with_jobs
from leasehold.pipelines.conversion.rows import forget_expired
from leasehold.settings import Settings
from leasehold.transitions import claims, sweeps
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.driver import TERMS
from tests.api.test_conversion import FORM

SCOPES = ("conversion:write", "conversion:read")


@pytest.fixture
async def client(api: Running, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(api.url, (await make_key(scopes=SCOPES)).text) as opened:
        yield opened


async def send(client: httpx2.AsyncClient) -> httpx2.Response:
    return await client.post("/api/v1/jobs", data=FORM, files={"model": ("a.onnx", b"x")})


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("code", "")


async def test_a_user_whose_conversion_no_worker_can_do_is_free_again_after_its_deadline(
    client: httpx2.AsyncClient, rows: Connection, settings: Settings
) -> None:
    with time_machine.travel(datetime.now(UTC) - timedelta(minutes=10), tick=True):  # an API whose clock is wrong
        path = (await send(client)).headers["Location"]
    assert code(await send(client)) == (409, "job_in_progress")
    seconds = await rows.fetchval("SELECT extract(epoch FROM deadline_at - created_at)::float8 FROM job")
    # Two reads of the database's clock.
    assert settings.conversion_deadline_seconds - 60 < seconds < settings.conversion_deadline_seconds + 60
    await rows.execute("UPDATE job SET deadline_at = clock_timestamp() - interval '1 s'")
    await sweeps.expire_jobs(rows)
    job = (await client.get(path)).json()
    assert (job["status"], job["error"]["code"]) == ("failed", "deadline_exceeded")
    assert (await send(client)).status_code == 201


async def test_a_conversion_that_waits_is_cancelled_at_once_and_its_user_may_send_another(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    path = (await send(client)).headers["Location"]
    answer = await client.post(f"{path}/cancel", json={"reason": "wrong file"})
    assert (answer.status_code, answer.json()["status"]) == (202, "failed")
    assert (await client.get(path)).json()["error"]["code"] == "cancelled"
    assert (await rows.fetchval("SELECT cancel FROM job"))["reason"] == "wrong file"
    assert code(await client.post(f"{path}/cancel")) == (409, "resource_invalid_state")
    assert (await send(client)).status_code == 201


async def test_a_conversion_that_runs_is_asked_to_stop(client: httpx2.AsyncClient, rows: Connection) -> None:
    path = (await send(client)).headers["Location"]
    task = await rows.fetchval("SELECT id FROM task WHERE step = 'onnx'")
    await claims.claim(rows, TERMS, [task])
    for _ in range(2):
        answer = await client.post(f"{path}/cancel")
        assert (answer.status_code, answer.json()["status"], answer.json()["error"]) == (202, "running", None)
    assert await rows.fetchval("SELECT status FROM job") == "cancel_requested"


async def test_nobody_elses_and_no_other_kind_of_job_is_cancelled_here(
    client: httpx2.AsyncClient, api: Running, rows: Connection, make_key: MakeKey
) -> None:
    path = (await send(client)).headers["Location"]
    async with client_of(api.url, (await make_key("rival", scopes=SCOPES)).text) as rival:
        assert code(await rival.post(f"{path}/cancel")) == (404, "job_not_found")
    async with client_of(api.url, (await make_key(scopes=("conversion:read",))).text) as reader:
        assert code(await reader.post(f"{path}/cancel")) == (403, "insufficient_scope")
    await rows.execute("DELETE FROM conversion")
    assert code(await client.post(f"{path}/cancel")) == (404, "job_not_found")
    assert await rows.fetchval("SELECT status FROM job") in ("pending", "queued")


async def test_posts_and_reads_of_a_key_are_bounded_and_counted_down(settings: Settings, make_key: MakeKey) -> None:
    few = settings.model_copy(update={"conversion_posts_per_key": 2, "conversion_reads_per_key": 3})
    async with serving(few) as api, client_of(api.url, (await make_key(scopes=SCOPES)).text) as client:
        first = await send(client)
        assert first.headers["RateLimit-Policy"] == '"conversion-posts";q=2;w=60'
        path = first.headers["Location"]
        await client.post(f"{path}/cancel")
        limited = await send(client)
        assert code(limited) == (429, "rate_limited")
        assert int(limited.headers["Retry-After"]) > 0
        answers = [await client.get(path), await client.get("/api/v1/jobs"), await client.get(path)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert answers[0].headers["RateLimit"].startswith('"conversion-reads";r=2')
        assert code(await client.get(path)) == (429, "rate_limited")
        async with client_of(api.url, (await make_key(scopes=SCOPES)).text) as other:
            assert (await other.get(path)).status_code == 200


async def test_a_record_says_who_sent_it_when_it_changed_and_when_it_expires_from_the_start(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    answer = await send(client)
    new = answer.json()
    assert new["created_by_client_id"] == "tests"
    assert new["updated_at"] == new["created_at"]
    assert new["expires_at"] > new["created_at"]
    task = await rows.fetchval("SELECT id FROM task WHERE step = 'onnx'")
    await claims.claim(rows, TERMS, [task])
    claimed = (await client.get(answer.headers["Location"])).json()
    assert claimed["updated_at"] > new["updated_at"]
    assert claimed["expires_at"] == new["expires_at"]


async def test_an_expired_conversion_is_gone_also_when_its_row_is(
    client: httpx2.AsyncClient, api: Running, rows: Connection, make_key: MakeKey
) -> None:
    path = (await send(client)).headers["Location"]
    job_id = UUID(path.rpartition("/")[2])
    await client.post(f"{path}/cancel")
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 s'")
    for _ in range(2):
        answers = [await client.get(path), await client.get(f"{path}/result")]
        answers.append(await client.post(f"{path}/promote", json={"targets": [{}]}))
        assert [code(answer) for answer in answers] == [(410, "expired")] * 3
        assert {answer.json()["detail"] for answer in answers} == {"The conversion has expired."}
        listed = (await client.get("/api/v1/jobs")).json()
        assert (listed["jobs"], listed["total"]) == ([], 0)
        await sweeps.forget_jobs(rows, [job_id], [remember_with_jobs])
    assert await rows.fetchval("SELECT count(*) FROM job") == 0
    async with client_of(api.url, (await make_key("rival", scopes=SCOPES)).text) as rival:
        assert code(await rival.get(path)) == (404, "job_not_found")
    assert code(await client.get(f"/api/v1/jobs/{uuid4()}")) == (404, "job_not_found")
    await rows.execute("UPDATE expired_conversion SET forgotten_at = forgotten_at - interval '91 days'")
    await forget_expired(rows)
    assert code(await client.get(path)) == (404, "job_not_found")


async def test_only_conversions_that_go_now_are_remembered(client: httpx2.AsyncClient, rows: Connection) -> None:
    """Another one that is due stays, with its objects, until its own turn, and one that is not due any more stays."""
    jobs = []
    for _ in range(3):
        path = (await send(client)).headers["Location"]
        await client.post(f"{path}/cancel")
        jobs.append(UUID(path.rpartition("/")[2]))
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 s' WHERE id = ANY($1)", jobs[:2])
    await remember_with_jobs(rows, [jobs[0], jobs[2]])
    assert [row["job_id"] for row in await rows.fetch("SELECT job_id FROM expired_conversion")] == jobs[:1]


@pytest.mark.parametrize(
    ("proxies", "forwarded", "source"),
    [
        ("", "203.0.113.9", "127.0.0.1"),
        ("10.0.0.0/8", "203.0.113.9", "127.0.0.1"),
        ("127.0.0.0/8", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.0/8, 10.0.0.0/8", "6.6.6.6, 203.0.113.9, 10.1.2.3", "203.0.113.9"),
        ("127.0.0.0/8", "6.6.6.6, 203.0.113.9, 10.1.2.3", "10.1.2.3"),
        ("127.0.0.0/8", "2001:db8::7", "2001:db8::7"),
        ("127.0.0.0/8", "6.6.6.6, forged\tline", "127.0.0.1"),
        ("127.0.0.0/8", "", "127.0.0.1"),
    ],
)
async def test_an_address_that_somebody_forwards_counts_from_trusted_proxies_only(
    settings: Settings, proxies: str, forwarded: str, source: str
) -> None:
    async with serving(settings.model_copy(update={"trusted_proxies": proxies})) as api, client_of(api.url) as nobody:
        with capture_logs() as lines:
            await nobody.get("/api/v1/jobs", headers={"X-Forwarded-For": forwarded} if forwarded else {})
    assert [line["source_ip"] for line in lines if line.get("audit")] == [source]


async def test_a_key_without_the_scope_is_audited(api: Running, make_key: MakeKey) -> None:
    async with client_of(api.url, (await make_key(scopes=("media:read",))).text) as client:
        with capture_logs() as lines:
            assert (await client.get("/api/v1/jobs")).status_code == 403
    (line,) = [line for line in lines if line.get("audit")]
    assert (line["event"], line["scope"]) == ("auth.forbidden", "conversion:read")
