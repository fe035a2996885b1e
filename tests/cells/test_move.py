"""A tenant moves to another cell: nothing is lost, nothing is done twice, and a cut-off move goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import pytest
from asyncpg import Connection
from pydantic import SecretStr
from structlog.testing import capture_logs

from leasehold import App, Context
from leasehold.cli import moving
from leasehold.cli.moving import Move, abort, clean, move_tenant, state_of_move
from leasehold.cli.moving_rows import _pipe, _snapshot
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.domain.registry import Pipelines
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of
from tests.cells.conftest import DEMONSTRATIONS, Cell, Two, last_json
from tests.support.bucket import Bucket
from tests.support.databases import Databases

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

MOVE = Move("acme", "b", drain_seconds=120)
SECONDS = 60.0


def settings_of(cell: Cell) -> Settings:
    return cell.running.services.settings


async def moved(two: Two, move: Move = MOVE) -> dict[str, Any]:
    return await move_tenant(settings_of(two.a), settings_of(two.b), move)


@asynccontextmanager
async def rows_of(cell: Cell) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(cell.database_url)
    try:
        yield connection
    finally:
        await connection.close()


async def numbers(cell: Cell) -> dict[str, int]:
    """The rows of the tenant, by table, without those that stay in each cell."""
    async with rows_of(cell) as rows:
        return {
            table: await rows.fetchval(f"SELECT count(*) FROM {table} WHERE tenant_id = 'acme'")
            for table in ("api_key", "job", "task", "run", "history", "idempotency", "job_tag")
        }


async def submit(url: str, key: str, **more: Any) -> str:
    async with client_of(url, key) as client:
        answer = await client.post("/v1/runs", json={"template": "noop", "payload": {}} | more)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])


@asynccontextmanager
async def working(cell: Cell, path: Path, pipelines: Pipelines | None = None) -> AsyncIterator[None]:
    changes = {"work_dir": str(path), "poll_seconds": 0.05, "amqp_queue_prefix": f"cell-{cell.name}-{path.name}"}
    await asyncio.to_thread(path.mkdir, exist_ok=True)
    served = pipelines or Pipelines.from_source(DEMONSTRATIONS)
    async with Worker(settings_of(cell).model_copy(update=changes), served):
        yield


async def ended(cell: Cell, jobs: set[str]) -> None:
    """Wait until all of these jobs have succeeded in the cell, each after one claim of its only step."""
    async with rows_of(cell) as rows, asyncio.timeout(SECONDS):
        while True:
            found = await rows.fetch(
                "SELECT j.id, j.status, t.attempt FROM job j JOIN task t ON t.job_id = j.id"
                " WHERE j.tenant_id = 'acme' AND j.pipeline = 'noop'"
            )
            if {str(row["id"]) for row in found if row["status"] == "succeeded"} >= jobs:
                assert {row["attempt"] for row in found if str(row["id"]) in jobs} == {1}
                return
            await asyncio.sleep(0.05)


async def test_a_tenant_moves_with_all_that_it_has_and_works_on_with_its_key(two: Two, tmp_path: Path) -> None:
    key = await two.a.key()
    async with working(two.a, tmp_path / "a"):
        done = await submit(two.a.running.url, key, tags={"team": "x"})
        await ended(two.a, {done})
    waiting = await submit(two.a.running.url, key)
    before = await numbers(two.a)
    paths = (two.a.path, two.b.path)
    answer = await moved(two, Move("acme", "b", paths))
    assert (answer["stage"], answer["from"], answer["to"]) == ("moved", "a", "b")
    assert await numbers(two.b) == before
    assert [json.loads(path.read_text())["tenants"] for path in paths] == [{"acme": "b"}] * 2
    async with client_of(two.b.running.url, key) as client:
        assert (await client.get(f"/v1/runs/{done}")).json()["status"] == "succeeded"
    async with working(two.a, tmp_path / "a"), working(two.b, tmp_path / "b"):
        new = await submit(two.b.running.url, key)
        await ended(two.b, {done, waiting, new})
    async with rows_of(two.a) as rows:
        assert await rows.fetchval("SELECT status FROM job WHERE id = $1", waiting) != "succeeded"
    await clean(settings_of(two.a), settings_of(two.b), MOVE)
    assert set((await numbers(two.a)).values()) == {0}
    async with rows_of(two.a) as rows:
        assert await rows.fetchval("SELECT count(*) FROM pg_trigger WHERE starts_with(tgname, 'moving_')") == 0


async def test_objects_and_unusual_values_arrive_as_they_are(two: Two, s3_server: Bucket, s3_client: S3Client) -> None:
    key = await two.a.key()
    job = await submit(two.a.running.url, key)
    other_job = await submit(two.a.running.url, await two.a.key("other"))
    bucket = await s3_server.fresh(s3_client)
    target = settings_of(two.b).model_copy(update={"s3_bucket": bucket.bucket})
    stores = ObjectStore.from_settings(settings_of(two.a)), ObjectStore.from_settings(target)
    for store in stores:
        await store.open()
    try:
        for owner in (job, other_job):
            await stores[0].put(f"jobs/{owner}/only/x.txt", b"result", content_type="text/plain", metadata={})
        async with rows_of(two.a) as rows:
            task = await rows.fetchval("SELECT id FROM task WHERE job_id = $1", job)
            await rows.execute(
                "INSERT INTO output (task_id, name, job_id, step, key, size, sha256, content_type)"
                " VALUES ($1, 'x.txt', $2, 'only', $3, 6, '', 'text/plain')",
                task, job, f"jobs/{job}/only/x.txt",
            )  # fmt: skip
            await rows.execute("INSERT INTO result VALUES ($1, 'null')", task)
            for number in range(3):
                await rows.execute(
                    "INSERT INTO signal (job_id, tenant_id, name, payload) VALUES ($1, 'acme', $2, $3)",
                    job, f"n{number}", r'[1e30, "a\\ \n", null]',
                )  # fmt: skip
        answer = await move_tenant(settings_of(two.a), target, MOVE)
        assert answer["objects"] == 1
        assert [one.key async for one in stores[1].list("")] == [f"jobs/{job}/only/x.txt"]
        copy, original = await stores[1].head(f"jobs/{job}/only/x.txt"), await stores[0].head(f"jobs/{job}/only/x.txt")
        assert copy is not None
        assert original is not None
        assert (copy.sha256, copy.content_type) == (original.sha256, "text/plain")
        async with rows_of(two.a) as old, rows_of(two.b) as new:
            for query in (
                "SELECT value::text FROM result",
                "SELECT name, payload::text FROM signal ORDER BY id",
                "SELECT * FROM output",
                "SELECT * FROM history WHERE tenant_id = 'acme' ORDER BY job_id, seq",
                "SELECT * FROM api_key WHERE tenant_id = 'acme'",
            ):
                assert [dict(row) for row in await new.fetch(query)] == [dict(row) for row in await old.fetch(query)]
        await clean(settings_of(two.a), target, MOVE)
        assert [one.key async for one in stores[0].list("")] == [f"jobs/{other_job}/only/x.txt"]
    finally:
        for store in stores:
            await store.close()
        await bucket.delete(s3_client)


async def test_a_store_with_two_addresses_is_one_store_and_keeps_its_objects(two: Two) -> None:
    job = await submit(two.a.running.url, await two.a.key())
    source = settings_of(two.a)
    target = settings_of(two.b).model_copy(update={"s3_endpoint": f"{source.s3_endpoint}/"})
    store = ObjectStore.from_settings(source)
    await store.open()
    try:
        await store.put(f"jobs/{job}/input/x", b"x", content_type="text/plain", metadata={})
        await move_tenant(source, target, MOVE)
        await clean(source, target, MOVE)
        assert [one.key async for one in store.list("jobs/")] == [f"jobs/{job}/input/x"]
    finally:
        await store.close()


async def test_a_map_that_another_move_changes_meanwhile_has_both_tenants_in_their_new_cell(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("acme", "other"):
        await submit(two.a.running.url, await two.a.key(tenant))
    paths, switch = (two.a.path, two.b.path), moving._switch

    async def switch_after_the_other_move(cells: Any, move: Move) -> None:
        monkeypatch.setattr(moving, "_switch", switch)
        await moved(two, Move("other", "b", paths))
        await switch(cells, move)

    monkeypatch.setattr(moving, "_switch", switch_after_the_other_move)
    await moved(two, Move("acme", "b", paths))
    for path in paths:
        assert json.loads(path.read_text())["tenants"] == {"acme": "b", "other": "b"}


async def test_moves_that_end_at_once_all_change_the_map(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    path.write_text(json.dumps({"cells": {"a": "http://a", "b": "http://b"}, "tenants": {"here": "a"}}))
    path.chmod(0o640)
    moves = [Move(f"t{number}", "b") for number in range(40)]
    await asyncio.gather(*(asyncio.to_thread(moving._change_map, path, move) for move in moves))
    assert json.loads(path.read_text())["tenants"] == {"here": "a"} | {move.tenant: "b" for move in moves}
    assert path.stat().st_mode & 0o777 == 0o640


async def test_the_old_cell_refuses_what_is_new_and_goes_on_to_serve_others(two: Two) -> None:
    key, other = await two.a.key(), await two.a.key("other")
    await submit(two.a.running.url, key)
    await moved(two)
    async with client_of(two.a.running.url, key) as client:  # the map has not changed
        with capture_logs() as lines:
            answer = await client.post("/v1/runs", json={"template": "noop", "payload": {}})
    assert (answer.status_code, answer.json()["code"]) == (503, "tenant_moving")
    assert int(answer.headers["retry-after"]) > 0
    (line,) = [line for line in lines if line["event"].startswith("request failed")]
    assert (line["log_level"], line["code"]) == ("warning", "tenant_moving")  # no bug, so no error
    await submit(two.a.running.url, other)


async def test_jobs_that_have_moved_take_no_place_at_a_limit_that_all_tenants_of_the_old_cell_share(two: Two) -> None:
    """They never end in the old cell, and days may pass before `clean` deletes them there."""
    key, other, limit = await two.a.key(), await two.a.key("other"), "template:noop"
    async with rows_of(two.a) as rows:
        await rows.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('*', $1, 2, true)", limit)
        await submit(two.a.running.url, other)
        admitted, waiting = [UUID(await submit(two.a.running.url, key)) for _ in range(2)]
        await moved(two)
        new, too_many = [UUID(await submit(two.a.running.url, other)) for _ in range(2)]
        held = {row["id"] for row in await rows.fetch("SELECT id FROM job WHERE held")}
    assert (new in held, held) == (False, {waiting, too_many})
    async with rows_of(two.b) as rows:
        places = await rows.fetch("SELECT job_id, admitted_at FROM gate_job WHERE tenant_id = '*'")
    assert {row["job_id"]: row["admitted_at"] is not None for row in places} == {admitted: True, waiting: False}


async def test_a_tenant_moves_while_clients_submit_and_workers_work(two: Two, tmp_path: Path) -> None:
    """Each job that was acknowledged ends once, in one of the two cells."""
    key = await two.a.key()
    acknowledged: set[str] = set()
    stop = asyncio.Event()

    async def keep_submitting() -> None:
        url = two.a.running.url
        while not stop.is_set():
            async with client_of(url, key) as client:
                answer = await client.post("/v1/runs", json={"template": "noop", "payload": {}})
            if answer.status_code == 202:
                acknowledged.add(answer.json()["id"])
            elif answer.status_code == 421:
                url = answer.headers["leasehold-cell-address"]
            else:
                assert answer.json()["code"] == "tenant_moving", answer.text
            await asyncio.sleep(0.01)

    async with working(two.a, tmp_path / "a"), working(two.b, tmp_path / "b"), asyncio.TaskGroup() as group:
        group.create_task(keep_submitting())
        while len(acknowledged) < 20:
            await asyncio.sleep(0.01)
        await moved(two, Move("acme", "b", (two.a.path, two.b.path), 120))
        so_far = len(acknowledged)
        while len(acknowledged) < so_far + 20:
            await asyncio.sleep(0.01)
        stop.set()
        await ended(two.b, acknowledged)
    async with rows_of(two.a) as old, rows_of(two.b) as new:
        claims = "SELECT job_id, count(*) AS n FROM history WHERE kind = 'claimed' GROUP BY job_id"
        both = [{row["job_id"]: row["n"] for row in await rows.fetch(claims)} for rows in (old, new)]
    assert {both[1][job] for job in both[1]} == {1}
    assert all(both[1][job] == claims for job, claims in both[0].items())


async def test_a_move_that_is_killed_after_any_commit_goes_on(two: Two, tmp_path: Path) -> None:
    key = await two.a.key()
    waiting = {await submit(two.a.running.url, key) for _ in range(3)}
    target = tmp_path / "b.env"
    target.write_text("\n".join(variables(two.b)))
    arguments = ["cells", "move", "acme", "--to", "b", "--target-env", str(target), "--json"]
    environment = os.environ | dict(line.split("=", 1) for line in variables(two.a))
    stages = [""]
    commits = 1
    while True:
        program = _KILLED.format(commits=commits)
        outcome = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program, *arguments], env=environment, capture_output=True
        )
        if outcome.returncode == 0:
            break
        assert outcome.returncode == -signal.SIGKILL, outcome.stderr.decode()
        stages.append((await state_of_move(settings_of(two.a), "acme"))["stage"])
        commits = commits + 1 if stages[-1] == stages[-2] else 1  # within a stage, the next try comes further
    assert set(stages) >= {"drain", "copy", "switch"}
    asking = [
        sys.executable,
        "-c",
        "from leasehold.cli.main import app; app()",
        "cells",
        "move",
        "acme",
        "--status",
        "--json",
    ]
    asked = await asyncio.to_thread(subprocess.run, asking, env=environment, capture_output=True, check=True)
    assert last_json(asked.stdout.decode())["stage"] == "moved"
    two.place(acme="b")
    async with working(two.a, tmp_path / "a"), working(two.b, tmp_path / "b"):
        await ended(two.b, waiting)


async def test_a_clean_that_is_killed_between_its_commits_goes_on(two: Two, tmp_path: Path) -> None:
    await submit(two.a.running.url, await two.a.key())
    await moved(two)
    target = tmp_path / "b.env"
    target.write_text("\n".join(variables(two.b)))
    arguments = ["cells", "move", "acme", "--to", "b", "--target-env", str(target), "--clean"]
    environment = os.environ | dict(line.split("=", 1) for line in variables(two.a))
    command = [sys.executable, "-c", _KILLED.format(commits=1), *arguments]
    killed = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert await rows_of_moves(two) == [None, "live"]
    with pytest.raises(NotFound, match="does not move"):  # there was no move in the other direction
        await clean(settings_of(two.b), settings_of(two.a), Move("acme", "a"))
    answer = await clean(settings_of(two.a), settings_of(two.b), MOVE)
    assert (answer["stage"], answer["objects"]) == ("cleaned", 0)
    assert await rows_of_moves(two) == [None, None]
    with pytest.raises(NotFound, match="does not move"):
        await clean(settings_of(two.a), settings_of(two.b), MOVE)


async def test_nothing_is_cleaned_while_a_worker_here_writes_the_schedules_of_the_tenants_code(two: Two) -> None:
    """It would write them again after that, and each tick would fire in both cells."""
    await submit(two.a.running.url, await two.a.key())
    await moved(two)
    lead = "INSERT INTO leadership (role, owner, until) VALUES ($1, gen_random_uuid(), clock_timestamp() + $2)"
    minute = timedelta(minutes=1)
    async with rows_of(two.a) as rows:
        await rows.execute(lead, "schedules of acme gone", -minute)
        await rows.execute(lead, "schedules of acm e", minute)
        await rows.execute(lead, "schedules of acme2 shop", minute)
        await rows.execute(lead, "schedules of acme shop", minute)
        with pytest.raises(Conflict, match=r"schedules of acme that the app shop declares") as refused:
            await clean(settings_of(two.a), settings_of(two.b), MOVE)
        assert refused.value.code == "schedules_written"
        assert (await numbers(two.a))["job"] == 1
        await rows.execute(  # the worker drains
            "INSERT INTO worker (id, host, pid, version, queues, present, draining)"
            " SELECT owner, 'h', 1, 'v', '{}', true, true FROM leadership WHERE role = 'schedules of acme shop'"
        )
    assert (await clean(settings_of(two.a), settings_of(two.b), MOVE))["stage"] == "cleaned"


async def rows_of_moves(two: Two) -> list[str | None]:
    """The stage of the tenant's move, as each cell has it."""
    stages = []
    for cell in (two.a, two.b):
        async with rows_of(cell) as rows:
            stages.append(await rows.fetchval("SELECT stage FROM tenant_move WHERE tenant_id = 'acme'"))
    return stages


async def test_what_a_killed_clean_left_does_not_look_like_the_switch_of_the_next_move(two: Two) -> None:
    key = await two.a.key()
    await submit(two.a.running.url, key)
    async with rows_of(two.b) as rows:
        await rows.execute(
            "INSERT INTO tenant_move (tenant_id, from_cell, to_cell, direction, stage)"
            " VALUES ('acme', 'a', 'b', 'in', 'live')"
        )
    before = await numbers(two.a)
    await moved(two)
    assert await numbers(two.b) == before


async def test_a_tenant_moves_on_only_when_the_cell_before_has_been_cleaned(
    two: Two, postgres: Databases, migrated_template: str
) -> None:
    """Nothing would know any more that the tenant's rows in the first cell are the remains of a move."""
    await submit(two.a.running.url, await two.a.key())
    before = await numbers(two.a)
    await moved(two)
    third = await postgres.lend(migrated_template)
    a, b = settings_of(two.a), settings_of(two.b)
    c = b.model_copy(update={"cell": "c", "database_url": SecretStr(third)})
    with pytest.raises(Conflict, match=r"came from cell a.*--to b .*--clean") as refused:
        await move_tenant(b, c, Move("acme", "c"))
    assert refused.value.code == "earlier_move_not_cleaned"
    assert await rows_of_moves(two) == ["moved", "live"]
    assert (await clean(a, b, MOVE))["stage"] == "cleaned"
    assert (await move_tenant(b, c, Move("acme", "c")))["stage"] == "moved"
    assert await numbers(Cell("c", two.b.running, third, two.b.path)) == before
    await postgres.give_back(third, migrated_template)


_KILLED = """
from leasehold.runtime import failpoints
from leasehold.cli.main import app
failpoints.arm("commit.cells:kill:{commits}")
app()
"""


def variables(cell: Cell) -> list[str]:
    settings = settings_of(cell)
    return [
        f"LEASEHOLD_CELL={cell.name}",
        f"LEASEHOLD_CELLS_FILE={cell.path}",
        f"LEASEHOLD_DATABASE_URL={cell.database_url}",
        f"LEASEHOLD_S3_ENDPOINT={settings.s3_endpoint}",
        f"LEASEHOLD_S3_BUCKET={settings.s3_bucket}",
        f"LEASEHOLD_S3_ACCESS_KEY={settings.s3_access_key.get_secret_value()}",
        f"LEASEHOLD_S3_SECRET_KEY={settings.s3_secret_key.get_secret_value()}",
        f"LEASEHOLD_SEALING_KEYS={settings.sealing_keys.get_secret_value()}",
    ]


@pytest.mark.parametrize("stage", ["drain", "copy", "switch"])
async def test_an_aborted_move_leaves_the_tenant_as_it_was(
    two: Two, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await two.a.key()
    waiting = await submit(two.a.running.url, key)
    async with rows_of(two.a) as rows:
        due = await rows.fetchval("SELECT available_at FROM task WHERE job_id = $1", waiting)

    async def cut_off(*_: Any) -> None:
        raise ConnectionResetError

    next_deed = {"drain": "_drain", "copy": "copy_rows", "switch": "_switch"}[stage]
    with monkeypatch.context() as patch:
        patch.setattr(moving, next_deed, cut_off)
        with pytest.raises(ConnectionResetError):
            await moved(two)
    assert (await state_of_move(settings_of(two.a), "acme"))["stage"] == stage
    await abort(settings_of(two.a), settings_of(two.b), MOVE)
    assert set((await numbers(two.b)).values()) == {0}
    async with rows_of(two.a) as rows, rows_of(two.b) as theirs:
        assert await rows.fetchval("SELECT available_at FROM task WHERE job_id = $1", waiting) == due
        assert await theirs.fetchval("SELECT count(*) FROM pg_class WHERE starts_with(relname, 'moving_')") == 0
    async with working(two.a, tmp_path / "a"):
        await ended(two.a, {waiting, await submit(two.a.running.url, key)})
    with pytest.raises(NotFound, match="No move of acme"):
        await state_of_move(settings_of(two.a), "acme")


@pytest.mark.parametrize("ends", ["moved", "aborted"])
async def test_a_run_keeps_its_time_however_early_or_late_it_is(
    two: Two, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a tenant moves its due times are a thousand years later, and clients may name times of a thousand years."""
    key = await two.a.key()
    times = [f"{year}-12-31T00:00:00Z" for year in (1999, 2899, 2900, 2969, 2970, 2998)]
    submitted = {await submit(two.a.running.url, key, scheduled_at=time): time for time in times}

    async def due(cell: Cell) -> dict[str, datetime]:
        async with rows_of(cell) as rows:
            found = await rows.fetch("SELECT job_id, available_at FROM task WHERE tenant_id = 'acme'")
        return {str(row["job_id"]): row["available_at"] for row in found}

    before = await due(two.a)
    now, *others = (before[job] for job in submitted)  # a time that has passed means now
    assert (now.year < 2100, others) == (True, [datetime.fromisoformat(time) for time in times[1:]])
    if ends == "moved":
        await moved(two)
        assert await due(two.b) == before
        return

    async def cut_off(*_: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(moving, "copy_rows", cut_off)
    with pytest.raises(ConnectionResetError):
        await moved(two)
    async with rows_of(two.a) as rows:
        assert await rows.fetchval("SELECT count(*) FROM task WHERE available_at < '2900-01-01+00'") == 0
    await abort(settings_of(two.a), settings_of(two.b), MOVE)
    assert await due(two.a) == before


async def test_a_move_waits_for_steps_that_run_and_says_so(two: Two) -> None:
    key = await two.a.key()
    job = await submit(two.a.running.url, key)
    async with rows_of(two.a) as rows:
        await rows.execute(
            "UPDATE task SET status = 'running', lease_owner = gen_random_uuid(), lease_until = 'infinity'"
            " WHERE job_id = $1",
            job,
        )
        with pytest.raises(Conflict, match="1 step of acme still runs") as refused:
            await moved(two, Move("acme", "b", drain_seconds=0))
        assert refused.value.code == "still_running"
        await rows.execute("UPDATE task SET status = 'pending', lease_owner = NULL, lease_until = NULL")
    assert (await moved(two))["stage"] == "moved"


async def test_a_workflow_that_starts_step_after_step_moves_between_two_of_them(two: Two, tmp_path: Path) -> None:
    """Its worker went on with the next step in the commit that ended the last one, so the drain never ended."""
    app, stop = App("rounds"), tmp_path / "stop"

    @app.task
    async def has_stopped() -> bool:
        return stop.exists()

    @app.workflow
    async def rounds(ctx: Context) -> str:
        while not await ctx.run(has_stopped):
            pass
        return "ended"

    await two.a.key()
    app.use(settings_of(two.a).model_copy(update={"tenant": "acme"}))
    try:
        run = await asyncio.to_thread(rounds.submit)
    finally:
        await asyncio.to_thread(app.close)
    count = "SELECT count(*) FROM task WHERE job_id = $1 AND status = 'succeeded'"
    async with asyncio.timeout(SECONDS), working(two.a, tmp_path / "a", app.pipelines()), rows_of(two.a) as rows:
        while await rows.fetchval(count, run.id) < 5:
            await asyncio.sleep(0.05)
        assert (await moved(two, Move("acme", "b", drain_seconds=20)))["stage"] == "moved"
        in_a = await rows.fetchval(count, run.id)
    async with asyncio.timeout(SECONDS), working(two.b, tmp_path / "b", app.pipelines()), rows_of(two.b) as rows:
        while await rows.fetchval(count, run.id) < in_a + 5:
            await asyncio.sleep(0.05)
        stop.touch()
        while (status := await rows.fetchval("SELECT status FROM job WHERE id = $1", run.id)) == "running":
            await asyncio.sleep(0.05)
    assert status == "succeeded"


async def test_wrong_uses_are_refused_before_anything_changes(two: Two) -> None:
    key = await two.a.key()
    await submit(two.a.running.url, key)
    a, b = settings_of(two.a), settings_of(two.b)
    with pytest.raises(NotFound, match="no rows of a tenant nobody"):
        await moved(two, Move("nobody", "b"))
    with pytest.raises(Invalid, match="lives in cell a already"):
        await moved(two, Move("acme", "a"))
    with pytest.raises(Invalid, match="those of cell b, not c"):
        await moved(two, Move("acme", "c"))
    with pytest.raises(Invalid, match="is not a cell"):
        await move_tenant(a.model_copy(update={"cell": ""}), b, MOVE)
    with pytest.raises(Conflict, match="same database"):
        await move_tenant(a, b.model_copy(update={"database_url": a.database_url}), MOVE)
    async with rows_of(two.b) as rows:
        head = await rows.fetchval("SELECT version_num FROM alembic_version")
        await rows.execute("UPDATE alembic_version SET version_num = 'older'")
        with pytest.raises(Conflict, match="schemas of the two cells differ"):
            await moved(two)
        await rows.execute("UPDATE alembic_version SET version_num = $1", head)
    await two.b.key()
    with pytest.raises(Conflict, match="has rows of acme already, in the table api_key"):
        await moved(two)
    await submit(two.a.running.url, key)  # nothing holds the tenant


async def test_a_tenant_does_not_move_to_a_cell_that_cannot_open_its_secrets(two: Two) -> None:
    await two.a.key()
    sealed = Sealing(settings_of(two.a)).seal(b"secret")
    async with rows_of(two.a) as rows:
        await rows.execute("INSERT INTO callback_secret (tenant_id, secrets) VALUES ('acme', $1)", [sealed])
    with pytest.raises(Conflict, match="LEASEHOLD_SEALING_KEYS"):
        await moved(two)


@pytest.mark.parametrize(
    ("status", "pipeline", "params"),
    [
        ("pending", "generation", '{"credential": "SEALED"}'),
        ("failed", "generation", '{"credential": "SEALED"}'),  # may be retried
        ("pending", "generation_withdrawal", '{"order": {"params": {"credential": "SEALED"}}}'),
    ],
)
async def test_a_tenant_does_not_move_to_a_cell_that_cannot_open_the_credentials_of_its_generations(
    two: Two, status: str, pipeline: str, params: str
) -> None:
    """An order at a provider has been paid for: in the new cell nobody could ask for its result."""
    key = await two.a.key()
    await submit(two.a.running.url, key)
    sealed = Sealing(settings_of(two.a)).seal(b"id:secret").decode()
    async with rows_of(two.a) as rows:
        await rows.execute(
            "UPDATE job SET status = $1, pipeline = $2, params = $3,"
            " finished_at = CASE WHEN $1 = 'failed' THEN clock_timestamp() END",
            status, pipeline, params.replace("SEALED", sealed),
        )  # fmt: skip
    with pytest.raises(Conflict, match="LEASEHOLD_SEALING_KEYS"):
        await moved(two)


def test_the_file_of_the_other_cell_shows_no_value_when_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "b.env"
    for text in ("postgresql://u:hidden@h/d", "LEASEHOLD_AMQP_URL=amqp://u:hidden@h"):
        path.write_text(text)
        with pytest.raises(Invalid) as refused:
            moving.target_settings(path)
        assert "hidden" not in str(refused.value)
    with pytest.raises(Invalid, match="No such file"):
        moving.target_settings(tmp_path / "none")


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("SELECT repeat($1, 1001) AS name FROM generate_series(1, 100000)", asyncpg.CheckViolationError),
        ("SELECT $1 || 1 / (5000 - n) AS name FROM generate_series(1, 100000) n", asyncpg.DivisionByZeroError),
    ],
)
async def test_a_copy_that_fails_on_either_side_ends_with_its_error_and_leaves_the_target_usable(
    two: Two, query: str, error: type[Exception]
) -> None:
    async with rows_of(two.a) as source, rows_of(two.b) as target:
        await target.execute("CREATE TABLE moving_few (name text CHECK (length(name) <= 1000))")
        with pytest.raises(error):
            async with _snapshot(source):
                await _pipe(source, target, query, "x", '"moving_few"', ["name"])
        assert await target.fetchval("SELECT count(*) FROM moving_few") == 0


@pytest.mark.parametrize("error", [ConnectionError, asyncio.CancelledError])
async def test_a_copy_whose_writer_ends_while_pieces_wait_ends_too(two: Two, error: type[BaseException]) -> None:
    async with rows_of(two.a) as source, rows_of(two.b) as target, rows_of(two.b) as other:
        await target.execute("CREATE TABLE moving_few (name text)")
        async with asyncio.timeout(SECONDS), other.transaction():  # it waited for ever
            await other.execute("LOCK TABLE moving_few")
            query = "SELECT repeat($1, 1000) AS name FROM generate_series(1, 100000)"

            async def copy() -> None:
                async with _snapshot(source):
                    await _pipe(source, target, query, "x", '"moving_few"', ["name"])

            pipe = asyncio.create_task(copy())
            while not await other.fetchval(
                "SELECT wait_event = 'ClientWrite' FROM pg_stat_activity WHERE pid = $1", source.get_server_pid()
            ):
                await asyncio.sleep(0.05)  # until so many pieces wait that the source can send no more
            if error is asyncio.CancelledError:
                pipe.cancel()
            else:
                await other.execute("SELECT pg_terminate_backend($1)", target.get_server_pid())
            with pytest.raises(error):
                await pipe


async def test_an_error_counts_also_where_a_copy_is_still_under_way(two: Two) -> None:
    """asyncpg then refuses to roll back. PostgreSQL does so when the connection ends."""
    async with rows_of(two.a) as source:
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def take(_piece: bytes) -> None:
            began.set()
            await goes_on.wait()

        query = "SELECT repeat('x', 1000) FROM generate_series(1, 100000)"
        copying: list[asyncio.Task[Any]] = []

        async def fail_beside_a_copy() -> None:
            async with asyncio.timeout(SECONDS), _snapshot(source):
                copying.append(asyncio.create_task(source.copy_from_query(query, output=take)))
                await began.wait()
                raise KeyError

        with pytest.raises(KeyError):
            await fail_beside_a_copy()
        assert source.is_closed()
        goes_on.set()
        await asyncio.wait(copying)
        assert copying[0].exception() is not None


@pytest.mark.parametrize("place", ["the environment", "the .env of the folder"])
def test_nothing_of_this_cells_database_counts_for_the_other_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {
        "LEASEHOLD_CELL": "a",
        "LEASEHOLD_DATABASE_URL": "postgresql://h/a",
        "LEASEHOLD_DATABASE_DIRECT_URL": "postgresql://direct/a",
        "LEASEHOLD_DATABASE_REPLICA_URL": "postgresql://standby/a",
        "LEASEHOLD_DATABASE_POOL_SIZE": "99",
        "LEASEHOLD_S3_BUCKET": "shared",
        "LEASEHOLD_S3_SECRET_KEY": "of-a",
    }
    if place == "the environment":
        for name, value in own.items():
            monkeypatch.setenv(name, value)
    else:
        (tmp_path / ".env").write_text("".join(f"{name.lower()}={value}\n" for name, value in own.items()))
    for name, value in {"url": "postgresql://h/b", "key": "of-b"}.items():
        (tmp_path / name).write_text(value)
    (tmp_path / "b.env").write_text(
        "LEASEHOLD_CELL=b\nLEASEHOLD_DATABASE_URL_FILE=url\nLEASEHOLD_S3_SECRET_KEY_FILE=key\n"
    )
    target = moving.target_settings(tmp_path / "b.env")
    assert (
        target.database_url.get_secret_value() == target.direct().database_url.get_secret_value() == "postgresql://h/b"
    )
    assert target.database_replica_url.get_secret_value() == ""
    assert target.database_pool_size == Settings.model_fields["database_pool_size"].default
    assert (target.cell, target.s3_bucket, target.s3_secret_key.get_secret_value()) == ("b", "shared", "of-b")


def test_a_secrets_file_of_this_cell_goes_before_its_folder_for_the_other_cell_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("LEASEHOLD_S3_SECRET_KEY=of-the-folder\nLEASEHOLD_S3_ACCESS_KEY_FILE=unread\n")
    (tmp_path / "key").write_text("of-the-environment")
    monkeypatch.setenv("LEASEHOLD_S3_SECRET_KEY_FILE", "key")
    (tmp_path / "b.env").write_text("LEASEHOLD_DATABASE_URL=postgresql://h/b\n")
    assert moving.target_settings(tmp_path / "b.env").s3_secret_key.get_secret_value() == "of-the-environment"
