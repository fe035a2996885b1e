"""External workers get files by signed URL and hand files in by signed URL: they are checked before they count, and
nothing of an attempt that lost its lease does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest

from leasehold.api.auth.security import EXTERNAL_WORK, JOBS_DELETE
from leasehold.client.external import ExternalWorker, Task
from leasehold.db.database import Connection
from leasehold.domain.errors import Permanent
from leasehold.limits import external_files, upload_room
from leasehold.pipelines import SHIPPED
from leasehold.runtime import pacing
from leasehold.runtime.gather import cancel_and_wait
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import sweeps
from leasehold.worker.maintenance.housekeeping import Housekeeping
from tests.api.conftest import Running, client_of
from tests.api.media_api import problem
from tests.factories import Rows, assert_history
from tests.runs.conftest import SCOPES, Client
from tests.runs.test_external import claim, settle
from tests.support.bucket import Bucket
from tests.support.inspections import inspect_during

STEPS = [{"id": name, "queue": "reports", "retry": {"max_attempts": 3, "backoff_seconds": [0]}}
         for name in ("make", "use")]  # fmt: skip
DATA = b"a,b\n1,2\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def named(data: bytes = DATA, name: str = "report.csv") -> dict[str, str]:
    return {"name": name, "sha256": sha256(data)}


@pytest.fixture
def runs_settings(runs_settings: Settings) -> Settings:
    return runs_settings.model_copy(
        update={"external_files": 3, "external_files_bytes": 3000, "upload_unfinished_bytes": 4 * 1024 * 1024}
    )


@pytest.fixture
async def run(client: Client) -> str:
    assert (await client.post("/v1/templates", type="made", steps=STEPS)).status_code == 201
    return await client.start("made")


async def announce(client: Client, task: dict[str, Any], *files: dict[str, Any]) -> httpx2.Response:
    wanted = files or ({"name": "report.csv", "size": len(DATA), "content_type": "text/csv"},)
    return await settle(client, task, "files", files=list(wanted))  # type: ignore[no-any-return]  # an answer


async def send(ticket: dict[str, Any], data: bytes = DATA, **headers: str) -> int:
    async with httpx2.AsyncClient(timeout=40) as http:
        answer = await http.put(ticket["url"], content=data, headers=ticket["headers"] | headers)
    return int(answer.status_code)


async def hand_in(client: Client, task: dict[str, Any], data: bytes = DATA, name: str = "report.csv") -> dict[str, Any]:
    answer = await announce(client, task, {"name": name, "size": len(data), "content_type": "text/csv"})
    assert answer.status_code == 200, answer.text
    (ticket,) = answer.json()["files"]
    assert await send(ticket, data) == 200
    return dict(ticket)


async def lose(rows: Connection, task: dict[str, Any]) -> None:
    await rows.execute("UPDATE task SET lease_until = clock_timestamp() WHERE id = $1", UUID(task["task_id"]))
    await sweeps.expire_leases(rows, [], 5)


async def keep_house(running: Running) -> None:
    services = running.services
    async with services.pool.acquire() as connection:
        await external_files.give_up(connection)
    house = Housekeeping(services.settings, services.pool.acquire, services.store, SHIPPED)
    while await house.uploads():
        pass


async def test_a_file_goes_in_and_the_next_step_and_the_run_show_it(
    client: Client, running: Running, rows: Connection, s3: Bucket, run: str
) -> None:
    task = await claim(client)
    await hand_in(client, task)
    assert (await settle(client, task, "complete", files=[named()])).status_code == 200
    (file,) = (await claim(client))["files"]
    assert {key: file[key] for key in ("step", "name", "size", "sha256", "content_type")} == {
        "step": "make", "name": "report.csv", "size": len(DATA), "sha256": sha256(DATA), "content_type": "text/csv",
    }  # fmt: skip
    async with httpx2.AsyncClient(timeout=40) as http:
        assert (await http.get(file["url"])).content == DATA
    (output,) = (await client.look(run))["outputs"]
    assert output["key"] == f"jobs/{run}/output/make.1/report.csv"
    await assert_history(Rows(rows), UUID(run))
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0
    await keep_house(running)
    assert await s3.keys() == [output["key"]]


@pytest.mark.parametrize("lie", ["another digest", "other bytes", "never sent", "never announced"])
async def test_what_is_not_what_was_said_does_not_count(client: Client, run: str, lie: str) -> None:
    task = await claim(client)
    if lie in ("another digest", "other bytes"):
        await hand_in(client, task, DATA if lie == "another digest" else DATA[::-1])
    elif lie == "never sent":
        await announce(client, task)
    code = {"never sent": "file_missing", "never announced": "file_not_announced"}.get(lie, "file_mismatch")
    said = named(b"other" if lie == "another digest" else DATA)
    problem(await settle(client, task, "complete", files=[said], result={"made": 1}), 422, code)
    seen = await client.look(run)
    assert (seen["outputs"], seen["result"], seen["status"]) == ([], None, "waiting_worker")
    assert (await settle(client, task, "heartbeat")).status_code == 200


async def after_the_url(running: Running, rows: Connection) -> None:
    """The URLs have ended, and housekeeping has inspected what arrived by them."""
    await rows.execute(
        "UPDATE upload SET writable_until = clock_timestamp() - interval '1 hour', look_at = clock_timestamp()"
    )
    await keep_house(running)


async def test_a_file_is_announced_again_after_its_url_has_ended(
    client: Client, running: Running, rows: Connection, run: str
) -> None:
    task = await claim(client)
    assert (await announce(client, task)).status_code == 200
    await after_the_url(running, rows)
    await hand_in(client, task)
    assert (await settle(client, task, "complete", files=[named()])).status_code == 200
    assert run


async def test_a_transfer_that_began_in_time_counts_however_late_it_ends(
    client: Client, running: Running, rows: Connection, run: str
) -> None:
    task = await claim(client)
    (ticket,) = (await announce(client, task)).json()["files"]
    await after_the_url(running, rows)
    assert await send(ticket) == 200
    assert (await settle(client, task, "complete", files=[named()])).status_code == 200
    assert run


@pytest.mark.parametrize("how", ["complete", "fail"])
async def test_a_file_waits_for_its_attempt_however_many_days_the_attempt_goes_on(
    client: Client, running: Running, rows: Connection, s3: Bucket, run: str, how: str
) -> None:
    task = await claim(client)
    await hand_in(client, task)
    for _ in range(2):
        await rows.execute(
            "UPDATE upload SET writable_until = clock_timestamp() - interval '3 days',"
            " forget_at = clock_timestamp() - interval '2 days', look_at = clock_timestamp()"
        )
        await keep_house(running)
    due_in = await rows.fetchval("SELECT look_at - clock_timestamp() FROM upload")
    assert timedelta(hours=1) < due_in <= timedelta(days=1), "it is not read again and again"
    if how == "complete":
        assert (await settle(client, task, "complete", files=[named()])).status_code == 200
        assert len((await client.look(run))["outputs"]) == 1
    else:
        await settle(client, task, "fail", code="no_luck")
        await keep_house(running)
        assert await s3.keys() == []
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


async def test_files_whose_urls_have_ended_count_for_the_bound_of_the_attempt(
    client: Client, running: Running, rows: Connection, run: str
) -> None:
    task = await claim(client)
    big = {"size": 2000, "content_type": "text/csv"}
    assert (await announce(client, task, {"name": "a", **big})).status_code == 200
    await after_the_url(running, rows)
    problem(await announce(client, task, {"name": "b", **big}), 422, "files_too_large")
    assert run


async def test_announced_files_are_in_the_room_that_the_process_remembers(
    client: Client, running: Running, rows: Connection, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_room, "FRESH_SECONDS", 3600.0)
    room, tenant = running.services.admission.upload_room, await rows.fetchval("SELECT tenant_id FROM job")
    assert await room.reserve(rows, tenant, 0)
    files = [{"name": name, "size": 1, "content_type": "text/csv"} for name in ("a", "b")]
    assert (await announce(client, await claim(client), *files)).status_code == 200
    assert not await room.reserve(rows, tenant, 0)  # each counts a MiB, and a quarter of 4 MiB needs no exact count
    assert run


async def test_the_store_takes_the_announced_number_of_bytes_and_type_only(client: Client, run: str) -> None:
    (ticket,) = (await announce(client, await claim(client))).json()["files"]
    assert await send(ticket, DATA + b"more") == 403
    assert await send(ticket, DATA, **{"Content-Type": "text/html"}) == 403
    assert await send(ticket) == 200
    assert run


async def test_a_store_that_can_refuse_to_overwrite_is_told_to(
    client: Client, running: Running, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a header that the URL is signed with: without it the URL is worth nothing. What such a store then does is
    tested with one (tests/storage).
    """

    async def probe_once() -> bool:
        running.services.store.conditional = True
        return True

    monkeypatch.setattr(running.services.store, "probe_once", probe_once)
    task = await claim(client)
    (ticket,) = (await announce(client, task)).json()["files"]
    assert ticket["headers"]["If-None-Match"] == "*"
    assert "if-none-match" in ticket["url"].lower()
    assert await send({**ticket, "headers": {"Content-Type": "text/csv"}}) in (400, 403)
    assert await send(ticket) == 200
    assert (await settle(client, task, "complete", files=[named()])).status_code == 200
    assert run


async def test_a_worker_that_lost_its_lease_changes_nothing(
    client: Client, running: Running, rows: Connection, s3: Bucket, run: str
) -> None:
    """Neither by what it sent, nor by what it sends to a URL that still lives, nor by naming it."""
    first = await claim(client)
    ticket = await hand_in(client, first)
    (another,) = (await announce(client, first, {"name": "late", "size": 4})).json()["files"]
    await lose(rows, first)
    second = await claim(client, "w2")
    assert await send(another, b"late") == 200
    problem(await announce(client, first), 409, "lease_lost")
    for files in ([named()], [named(b"late", "late")], [named(b"never", "never")]):
        problem(await settle(client, first, "complete", files=files), 409, "lease_lost")
    problem(await settle(client, second, "complete", files=[named()]), 422, "file_not_announced")
    await hand_in(client, second, b"the second's")
    assert (await settle(client, second, "complete", files=[named(b"the second's")])).status_code == 200
    (output,) = (await client.look(run))["outputs"]
    assert (output["key"], output["sha256"]) == (f"jobs/{run}/output/make.2/report.csv", sha256(b"the second's"))
    await keep_house(running)
    assert await s3.keys() == [output["key"]]
    assert await send(ticket) == 200  # its URL still lives
    await rows.execute("UPDATE upload SET look_at = clock_timestamp() - interval '1 s'")
    await keep_house(running)
    assert await s3.keys() == [output["key"]]


async def test_a_lease_that_is_lost_while_the_bytes_are_read_commits_nothing(
    client: Client, running: Running, rows: Connection, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await claim(client)
    await hand_in(client, task)
    reading, go_on = asyncio.Event(), asyncio.Event()
    digest = running.services.store.digest

    async def slowly(*args: Any, **more: Any) -> Any:
        reading.set()
        await go_on.wait()
        return await digest(*args, **more)

    monkeypatch.setattr(running.services.store, "digest", slowly)
    completing = asyncio.create_task(settle(client, task, "complete", files=[named()]))
    await reading.wait()
    await lose(rows, task)
    go_on.set()
    problem(await completing, 409, "lease_lost")
    assert (await client.look(run))["outputs"] == []
    assert await rows.fetchval("SELECT open FROM upload")


async def test_a_completion_whose_answer_was_lost_is_answered_again(client: Client, rows: Connection, run: str) -> None:
    task = await claim(client)
    await hand_in(client, task)
    body = {"files": [named()], "result": {"made": 1}}
    answers = await asyncio.gather(*(settle(client, task, "complete", **body) for _ in range(4)))
    answers.append(await settle(client, task, "complete", **body))
    assert [answer.json() for answer in answers] == [{"status": "succeeded"}] * 5
    assert len((await client.look(run))["outputs"]) == 1
    await assert_history(Rows(rows), UUID(run))


async def test_what_is_sent_and_not_named_goes_and_counts_no_more(
    client: Client, running: Running, rows: Connection, s3: Bucket, run: str
) -> None:
    task = await claim(client)
    await hand_in(client, task, b"kept", "kept")
    await hand_in(client, task, b"left", "left")
    assert (await settle(client, task, "complete", files=[named(b"kept", "kept")])).status_code == 200
    await keep_house(running)
    assert await s3.keys() == [f"jobs/{run}/output/make.1/kept"]
    assert await rows.fetchval("SELECT count(*) FROM upload WHERE open") == 0


@pytest.mark.parametrize("how", ["fail", "release", "cancel", "limit", "forgotten"])
async def test_what_an_attempt_leaves_that_ends_otherwise_goes(
    client: Client, running: Running, rows: Connection, s3: Bucket, run: str, how: str
) -> None:
    task = await claim(client)
    await hand_in(client, task)
    await keep_house(running)
    assert len(await s3.keys()) == 1
    match how:
        case "fail":
            await settle(client, task, "fail", code="no_luck")
        case "release":
            await settle(client, task, "release")
        case "cancel":
            await client.post(f"/v1/runs/{run}/cancel")
            await settle(client, task, "acknowledge-cancel")
        case "limit":
            await rows.execute("UPDATE task SET timeout_seconds = 1, started_at = started_at - interval '5 s'")
            problem(await settle(client, task, "complete", files=[named()]), 409, "lease_lost")
        case "forgotten":
            await rows.execute("DELETE FROM job")
    await keep_house(running)
    assert await s3.keys() == []
    await rows.execute("UPDATE upload SET look_at = clock_timestamp() - interval '1 s'")
    await rows.execute("UPDATE upload SET forget_at = look_at")
    await keep_house(running)
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


async def test_a_file_whose_attempt_ends_during_its_last_inspection_goes(
    client: Client, running: Running, rows: Connection, s3: Bucket, run: str
) -> None:
    """Its row stays until its object is deleted: nobody else would find the object before the job goes."""
    task = await claim(client)
    await hand_in(client, task)
    await rows.execute(
        "UPDATE upload SET writable_until = clock_timestamp() - interval '3 days',"
        " forget_at = clock_timestamp() - interval '2 days', look_at = clock_timestamp()"
    )

    async def end_attempt() -> None:
        await settle(client, task, "fail", code="no_luck")
        await external_files.give_up(rows)

    await inspect_during(running.services, end_attempt)
    await keep_house(running)
    assert await s3.keys() == []
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0
    assert run


async def finish(client: Client, run: str) -> dict[str, Any]:
    """Hand a file in and end the run. Returns the ticket by which the file was sent."""
    task = await claim(client)
    ticket = await hand_in(client, task)
    assert (await settle(client, task, "complete", files=[named()])).status_code == 200
    assert (await settle(client, await claim(client), "complete")).status_code == 200
    await client.until(run, "succeeded")
    return ticket


@pytest.mark.parametrize("deletes", ["a client", "retention"])
async def test_what_is_sent_to_a_deleted_run_afterwards_goes_too(
    client: Client, running: Running, rows: Connection, s3: Bucket, run: str, deletes: str
) -> None:
    """The URL lives on for a while, and a slow transfer may arrive even later. Nobody else would find the object."""
    ticket = await finish(client, run)
    services = running.services
    if deletes == "a client":
        key = await create_key(rows, tenant_id="acme", client_id="deletes", scopes=(*SCOPES, JOBS_DELETE))
        async with client_of(running.url, key.text) as http:
            assert (await http.delete(f"/v1/jobs/{run}")).status_code == 204
    else:
        await rows.execute("UPDATE job SET expires_at = clock_timestamp()")
        await Housekeeping(services.settings, services.pool.acquire, services.store, SHIPPED).retention()
    assert await rows.fetchval("SELECT count(*) FROM job") == 0
    assert await send(ticket) == 200
    await keep_house(running)
    assert len(await s3.keys()) == 1
    past = "clock_timestamp() - interval '1 s'"
    await rows.execute(f"UPDATE upload SET look_at = {past}, forget_at = {past} WHERE look_at = forget_at")
    await keep_house(running)
    assert await s3.keys() == []
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0


@pytest.mark.parametrize(
    ("change", "watched_keys"),
    [
        ("UPDATE job SET finished_at = finished_at - interval '24 hours 10 minutes'", 1),
        ("UPDATE job SET finished_at = finished_at - interval '24 hours 20 minutes'", 0),
        ("UPDATE task SET queue = 'reports'", 0),
        ("UPDATE job SET expires_at = clock_timestamp() + interval '1 hour'", 0),
    ],
    ids=["transfers may arrive", "no transfer can arrive", "the fleet's own file", "the run stays"],
)
async def test_a_deleted_runs_keys_are_watched_only_while_a_transfer_may_arrive(
    client: Client, rows: Connection, run: str, change: str, watched_keys: int
) -> None:
    await finish(client, run)
    await rows.execute("UPDATE job SET expires_at = clock_timestamp()")
    await rows.execute(change)
    await external_files.forget_with_jobs(rows, [UUID(run)])
    assert await rows.fetchval("SELECT count(*) FROM upload") == watched_keys


async def test_a_name_that_is_announced_again_gets_a_fresh_url(client: Client, rows: Connection, run: str) -> None:
    task = await claim(client)
    for _ in range(3):
        (ticket,) = (await announce(client, task)).json()["files"]
    assert await send(ticket) == 200
    problem(await announce(client, task, {"name": "report.csv", "size": 1}), 422, "file_mismatch")
    assert await rows.fetchval("SELECT count(*) FROM upload") == 1
    assert (await settle(client, task, "complete", files=[named()])).status_code == 200
    assert run


async def test_an_attempt_hands_in_so_many_files_and_bytes_in_all(client: Client, run: str) -> None:
    task = await claim(client)
    one = {"name": "one", "size": 1000}
    problem(await announce(client, task, {"name": "large", "size": 3001}), 422, "files_too_large")
    assert (await announce(client, task, one)).status_code == 200
    problem(await announce(client, task, {"name": "two", "size": 2001}), 422, "files_too_large")
    more = [{"name": str(number), "size": 1000} for number in range(3)]
    problem(await announce(client, task, *more), 422, "too_many_files")
    assert (await announce(client, task, *more[:2])).status_code == 200
    assert run


async def test_a_name_twice_in_one_announcement_has_one_size(client: Client, rows: Connection, run: str) -> None:
    """Each URL admits as many bytes as its entry says, and only one entry is counted."""
    task = await claim(client)
    small, large = ({"name": "one", "size": size, "content_type": "text/csv"} for size in (len(DATA), 2900))
    for both in ((large, small), (small, large)):
        problem(await announce(client, task, *both), 422, "file_mismatch")
    assert await rows.fetchval("SELECT count(*) FROM upload") == 0
    first, second = (await announce(client, task, small, small)).json()["files"]
    assert first["name"] == second["name"] == "one"
    assert await send(second) == 200
    two_sums = [named(b"other bytes", "one"), named(name="one")]
    problem(await settle(client, task, "complete", files=two_sums), 422, "invalid_request")
    assert (await settle(client, task, "complete", files=[named(name="one")] * 2)).status_code == 200
    assert await rows.fetchval("SELECT count(*) FROM output") == 1
    assert run


async def test_bounds_of_the_tenant_hold_for_them_too(client: Client, run: str) -> None:
    """Four megabytes unfinished; each file counts one at least."""
    await client.start("made")
    first, second = await claim(client), await claim(client)
    files = [{"name": name, "size": 1} for name in "abc"]
    assert (await announce(client, first, *files)).status_code == 200
    problem(await announce(client, second, *files[:2]), 429, "upload_quota_exceeded")
    assert (await announce(client, second, files[0])).status_code == 200
    assert (await announce(client, first, *files)).status_code == 200
    assert run


async def test_tenants_are_apart(client: Client, stranger: Client, run: str) -> None:
    task = await claim(client)
    await hand_in(client, task)
    problem(await announce(stranger, task), 409, "lease_lost")
    problem(await settle(stranger, task, "complete", files=[named()]), 409, "lease_lost")
    assert (await client.look(run))["outputs"] == []
    problem(await client.post(f"/v1/external/tasks/{uuid4()}/files", worker_id="w", epoch=1,
                              files=[{"name": "a", "size": 1}]), 409, "lease_lost")  # fmt: skip


@pytest.mark.parametrize(
    "file",
    [
        {"name": "../up"}, {"name": "a/b"}, {"name": ""}, {"name": ".hidden"}, {"name": "a" * 129}, {"name": "a\n"},
        {"size": 0}, {"size": -1}, {"size": True}, {"size": 5 * 1024**3 + 1}, {"content_type": "text"},
        {"content_type": "text/csv\r\nX: y"}, {"key": "media/x"},
    ],
)  # fmt: skip
async def test_a_file_that_makes_no_sense_is_refused(client: Client, run: str, file: dict[str, Any]) -> None:
    task = await claim(client)
    problem(await announce(client, task, {"name": "a", "size": 1} | file), 422, "invalid_request")
    assert run


@pytest.mark.parametrize("file", [{"sha256": "ff"}, {"sha256": "F" * 64}, {"name": "../up"}, {"size": 1}])
async def test_a_name_of_a_file_that_makes_no_sense_is_refused(client: Client, run: str, file: dict[str, Any]) -> None:
    task = await claim(client)
    problem(await settle(client, task, "complete", files=[named() | file]), 422, "invalid_request")
    assert run


async def test_the_reference_client_reads_and_writes_files(
    client: Client, running: Running, rows: Connection, run: str
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(task: Task) -> dict[str, Any] | None:
        if task.step == "make":
            await task.write("report.csv", DATA, "text/csv")
            return None
        if await task.read("report.csv") != DATA or await task.read("report.csv", step="make") != DATA:
            raise Permanent("wrong", "other bytes")
        with pytest.raises(KeyError):
            await task.read("another")
        return {"read": len(DATA)}

    async with ExternalWorker(running.url, key.text, queues=["reports"]) as outside:
        assert await outside.work_once(handle)
        assert await outside.work_once(handle)
    assert (await client.look(run))["result"] == {"use": {"read": len(DATA)}}


@pytest.fixture
async def signatures(running: Running, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """For each URL that the API has signed, how often other requests could run before it."""
    turn, signed, store = 0, list[int](), running.services.store

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def noting(sign: Callable[..., str]) -> Callable[..., str]:
        def note(*arguments: Any, **options: Any) -> str:
            signed.append(turn)
            return sign(*arguments, **options)

        return note

    for name in ("sign_get", "sign_put"):
        monkeypatch.setattr(store, name, noting(getattr(store, name)))
    monkeypatch.setattr(pacing, "PIECE_SIZE", 2)
    working = asyncio.create_task(others())
    yield signed
    await cancel_and_wait(working)


async def test_a_claim_of_many_files_signs_each_once_and_lets_others_in_between(
    client: Client, rows: Connection, signatures: list[int]
) -> None:
    """A hundred tasks that need the same steps have the files of these steps a hundred times."""
    makers, users = ["m1", "m2", "m3"], ["u1", "u2", "u3"]
    steps = [{"id": name, "queue": "reports", "needs": []} for name in makers]
    steps += [{"id": name, "queue": "reports", "needs": makers} for name in users]
    assert (await client.post("/v1/templates", type="wide", steps=steps)).status_code == 201
    await client.start("wide")
    for _ in makers:
        task = await claim(client)
        await rows.execute(
            "INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)"
            " SELECT id, n::text, job_id, tenant_id, step, step || '/' || n, 3, 'ff', 'text/plain'"
            " FROM task, generate_series(1, 3) AS n WHERE id = $1",
            UUID(task["task_id"]),
        )
        assert (await settle(client, task, "complete")).status_code == 200
    answer = await client.post("/v1/external/claim", worker_id="w1", queues=["reports"], limit=100)
    for task in answer.json()["tasks"]:
        assert all(f"/{file['step']}/{file['name']}?" in file["url"] for file in task["files"])
        assert len(task["files"]) == 9
    assert (len(answer.json()["tasks"]), len(signatures)) == (3, 9)
    assert max(Counter(signatures).values()) <= pacing.PIECE_SIZE


async def test_the_urls_of_many_announced_files_let_others_in_between(
    client: Client, run: str, signatures: list[int]
) -> None:
    answer = await announce(client, await claim(client), *({"name": f"f{n}", "size": 1} for n in range(3)))
    assert len({ticket["url"] for ticket in answer.json()["files"]}) == len(signatures) == 3
    assert max(Counter(signatures).values()) <= pacing.PIECE_SIZE
