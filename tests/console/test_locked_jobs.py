"""A job whose row somebody else has locked costs the others nothing, and a press on it can be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import pytest

from leasehold.api.console import jobs
from leasehold.api.http.idempotent import Answer, once_over_transactions
from leasehold.api.jobs import dead_letters, unsettled
from leasehold.api.jobs import jobs as endpoints
from leasehold.api.process import deadline
from leasehold.api.process.tenant_pool import NOT_TRIED
from leasehold.db.database import Connection, connected
from leasehold.domain.errors import Conflict, Unavailable
from leasehold.limits.admission import Admission
from leasehold.settings import Settings
from tests.api.conftest import Running
from tests.console.conftest import MakePerson
from tests.console.test_pressed_twice import audited, form_on, press
from tests.jobs.conftest import Maker


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A statement that waits for a lock ends after these seconds, and so does the request's deadline."""
    return settings.model_copy(update={"database_timeout": 3.0})


@asynccontextmanager
async def locked(settings: Settings, *job_ids: UUID) -> AsyncIterator[None]:
    patient = settings.model_copy(update={"database_timeout": 60.0})
    async with connected(patient, "tests") as connection, connection.transaction():
        await connection.execute("SELECT FROM job WHERE id = ANY ($1) FOR UPDATE", job_ids)
        yield


async def failed_runs(maker: Maker, n: int) -> list[UUID]:
    made = [await maker.make("run", scope="user", scope_id=str(place)) for place in range(n)]
    for job_id in made:
        await maker.fail(job_id)
    return made


async def test_a_locked_job_does_not_prevent_the_picked_jobs_after_it(
    person: MakePerson, maker: Maker, rows: Connection, settings: Settings
) -> None:
    somebody, picked = await person(), await failed_runs(maker, 3)
    fields = {"job": [str(job_id) for job_id in picked], "action": "retry", "once": await form_on(somebody, "/jobs")}
    async with locked(settings, picked[1]):
        first = await press(somebody, "/jobs/act", **fields)
        assert first[1] == (
            "bad",
            "2 of 3 jobs retried. 1 refused: PostgreSQL did not answer in time, perhaps because the job is locked.",
        )
        assert await press(somebody, "/jobs/act", **fields) == first
    assert await audited(rows, "job.retried") == 2
    fields["once"] = await form_on(somebody, "/jobs")
    assert (await press(somebody, "/jobs/act", **fields))[1][1].startswith("1 of 3 jobs retried.")


async def test_many_locked_jobs_end_the_act(
    person: MakePerson, maker: Maker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL may be away: the person waits only so long for all."""
    monkeypatch.setattr(jobs, "BULK_SECONDS", 1.0)
    somebody, picked = await person(), await failed_runs(maker, 3)
    fields = {"job": [str(job_id) for job_id in picked], "action": "retry", "once": await form_on(somebody, "/jobs")}
    async with locked(settings, *picked):
        _, (tone, sentence) = await press(somebody, "/jobs/act", **fields)
    assert tone == "bad"
    assert sentence.startswith("0 of 3 jobs retried. 1 refused: PostgreSQL did not answer in time")
    assert sentence.endswith("2 refused: The jobs before took too long, so nothing was tried.")
    monkeypatch.undo()
    assert (await press(somebody, "/jobs/act", **fields))[1] == ("good", "3 of 3 jobs retried.")


async def bulk_request(maker: Maker, act: str) -> tuple[list[UUID], str, dict[str, Any], str]:
    """A request about three jobs: the jobs in the order in which it tries them, its path, its body, and the member of
    the answer that names the jobs of which it was done.
    """
    if act == "replay":
        latest_first = list(reversed(await failed_runs(maker, 3)))
        return latest_first, "/v1/dead-letters/replay", {"code": "broken"}, "replayed"
    picked = [await maker.make("generation") for _ in range(3)]
    for job_id in picked:
        await maker.lose_order(job_id)
    settlements = [{"job_id": str(job_id), "action": "give_up"} for job_id in picked]
    return picked, "/v1/unsettled/settle", {"settlements": settlements}, "settled"


@pytest.mark.parametrize("act", ["settle", "replay"])
async def test_a_locked_job_does_not_prevent_the_others_of_a_request(
    maker: Maker, settings: Settings, act: str
) -> None:
    """The answer names it. A request of which nothing was done answers 503, as in an outage."""
    picked, path, body, done = await bulk_request(maker, act)
    async with locked(settings, picked[1]):
        answer = await maker.client.post(path, json=body)
        assert answer.status_code == 202, answer.text
        assert sorted(answer.json()[done]) == sorted([str(picked[0]), str(picked[2])])
        refusals = answer.json()["refused"]
        assert [(one["job_id"], one["code"]) for one in refusals] == [(str(picked[1]), "database_unavailable")]
        if act == "settle":
            body["settlements"] = body["settlements"][1:2]
        assert (await maker.client.post(path, json=body)).status_code == 503
    again = await maker.client.post(path, json=body)
    assert (again.status_code, again.json()[done]) == (202, [str(picked[1])])


@pytest.mark.parametrize("act", ["settle", "replay"])
async def test_a_request_tries_no_job_after_a_locked_one_that_took_too_long(
    maker: Maker, settings: Settings, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(dead_letters if act == "replay" else unsettled, "BULK_SECONDS", 1.0)
    picked, path, body, done = await bulk_request(maker, act)
    async with locked(settings, picked[1]):
        answer = await maker.client.post(path, json=body)
        assert (answer.status_code, answer.json()[done]) == (202, [str(picked[0])])
        refused = [one["job_id"] for one in answer.json()["refused"]]
        assert refused == [str(job_id) for job_id in (picked[1:] if act == "settle" else picked[1:2])]
        if act == "settle":
            body["settlements"] = body["settlements"][1:]
        assert (await maker.client.post(path, json=body)).status_code == 503
    again = await maker.client.post(path, json=body)
    assert (again.status_code, again.json()[done]) == (202, [str(job_id) for job_id in picked[1:]])


@pytest.mark.parametrize("outcome", ["success", "refusal", "busy"])
async def test_an_act_on_picked_jobs_ends_in_time_however_its_jobs_end(
    person: MakePerson, maker: Maker, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Else it outlives its reservation, and a second press acts beside it."""
    monkeypatch.setattr(jobs, "BULK_SECONDS", 0.0)
    somebody, picked = await person(), await failed_runs(maker, 3)
    fields = {"job": [str(job_id) for job_id in picked], "action": "retry", "once": await form_on(somebody, "/jobs")}
    if outcome != "success":
        kind = Conflict if outcome == "refusal" else Unavailable
        monkeypatch.setattr(endpoints, "retry_job", AsyncMock(side_effect=kind(outcome, "No.")))
    _, (tone, sentence) = await press(somebody, "/jobs/act", **fields)
    done = "1 of 3 jobs retried." if outcome == "success" else "0 of 3 jobs retried. 1 refused: No."
    assert (tone, sentence) == (
        "bad",
        f"{done} 2 refused: The jobs before took too long, so nothing was tried.",
    )


@pytest.mark.parametrize("act", ["settle", "replay"])
async def test_a_request_ends_in_time_although_each_of_its_jobs_succeeds(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(dead_letters if act == "replay" else unsettled, "BULK_SECONDS", 0.0)
    if act == "replay":
        first, *others = reversed(await failed_runs(maker, 3))  # the latest first
        answer = await maker.client.post("/v1/dead-letters/replay", json={"code": "broken"})
        left = {"jobs": 2, "code": "database_unavailable", "detail": NOT_TRIED}
        assert (answer.status_code, answer.json()) == (202, {"replayed": [str(first)], "refused": [], "left": left})
        again = await maker.client.post("/v1/dead-letters/replay", json={"code": "broken"})
        assert (again.json()["replayed"], again.json()["left"]["jobs"]) == ([str(others[0])], 1)
        return
    first, *others = [await maker.make("generation") for _ in range(3)]
    for job_id in (first, *others):
        await maker.lose_order(job_id)
    settlements = [{"job_id": str(job_id), "action": "give_up"} for job_id in (first, *others)]
    answer = await maker.client.post("/v1/unsettled/settle", json={"settlements": settlements})
    assert (answer.status_code, answer.json()["settled"]) == (202, [str(first)])
    detail = "The jobs before took too long, so nothing was tried."
    assert answer.json()["refused"] == [
        {"job_id": str(job_id), "code": "database_unavailable", "detail": detail} for job_id in others
    ]
    # A job that cannot be settled is no outage, although nothing is settled and others were not tried.
    settlements.append(settlements.pop(1))
    answer = await maker.client.post("/v1/unsettled/settle", json={"settlements": settlements})
    assert (answer.status_code, answer.json()["settled"]) == (202, [])
    assert [one["code"] for one in answer.json()["refused"]] == ["already_settled", *["database_unavailable"] * 2]


async def test_who_retries_a_group_of_more_than_has_room_reads_how_many_are_left(
    person: MakePerson, maker: Maker, rows: Connection, running: Running
) -> None:
    """With more dead letters than a minute's rate, each press was refused for ever."""
    somebody, _ = await person(), await failed_runs(maker, 3)
    (group,) = (await maker.client.get("/v1/dead-letters/groups")).json()["groups"]
    path = f"/dead-letters/{group['fingerprint']}"
    services = running.services
    limited = services.settings.model_copy(update={"submissions_per_tenant": 2})
    services.admission = Admission(limited, services.kinds)
    fields = {"once": await form_on(somebody, path)}
    first = await press(somebody, f"{path}/replay", **fields)
    assert first[1] == ("bad", "2 jobs run again. 1 is left: At most 2 submissions a minute.")
    assert await press(somebody, f"{path}/replay", **fields) == first
    await rows.execute("DELETE FROM rate_bucket")
    fields = {"once": await form_on(somebody, path)}
    assert (await press(somebody, f"{path}/replay", **fields))[1] == ("good", "1 job runs again.")


async def test_a_press_that_ran_out_of_time_is_repeated_at_once(
    person: MakePerson, maker: Maker, rows: Connection, settings: Settings
) -> None:
    """The reservation of its key was kept for a minute: nothing of the deadline was left to release it."""
    somebody, (job_id,) = await person(), await failed_runs(maker, 1)
    (letter,) = (await maker.client.get("/v1/dead-letters")).json()["dead_letters"]
    once = await form_on(somebody, f"/dead-letters/{letter['fingerprint']}")
    path = f"/dead-letters/letters/{letter['task_id']}/replay"
    async with locked(settings, job_id):
        assert (await somebody.send(path, once=once)).status_code == 503
    assert await rows.fetchval("SELECT count(*) FROM idempotency WHERE key LIKE 'console-press-%'") == 0
    async with asyncio.timeout(30):
        assert await press(somebody, path, once=once) == (f"/console/jobs/{job_id}", ("good", "The job runs again."))


async def test_the_answer_of_work_that_took_all_the_time_is_stored(running: Running) -> None:
    """The work is committed: a second press must not do it again."""
    worked = []

    async def work() -> Answer:
        worked.append(1)
        deadline.current()._count(60.0)
        assert deadline.current().is_over
        return Answer(303, b"done")

    for _ in range(2):
        deadline.begin(60.0)
        answer = await once_over_transactions(running.services.pool, "acme", "key", b"hash", work)
        assert answer.body == b"done"
    assert len(worked) == 1
