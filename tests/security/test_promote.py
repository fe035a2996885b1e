"""Promotion: nobody's model is overwritten or deleted by another tenant, by a failure or by a crash."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast
from uuid import UUID

import httpx2
import pytest
from pydantic import SecretStr, ValidationError
from structlog.testing import capture_logs

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, StoreUnavailable
from leasehold.domain.ids import new_id
from leasehold.domain.kind import NamedObjects
from leasehold.kinds.housekeeping import HousekeepingContext
from leasehold.pipelines import SHIPPED
from leasehold.pipelines.conversion.housekeeping import housekeeping
from leasehold.pipelines.conversion.pipeline import CONVERSION
from leasehold.pipelines.conversion.promotion import ownership
from leasehold.pipelines.conversion.promotion.copying import Copy, Promoter, undo_dead
from leasehold.pipelines.conversion.promotion.ownership import folder_of
from leasehold.pipelines.conversion.promotion.targets import _FileService, open_target
from leasehold.security import oauth
from leasehold.security.egress import Egress
from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from leasehold.transitions import claims, settlements
from leasehold.transitions.settlements import Completion, Output
from leasehold.worker.maintenance.housekeeping import Housekeeping
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.driver import TERMS
from tests.api.test_conversion import FORM
from tests.support.file_service import FileService, serving_files
from tests.support.not_here import not_here

SCOPES = ("conversion:write", "conversion:read", "jobs:delete")
BINARY = "application/octet-stream"
STEPS = {"onnx": "out.onnx", "bie": "out.bie", "nef": "out.nef"}
ONE = [{"artifact": "nef", "key": "m/out.nef"}]
TWO = [*ONE, {"artifact": "onnx", "key": "m/out.onnx"}]


@dataclass
class Models:
    """What lies at the target, by key."""

    service: FileService | None
    bucket: ObjectStore | None

    async def all(self) -> dict[str, bytes]:
        if self.service is not None:
            return {path.removeprefix("/models/"): data for path, data in self.service.files.items()}
        assert self.bucket is not None
        return {
            found.key: await self.bucket.fetch_bytes(found.key, max_bytes=100) async for found in self.bucket.list("")
        }

    async def lay(self, key: str, data: bytes) -> None:
        if self.service is not None:
            self.service.files[f"/models/{key}"] = data
        else:
            assert self.bucket is not None
            await self.bucket.put(key, data, content_type=BINARY, metadata={})


@dataclass
class Tenant:
    client: httpx2.AsyncClient
    rows: Connection
    store: ObjectStore

    async def convert(self, data: bytes, *, without: str = "") -> str:
        """A finished conversion whose artifacts are `data`; that of the step `without` is gone from the store."""
        form = FORM | {"user_id": str(new_id())}
        answer = await self.client.post("/api/v1/jobs", data=form, files={"model": ("a.onnx", b"x")})
        job_id = UUID(answer.json()["job_id"])
        for step, name in STEPS.items():
            task = await self.rows.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = $2", job_id, step)
            (claimed,) = await claims.claim(self.rows, TERMS, [task])
            key = f"jobs/{job_id}/output/{name}"
            if step != without:
                await self.store.put(key, data, content_type=BINARY, metadata={})
            made = Output(f"output/{name}", key, len(data), "0" * 64, BINARY)
            await settlements.complete(self.rows, [Completion(claimed.lease, [made])])
        return f"/api/v1/jobs/{job_id}"

    async def promote(self, path: str, targets: list[dict[str, Any]], **options: Any) -> httpx2.Response:
        return await self.client.post(f"{path}/promote", json={"targets": targets, **options})


@dataclass
class Stage:
    settings: Settings
    running: Running
    rows: Connection
    models: Models
    make_key: MakeKey

    @asynccontextmanager
    async def tenant(self, name: str) -> AsyncIterator[Tenant]:
        key = await self.make_key(name, SCOPES)
        async with client_of(self.running.url, key.text) as client:
            yield Tenant(client, self.rows, self.running.services.store)


@pytest.fixture(params=["bucket", "file service"])
async def stage(
    request: pytest.FixtureRequest, settings: Settings, rows: Connection, make_key: MakeKey
) -> AsyncIterator[Stage]:
    if request.param == "bucket":
        changed = settings.model_copy(update={"promote_bucket": f"{settings.s3_bucket}-served"})
        bucket = ObjectStore.from_settings(changed.model_copy(update={"s3_bucket": changed.promote_bucket}))
        await bucket.open()
        await bucket.ensure_bucket()
        async with serving(changed) as running:
            yield Stage(changed, running, rows, Models(None, bucket), make_key)
        await bucket.delete(*[found.key async for found in bucket.list("")])
        await bucket.close()
    else:
        with serving_files() as service:
            changed = at(settings, service)
            async with serving(changed) as running:
                yield Stage(changed, running, rows, Models(service, None), make_key)


def at(settings: Settings, service: FileService) -> Settings:
    return settings.model_copy(
        update={
            "promote_url": service.url, "promote_token": SecretStr("service-token"), "egress_allow": "127.0.0.0/8"
        }
    )  # fmt: skip


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("code", "")


async def test_a_tenants_keys_are_its_own_whatever_another_tenant_writes(stage: Stage) -> None:
    async with stage.tenant("acme") as acme, stage.tenant("rival") as rival:
        assert (await acme.promote(await acme.convert(b"acme's"), ONE)).status_code == 200
        theirs = await rival.promote(await rival.convert(b"rival's"), ONE, replace=True)
    assert theirs.json()["promoted_object_keys"] == ["rival/m/out.nef"]
    assert await stage.models.all() == {"acme/m/out.nef": b"acme's", "rival/m/out.nef": b"rival's"}


async def test_a_promotion_does_not_overwrite_an_earlier_one_of_its_own_tenant(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        again = await acme.promote(await acme.convert(b"new"), ONE)
    assert code(again) == (409, "target_exists")
    assert await stage.models.all() == {"acme/m/out.nef": b"old"}


@pytest.mark.parametrize("where", ["request", "target"])
async def test_replace_overwrites_what_its_tenant_promoted(stage: Stage, where: str) -> None:
    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        path = await acme.convert(b"new")
        if where == "request":
            answer = await acme.promote(path, ONE, replace=True)
        else:
            answer = await acme.promote(path, [ONE[0] | {"replace": True}])
    assert answer.status_code == 200
    assert await stage.models.all() == {"acme/m/out.nef": b"new"}
    assert await backups(stage) == []


async def test_a_promotion_is_repeated_only_with_the_same_artifacts(stage: Stage, rows: Connection) -> None:
    """The key holds the first one: 200 for another would tell an untruth."""
    bie, onnx = {"artifact": "bie", "key": "m/model"}, {"artifact": "onnx", "key": "m/graph"}
    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"new")
        first = await acme.promote(path, [bie, onnx])
        assert first.status_code == 200
        assert (await acme.promote(path, [onnx, bie])).json() == first.json()
        for targets in (
            [bie | {"artifact": "nef"}, onnx],
            [bie | {"artifact": "onnx"}, onnx | {"artifact": "bie"}],
        ):
            assert code(await acme.promote(path, targets, replace=True)) == (409, "already_promoted")
        await rows.execute("TRUNCATE audit")  # as if an earlier release had promoted it, which did not record artifacts
        assert (await acme.promote(path, [bie, onnx])).json() == first.json()


async def test_what_somebody_else_laid_there_is_neither_replaced_nor_taken_back(stage: Stage) -> None:
    await stage.models.lay("acme/m/out.onnx", b"a stranger's")
    async with stage.tenant("acme") as acme:
        answer = await acme.promote(await acme.convert(b"new"), TWO, replace=True)
        assert code(answer) == (409, "target_exists")
    assert await stage.models.all() == {"acme/m/out.onnx": b"a stranger's"}
    assert await stage.rows.fetchval("SELECT count(*) FROM promoted_object") == 0


async def test_a_rollback_deletes_what_its_call_created_and_nothing_else(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        path = await acme.convert(b"new", without="onnx")
        targets = [{"artifact": "bie", "key": "m/out.bie"}, {"artifact": "onnx", "key": "m/out.onnx"}]
        assert code(await acme.promote(path, targets)) == (502, "promotion_failed")
        assert code(await acme.promote(path, [*ONE, *targets])) == (409, "target_exists")
    assert await stage.models.all() == {"acme/m/out.nef": b"old"}


async def test_a_rollback_brings_back_what_its_call_replaced(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        path = await acme.convert(b"new", without="onnx")
        assert code(await acme.promote(path, TWO, replace=True)) == (502, "promotion_failed")
        assert await stage.models.all() == {"acme/m/out.nef": b"old"}
        assert (await acme.promote(path, ONE, replace=True)).status_code == 200
    assert await stage.models.all() == {"acme/m/out.nef": b"new"}


async def test_of_two_jobs_that_promote_to_one_key_at_once_one_does(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        paths = [await acme.convert(data) for data in (b"one", b"two")]
        answers = await asyncio.gather(*(acme.promote(path, ONE) for path in paths))
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    winner = [b"one", b"two"][[answer.status_code for answer in answers].index(200)]
    assert await stage.models.all() == {"acme/m/out.nef": winner}


async def test_of_ten_requests_for_one_job_at_once_all_that_succeed_say_the_same(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"one")
        answers = await asyncio.gather(*(acme.promote(path, TWO) for _ in range(10)))
        assert {code(answer) for answer in answers} <= {(200, ""), (409, "promotion_in_progress")}
        assert (await acme.promote(path, TWO)).status_code == 200
    assert set((await stage.models.all()).values()) == {b"one"}


async def died(stage: Stage, tenant: Tenant, path: str, reached: dict[str, tuple[str, str | None]]) -> None:
    """As if the API died in the middle of promoting the job: what it had said and done at each key is there."""
    turn, job_id = new_id(), UUID(path.rpartition("/")[2])
    for key, (what, backup) in reached.items():
        await stage.rows.execute(
            "INSERT INTO promoted_object (key, tenant_id, turn, for_job, until, reached, backup)"
            " VALUES ($1, 'acme', $2, $3, clock_timestamp() - interval '1 s', $4, $5)"
            " ON CONFLICT (key) DO UPDATE SET turn = $2, for_job = $3, until = excluded.until,"
            " reached = $4, backup = $5",
            key, turn, job_id, what, backup,
        )  # fmt: skip
    await stage.rows.execute("UPDATE conversion SET promoting_until = clock_timestamp() - interval '1 s'")
    if stage.models.bucket is not None and "acme/m/out.nef" in reached and reached["acme/m/out.nef"][0] == "created":
        await stage.models.bucket.put("acme/m/out.nef", b"half", content_type=BINARY, metadata={"promotion": str(turn)})
    elif stage.models.service is not None:
        await stage.models.lay("acme/m/out.nef", b"half")
    else:
        assert stage.models.bucket is not None
        await stage.models.bucket.delete("acme/m/out.nef")
        await stage.models.lay("acme/m/out.nef", b"half")


@pytest.mark.parametrize("by", ["sweeper", "next call"])
async def test_what_a_crashed_call_created_is_taken_back(stage: Stage, by: str) -> None:
    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"new")
        await died(stage, acme, path, {"acme/m/out.nef": ("created", None)})
        if by == "sweeper":
            services = stage.running.services
            assert await undo_dead(stage.settings, services.pool.acquire, services.store) == 1
            assert await stage.models.all() == {}
            assert await stage.rows.fetchval("SELECT count(*) FROM promoted_object") == 0
        assert (await acme.promote(path, ONE)).status_code == 200
    assert await stage.models.all() == {"acme/m/out.nef": b"new"}


async def test_a_call_that_comes_while_a_worker_undoes_a_dead_one_waits_and_loses_nothing(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    deletes, go_on = threading.Semaphore(0), threading.Event()

    def first_is_slow(_path: str) -> None:
        deletes.release()
        go_on.wait(120)

    with serving_files() as service:
        async with serving(at(settings, service)) as running:
            stage = Stage(at(settings, service), running, rows, Models(service, None), make_key)
            async with stage.tenant("acme") as acme:
                path = await acme.convert(b"new")
                await died(stage, acme, path, {"acme/m/out.nef": ("created", None)})
                service.on_delete = first_is_slow
                pool = running.services.pool
                undoing = asyncio.create_task(undo_dead(stage.settings, pool.acquire, running.services.store))
                assert await asyncio.to_thread(deletes.acquire, timeout=60)
                service.on_delete = lambda _path: None
                during = code(await acme.promote(path, ONE))
                go_on.set()
                assert await undoing == 1
                assert during == (409, "promotion_in_progress")
                assert (await acme.promote(path, ONE)).status_code == 200
                assert service.files == {"/models/acme/m/out.nef": b"new"}


async def test_a_worker_that_wakes_up_after_its_claim_of_a_job_ends_no_claim_of_another(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"new")
        await died(stage, acme, path, {"acme/m/out.nef": ("created", None)})
        job_id = UUID(path.rpartition("/")[2])
        _, (frozen,) = await ownership.claim_dead(stage.rows)
        assert await ownership.begin(stage.rows, "acme", job_id) is None, "the worker has claimed the job"
        await stage.rows.execute("UPDATE conversion SET promoting_until = clock_timestamp() - interval '1 s'")
        begun = await ownership.begin(stage.rows, "acme", job_id)
        assert begun is not None
        await ownership.give_up(stage.rows, frozen)
        assert await ownership.begin(stage.rows, "acme", job_id) is None, "the call has lost its claim"
        await ownership.give_up(stage.rows, begun[0])
        assert await ownership.begin(stage.rows, "acme", job_id) is not None


async def test_a_worker_gives_up_the_job_even_if_it_cannot_undo(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    with serving_files() as service:
        async with serving(at(settings, service)) as running:
            stage = Stage(at(settings, service), running, rows, Models(service, None), make_key)
            async with stage.tenant("acme") as acme:
                path = await acme.convert(b"new")
                await died(stage, acme, path, {"acme/m/out.nef": ("created", None)})
                service.deletes = False
                pool = running.services.pool
                assert await undo_dead(stage.settings, pool.acquire, running.services.store) == 1
                service.deletes = True
                assert (await acme.promote(path, ONE)).status_code == 200
                assert service.files == {"/models/acme/m/out.nef": b"new"}


@pytest.mark.parametrize("by", ["worker", "next call"])
async def test_undoing_is_bounded_so_that_nobody_else_begins_meanwhile(
    settings: Settings, rows: Connection, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    assert 2 * ownership.UNDO_SECONDS + ownership.COPY_SECONDS < ownership.LEASE_SECONDS
    enough = ownership.UNDO_SECONDS
    monkeypatch.setattr(ownership, "UNDO_SECONDS", 0.3)
    go_on = threading.Event()
    with serving_files() as service:
        async with serving(at(settings, service)) as running:
            stage = Stage(at(settings, service), running, rows, Models(service, None), make_key)
            async with stage.tenant("acme") as acme:
                path = await acme.convert(b"new")
                await died(stage, acme, path, {"acme/m/out.nef": ("created", None)})

                def wait(_path: str) -> None:
                    go_on.wait(120)

                service.on_delete = wait
                if by == "worker":
                    pool = running.services.pool
                    undone = undo_dead(stage.settings, pool.acquire, running.services.store)
                    assert await asyncio.wait_for(undone, 60) == 1
                else:
                    answer = await asyncio.wait_for(acme.promote(path, ONE), 60)
                    assert code(answer) == (502, "promotion_failed")
                go_on.set()
                service.on_delete = lambda _path: None
                monkeypatch.setattr(ownership, "UNDO_SECONDS", enough)
                assert await rows.fetchval("SELECT count(*) FROM promoted_object WHERE turn IS NOT NULL") == 1
                assert (await acme.promote(path, ONE)).status_code == 200


async def test_what_a_crashed_call_replaced_is_brought_back(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        path = await acme.convert(b"new")
        services = stage.running.services
        await services.store.put("jobs/x/promotion/0", b"old", content_type=BINARY, metadata={})
        await died(stage, acme, path, {"acme/m/out.nef": ("replaced", "jobs/x/promotion/0")})
        assert await undo_dead(stage.settings, services.pool.acquire, services.store) == 1
        assert await stage.models.all() == {"acme/m/out.nef": b"old"}
        assert code(await acme.promote(path, ONE)) == (409, "target_exists")
        assert (await acme.promote(path, ONE, replace=True)).status_code == 200


async def backups(stage: Stage) -> list[str]:
    return [found.key async for found in stage.running.services.store.list("") if "promotion" in found.key]


async def undo(stage: Stage) -> int:
    services = stage.running.services
    return await undo_dead(stage.settings, services.pool.acquire, services.store)


@pytest.mark.parametrize("dies", [False, True], ids=["call goes on", "call dies"])
@pytest.mark.parametrize("by", ["client", "retention"])
async def test_what_a_call_replaced_is_brought_back_though_its_job_is_deleted_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, by: str, dies: bool
) -> None:
    store = stage.running.services.store
    pieces = store.pieces
    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        path = await acme.convert(b"new")
        job_id = UUID(path.rpartition("/")[2])

        async def delete() -> None:
            if by == "client":
                assert (await acme.client.delete(f"/v1/jobs/{job_id}")).status_code == 204
            else:
                await stage.rows.execute("UPDATE job SET expires_at = now() WHERE id = $1", job_id)
                connections = stage.running.services.pool.acquire
                await Housekeeping(stage.settings, connections, store, SHIPPED).retention()
            assert await stage.rows.fetchval("SELECT count(*) FROM conversion WHERE job_id = $1", job_id) == 0

        async def pieces_of_a_deleted_job(key: str) -> AsyncGenerator[bytes, None]:
            if key.endswith("out.onnx"):
                assert (await stage.models.all())["acme/m/out.nef"] == b"new"
                await delete()
            async for piece in pieces(key):
                yield piece

        with monkeypatch.context() as patched:
            patched.setattr(store, "pieces", pieces_of_a_deleted_job)
            if dies:
                patched.setattr(Promoter, "_undo_call", nothing_more)
            assert code(await acme.promote(path, TWO, replace=True)) == (502, "promotion_failed")
        if dies:
            await stage.rows.execute("UPDATE promoted_object SET until = clock_timestamp() - interval '1 s'")
            assert await undo(stage) == 2
        assert await stage.models.all() == {"acme/m/out.nef": b"old"}
        assert await backups(stage) == []
        (row,) = await stage.rows.fetch("SELECT key, turn FROM promoted_object")
        assert (row["key"], row["turn"]) == ("acme/m/out.nef", None)
        assert (await acme.promote(await acme.convert(b"newer"), ONE, replace=True)).status_code == 200


async def test_a_key_whose_backup_is_lost_is_free_again(stage: Stage) -> None:
    """Of a call of an earlier release, whose backups were deleted with the job."""
    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        path = await acme.convert(b"new")
        await died(stage, acme, path, {"acme/m/out.nef": ("replaced", "jobs/x/promotion/0")})
        with capture_logs() as logs:
            assert await undo(stage) == 1
        (line,) = [line for line in logs if line["log_level"] == "error"]
        assert (line["key"], line["backup"]) == ("acme/m/out.nef", "jobs/x/promotion/0")
        assert code(await acme.promote(path, ONE)) == (409, "target_exists"), "the key is still the tenant's"
        assert (await acme.promote(path, ONE, replace=True)).status_code == 200
    assert await stage.models.all() == {"acme/m/out.nef": b"new"}


@pytest.mark.parametrize("how", ["call dies", "store fails"])
async def test_backups_that_a_finished_call_has_left_are_deleted_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def fails(*_keys: str) -> None:
        raise StoreUnavailable("away")

    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        newest = await acme.convert(b"newest")
        with monkeypatch.context() as patched:
            if how == "call dies":
                patched.setattr(Promoter, "_delete_backups", nothing_more)
            else:
                patched.setattr(stage.running.services.store, "delete", fails)
            assert (await acme.promote(await acme.convert(b"new"), ONE, replace=True)).status_code == 200
        (backup,) = await backups(stage)
        assert isinstance(CONVERSION.objects, NamedObjects)
        assert re.fullmatch(CONVERSION.objects.pattern, backup), "`doctor --reconcile` knows it"
        context = HousekeepingContext(stage.settings, stage.running.services.pool.acquire, stage.running.services.store)
        assert backup.startswith(housekeeping(context).prefixes), "dead uploads of backups are aborted"
        assert code(await acme.promote(newest, ONE, replace=True)) == (409, "promotion_in_progress")
        assert await undo(stage) == 1
        assert await backups(stage) == []
        assert await stage.models.all() == {"acme/m/out.nef": b"new"}
        assert (await acme.promote(newest, ONE, replace=True)).status_code == 200


@pytest.mark.parametrize("before", ["replace", "finish"])
async def test_a_call_that_dies_leaves_no_backup(stage: Stage, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """And no worker that dies while it undoes the call loses the backup before the key is free."""
    record_intent = ownership.record_intent

    async def dies(connection: Connection, call: Any, key: str, change: Any, backup: str | None = None) -> None:
        if change == "replaced":
            raise ConnectionResetError
        await record_intent(connection, call, key, change, backup)

    async with stage.tenant("acme") as acme:
        await acme.promote(await acme.convert(b"old"), ONE)
        path = await acme.convert(b"new")
        with monkeypatch.context() as patched:
            patched.setattr(Promoter, "_undo_call", nothing_more)
            if before == "replace":
                patched.setattr(ownership, "record_intent", dies)
            else:
                patched.setattr(ownership, "finish", fails_with_a_reset)
            await acme.promote(path, ONE, replace=True)
        assert len(await backups(stage)) == 1
        await stage.rows.execute("UPDATE promoted_object SET until = clock_timestamp() - interval '1 s'")
        with monkeypatch.context() as patched:
            patched.setattr(ownership, "record_undone", fails_with_a_reset)
            with pytest.raises(ConnectionResetError):
                await undo(stage)
        await stage.rows.execute("UPDATE promoted_object SET until = clock_timestamp() - interval '1 s'")
        with capture_logs() as logs:
            assert await undo(stage) == 1
        assert [line for line in logs if line["log_level"] == "error"] == []
        assert await backups(stage) == []
        assert await stage.models.all() == {"acme/m/out.nef": b"old"}
        assert (await acme.promote(path, ONE, replace=True)).status_code == 200


async def nothing_more(*_arguments: Any) -> None:
    """As if the process died here: it does nothing more."""


async def fails_with_a_reset(*_arguments: Any) -> None:
    raise ConnectionResetError


async def test_a_target_that_is_away_during_the_rollback_is_tidied_later(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    with serving_files() as service:
        async with serving(at(settings, service)) as running:
            stage = Stage(at(settings, service), running, rows, Models(service, None), make_key)
            async with stage.tenant("acme") as acme:
                path = await acme.convert(b"new")
                service.refuses = lambda path: path.endswith(".onnx")
                service.deletes = False
                assert code(await acme.promote(path, TWO)) == (502, "promotion_failed")
                assert set(service.files) == {"/models/acme/m/out.nef"}
                service.refuses, service.deletes = (lambda _path: False), True
                assert (await acme.promote(path, [TWO[1]])).status_code == 200
                assert set(service.files) == {"/models/acme/m/out.onnx"}


async def test_a_file_service_that_only_knows_put_and_delete_loses_nothing_it_did_not_just_make(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    with serving_files(full=False) as service:
        async with serving(at(settings, service)) as running:
            stage = Stage(at(settings, service), running, rows, Models(service, None), make_key)
            async with stage.tenant("acme") as acme:
                path = await acme.convert(b"new")
                service.refuses = lambda path: path.endswith(".onnx")
                assert code(await acme.promote(path, TWO)) == (502, "promotion_failed")
                assert service.files == {}
                await stage.models.lay("acme/m/out.nef", b"a stranger's")
                assert code(await acme.promote(path, TWO)) == (502, "promotion_failed")
                assert list(service.files) == ["/models/acme/m/out.nef"]


async def test_what_a_stranger_laid_during_the_call_stays_though_postgresql_fails_meanwhile(
    settings: Settings, rows: Connection, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEAD finds nothing, and the PUT is refused. The file service cannot tell whose object a DELETE removes."""
    failures = iter([ConnectionResetError(), TimeoutError()])
    record_undone = ownership.record_undone

    async def fails_at_first(connection: Connection, change: ownership.KeyChange) -> None:
        for error in failures:
            raise error
        await record_undone(connection, change)

    with serving_files() as service:
        async with serving(at(settings, service)) as running:
            stage = Stage(at(settings, service), running, rows, Models(service, None), make_key)
            async with stage.tenant("acme") as acme:
                path = await acme.convert(b"new")
                monkeypatch.setattr(ownership, "record_undone", fails_at_first)

                def be_first(path: str) -> None:
                    service.files.setdefault(path, b"a stranger's")

                service.on_put = be_first
                assert code(await acme.promote(path, ONE)) == (409, "target_exists")
                await rows.execute("UPDATE promoted_object SET until = clock_timestamp() - interval '1 s'")
                services = running.services
                assert await undo_dead(stage.settings, services.pool.acquire, services.store) == 0
            assert service.files == {"/models/acme/m/out.nef": b"a stranger's"}


class LateCommit:
    """A connection whose next COMMIT takes effect, but is answered too late."""

    def __init__(self, connection: Connection, armed: list[bool]) -> None:
        self._connection = connection
        self._armed = armed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        async with self._connection.transaction():
            yield
        if self._armed and not self._connection.is_in_transaction():
            self._armed.clear()
            raise TimeoutError


@pytest.mark.parametrize("commits", [True, False])
async def test_a_promotion_whose_commit_is_answered_late_is_undone_only_if_it_did_not_take_effect(
    stage: Stage, commits: bool
) -> None:
    armed: list[bool] = []
    services = stage.running.services

    @asynccontextmanager
    async def connections() -> AsyncIterator[Connection]:
        async with services.pool.acquire() as connection:
            yield cast("Connection", LateCommit(connection, armed))

    async def on_finish(_connection: Connection) -> None:
        if not commits:
            raise TimeoutError
        armed.append(True)

    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"new")
        job_id = UUID(path.rpartition("/")[2])
        begun = await ownership.begin(stage.rows, "acme", job_id)
        assert begun is not None
        copies = [Copy("acme/m/out.nef", f"jobs/{job_id}/output/out.nef", 3, replace=False)]
        async with open_target(stage.settings, services.store) as target:
            promoting = Promoter(connections, services.store, target).promote(begun[0], [], copies, on_finish)
            if commits:
                await promoting
            else:
                with pytest.raises(TimeoutError):  # PostgreSQL's, for which the target is not blamed
                    await promoting
    promoted = await stage.rows.fetchval("SELECT promoted FROM conversion WHERE job_id = $1", job_id)
    assert promoted == (["acme/m/out.nef"] if commits else None)
    assert await stage.models.all() == ({"acme/m/out.nef": b"new"} if commits else {})


async def test_a_database_that_is_too_slow_during_the_copies_is_not_the_targets_fault(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_slow(*_arguments: object) -> None:
        raise TimeoutError

    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"new")
        monkeypatch.setattr(ownership, "record_intent", too_slow)
        assert code(await acme.promote(path, ONE)) == (503, "database_unavailable")
    assert await stage.models.all() == {}


@pytest.mark.parametrize("lost", ["keys", "the job"])
async def test_a_call_is_undone_though_postgresql_was_silent_for_longer_than_a_request_may_wait(
    settings: Settings, rows: Connection, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Nothing of its copies stays where models are served, and the request can be repeated at once."""
    copying, go_on = threading.Semaphore(0), threading.Event()

    def is_held(_path: str) -> None:
        copying.release()
        go_on.wait(120)

    give_up, losses = ownership.give_up, [ConnectionResetError(), TimeoutError()]

    async def fails_at_first(connection: Connection, call: ownership.PromoteCall) -> None:
        while losses:
            raise losses.pop()
        await give_up(connection, call)

    if lost == "the job":
        monkeypatch.setattr(ownership, "give_up", fails_at_first)
    with serving_files() as service:
        impatient = at(settings, service).model_copy(update={"database_timeout": 2.5})
        async with serving(impatient) as running:
            stage = Stage(impatient, running, rows, Models(service, None), make_key)
            async with stage.tenant("acme") as acme:
                path = await acme.convert(b"new")
                service.on_put = is_held
                promoting = asyncio.create_task(acme.promote(path, TWO))
                assert await asyncio.to_thread(copying.acquire, timeout=60)
                async with rows.transaction():
                    await rows.execute("SELECT FROM promoted_object WHERE key = 'acme/m/out.onnx' FOR UPDATE")
                    go_on.set()
                    # The intent at this key cannot be recorded, nor can the changes be read at the first try.
                    await asyncio.sleep(6.0)
                assert code(await promoting) == (503, "database_unavailable")
                assert service.files == {}
                assert (await acme.promote(path, TWO)).status_code == 200
                assert set(service.files) == {"/models/acme/m/out.nef", "/models/acme/m/out.onnx"}


@pytest.mark.parametrize("question", ["finished", "changes"])
async def test_whoever_undoes_a_call_waits_for_a_commit_that_is_under_way(stage: Stage, question: str) -> None:
    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"new")
    begun = await ownership.begin(stage.rows, "acme", UUID(path.rpartition("/")[2]))
    assert begun is not None
    call, keys = begun[0], ["acme/m/out.nef"]
    await ownership.claim(stage.rows, call, keys, [])
    asking: asyncio.Task[Any]
    pid = stage.rows.get_server_pid()
    async with stage.running.services.pool.acquire() as connection, connection.transaction():
        await ownership.finish(connection, call, keys)
        if question == "finished":
            asking = asyncio.create_task(ownership.is_finished(stage.rows, call, keys))
        else:
            asking = asyncio.create_task(ownership.changes_of(stage.rows, call))
        async with asyncio.timeout(60):
            while not await connection.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid):
                assert not asking.done()
                await asyncio.sleep(0.01)
    assert await asking == (True if question == "finished" else [])


async def test_two_targets_of_one_key_are_refused(stage: Stage) -> None:
    async with stage.tenant("acme") as acme:
        path = await acme.convert(b"new")
        assert code(await acme.promote(path, [*ONE, *ONE])) == (422, "targets_not_distinct")
        assert await stage.models.all() == {}


async def test_a_put_does_not_overwrite_what_came_between_the_look_and_the_put(stage: Stage) -> None:
    store = stage.running.services.store
    await store.put("jobs/a/output/out.nef", b"new", content_type=BINARY, metadata={})
    if stage.models.bucket is not None and not await store.probe():
        not_here("a store that honours If-None-Match: with this one a HEAD comes before each put")
    await stage.models.lay("acme/m/out.nef", b"a stranger's")
    async with open_target(stage.settings, store) as target:
        with pytest.raises(Conflict) as refused:
            await target.create("acme/m/out.nef", "jobs/a/output/out.nef", 3, "turn")
    assert refused.value.code == "target_exists"
    assert await stage.models.all() == {"acme/m/out.nef": b"a stranger's"}


async def test_no_database_connection_is_held_while_the_target_is_asked(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    held: list[int] = []
    with serving_files() as service:
        async with serving(at(settings, service)) as running:
            stage = Stage(at(settings, service), running, rows, Models(service, None), make_key)
            pool = running.services.pool
            service.on_put = lambda _path: held.append(pool.lent)
            async with stage.tenant("acme") as acme:
                assert (await acme.promote(await acme.convert(b"new"), TWO)).status_code == 200
    assert held == [0, 0]


async def test_a_backup_is_asked_for_again_with_a_fresh_token_if_the_token_was_revoked_early() -> None:
    class Tokens:
        tokens: ClassVar[list[str]] = ["revoked", "fresh"]

        async def token(self) -> str:
            return self.tokens[0]

        def forget(self) -> None:
            self.tokens.pop(0)

    class Store:
        backups: ClassVar[dict[str, bytes]] = {}

        async def put(self, key: str, path: Path, **_options: object) -> None:
            self.backups[key] = path.read_bytes()  # noqa: ASYNC240 - a few bytes

    with serving_files() as service:
        service.files["/models/acme/m/out.nef"] = b"old"
        service.accepts = lambda header: header == "Bearer fresh"
        async with Egress.from_settings(Settings(_env_file=None, egress_allow="127.0.0.0/8")) as egress:
            target = _FileService(egress, cast("ObjectStore", Store()), service.url, "", cast("oauth.Tokens", Tokens()))
            await target.back_up("acme/m/out.nef", "backup")
    assert Store.backups == {"backup": b"old"}


def test_a_promotion_bucket_that_is_the_stores_own_is_refused_at_start() -> None:
    with pytest.raises(ValidationError, match="LEASEHOLD_PROMOTE_BUCKET is LEASEHOLD_S3_BUCKET"):
        Settings(_env_file=None, s3_bucket="one", promote_bucket="one")


def test_no_two_tenants_have_one_folder() -> None:
    names = ["acme", "Acme", "ACME", "acme/x", "../acme", "~acme", "", "a b", "acme.", "x" * 64, "x" * 65, "模"]
    folders = [folder_of(name) for name in names]
    assert len({folder.lower() for folder in folders}) == len(names)
    assert all("/" not in folder and folder not in ("", ".", "..") for folder in folders)
