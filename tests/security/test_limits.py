"""Rates, depths and bounds hold on every way in, at their true size; what is refused is not charged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from cryptography.fernet import Fernet
from fastapi.routing import APIRoute
from pydantic import SecretStr

from leasehold.api.app import _routers
from leasehold.api.auth import security
from leasehold.db.database import Connection
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.templates import Templates
from leasehold.limits.admission import Admission
from leasehold.pipelines import SHIPPED
from leasehold.schedules import firing as schedules
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import claims, concurrency, notes, settlements
from leasehold.transitions.settlements import Failure
from leasehold.worker.maintenance.housekeeping import Housekeeping
from tests.api.conftest import Running, client_of, serving
from tests.api.driver import TERMS
from tests.api.media_api import JPEG, PNG, MediaApi, Ticket, problem
from tests.factories import SELDOM
from tests.support.routes import methods_of

SCOPES = tuple(value for name, value in vars(security).items() if name.isupper() and isinstance(value, str))
TENANT = "acme"
_DAY = timedelta(days=1)


@pytest.fixture
def known(settings: Settings) -> Settings:
    return settings.model_copy(
        update={
            "generation_credentials": {"jimeng": SecretStr("id:secret")},
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "egress_allow": "127.0.0.0/8",
        }
    )


@dataclass
class World:
    """A tenant that has one of everything that a request can be about."""

    http: httpx2.AsyncClient
    rows: Connection
    running: Running
    made: dict[str, Any] = field(default_factory=dict)

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body)

    async def run(self, **body: Any) -> str:
        answer = await self.post("/v1/runs", **({"template": "outside"} | body))
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def taken(self) -> tuple[str, dict[str, Any]]:
        """A run whose step an external worker has, and how to speak of it."""
        await self.run()
        (task,) = (await self.post("/v1/external/claim", worker_id="w", queues=["q"])).json()["tasks"]
        self.made["task"], self.made["run"] = task["task_id"], task["run_id"]
        return f"/v1/external/tasks/{task['task_id']}", {"worker_id": "w", "epoch": task["epoch"]}

    async def failed(self, many: int = 1) -> list[str]:
        found = []
        for _ in range(many):
            at, held = await self.taken()
            answer = await self.post(f"{at}/fail", **held, code="no", retryable=False)
            assert answer.status_code == 200, answer.text
            found.append(self.made["run"])
        return found

    async def schedule(self, cron: str = "0 * * * *") -> str:
        answer = await self.post("/v1/schedules", template="outside", cron=cron)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def webhook(self) -> str:
        return str((await self.post("/v1/webhooks", url="https://127.0.0.1/")).json()["id"])

    async def uploaded(self) -> Ticket:
        return await MediaApi(self.http).upload()

    async def generation(self) -> str:
        answer = await self.post("/v1/images/generations", **_IMAGE)
        return str(answer.json()["data"]["task_id"])

    async def jobs(self) -> int:
        """Those that live: a replayed one is as good as new."""
        return int(await self.rows.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL"))

    async def spend(self) -> None:
        """Use up the tenant's shares of this minute."""
        await self.rows.execute(
            "INSERT INTO rate_bucket (key, full_at) SELECT unnest($1::text[]), clock_timestamp() + interval '60 s'"
            " ON CONFLICT (key) DO UPDATE SET full_at = excluded.full_at",
            [f"submit:tenant:{TENANT}", f"upload:tenant:{TENANT}"],
        )

    async def unspend(self) -> None:
        await self.rows.execute("DELETE FROM rate_bucket")

    async def now(self) -> datetime:
        """By PostgreSQL's clock."""
        found: datetime = await self.rows.fetchval("SELECT clock_timestamp()")
        return found

    async def charged(self, since: datetime, of: str = "submit") -> range:
        """How many shares of this minute's RATE were used up since then. More than one number only if a share has come
        back meanwhile.
        """
        owed = await self.rows.fetchrow(
            "SELECT extract(epoch FROM full_at - clock_timestamp())::float8 AS now,"
            " extract(epoch FROM full_at - $2)::float8 AS since FROM rate_bucket WHERE key = $1",
            f"{of}:tenant:{TENANT}", since,
        )  # fmt: skip
        return range(1) if owed is None else range(-int(-owed["now"] * RATE // 60), int(owed["since"] * RATE // 60) + 1)


RATE = 12  # a minute: a share comes back after five seconds
_OUTSIDE: dict[str, Any] = {"type": "outside", "steps": [{"id": "only", "queue": "q"}]}
_IMAGE = {"prompt": "a cat", "provider": "jimeng", "model": "m"}


async def keep_99_bytes(rows: Connection) -> None:
    """They count among the bytes that are stored for the tenant."""
    await rows.execute(
        "INSERT INTO media (id, tenant_id, original_key, content_type, file_name, size)"
        " VALUES ($1, $2, 'k', 'image/jpeg', 'a.jpg', 99)",
        uuid4(), TENANT,
    )  # fmt: skip


@asynccontextmanager
async def world(settings: Settings, rows: Connection, **bounds: Any) -> AsyncIterator[World]:
    key = await create_key(rows, tenant_id=TENANT, client_id="tests", scopes=SCOPES)
    async with serving(settings.model_copy(update=bounds)) as running, client_of(running.url, key.text) as http:
        made = World(http, rows, running)
        answer = await made.post("/v1/templates", **_OUTSIDE)
        assert answer.status_code in (201, 409), answer.text
        yield made


Request = Callable[[], Awaitable[httpx2.Response]]
Way = Callable[[World], Awaitable[Request]]


def plain(path: str, **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        return lambda: world.post(path, **body)

    return prepare


def of_failed(path: str, **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        (run,) = await world.failed()
        return lambda: world.post(path.format(run=run, task=world.made["task"]), **body)

    return prepare


def of_schedule(path: str, **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        schedule = await world.schedule()
        return lambda: world.post(path.format(schedule=schedule), **body)

    return prepare


async def completing(world: World) -> Request:
    ticket = await world.uploaded()
    return lambda: world.post("/complete-upload", **ticket.completion)


async def converting(world: World) -> Request:
    form = {"user_id": "u", "model_id": "1", "version": "0001", "platform": "720"}
    return lambda: world.http.post("/api/v1/jobs", data=form, files={"model": ("m.onnx", b"model")})


async def uploading_images(world: World) -> Request:
    files = [("image", (f"{n}.jpg", JPEG + bytes([n]), "image/jpeg")) for n in range(3)]
    return lambda: world.http.post("/v1/upload/images", files=files)


async def replaying_many(world: World) -> Request:
    await world.failed(3)
    return lambda: world.post("/v1/dead-letters/replay", template="outside")


async def rerunning(world: World) -> Request:
    run = await world.run()
    return lambda: world.post(f"/v1/runs/{run}/rerun")


def _past(hours: int) -> dict[str, str]:
    end = datetime.now(UTC) - _DAY
    return {"start": (end - timedelta(hours=hours)).isoformat(), "end": end.isoformat()}


def of_webhook(method: str, path: str = "", **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        hook = await world.webhook()
        return lambda: world.http.request(method, f"/v1/webhooks/{hook}{path}", json=body or None)

    return prepare


async def redelivering(world: World) -> Request:
    at = f"/v1/webhooks/{await world.webhook()}"
    delivery = (await world.post(f"{at}/test")).json()["id"]
    return lambda: world.post(f"{at}/deliveries/{delivery}/redeliver")


def settling(*, many: bool = False) -> Way:
    async def prepare(world: World) -> Request:
        job = (await world.post("/v1/images/generations", **_IMAGE)).json()["data"]["job_id"]
        task = await world.rows.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = 'submit'", UUID(job))
        await concurrency.admit(world.rows, await concurrency.limits_of(world.rows, [UUID(job)]))
        (claimed,) = await claims.claim(world.rows, TERMS, [task])
        await notes.remember(world.rows, claimed.lease, {"asked_at": "2026-11-22T10:00:00+00:00"})
        lost = Failure(claimed.lease, "error", "submit_outcome_unknown", "lost", retryable=False, delay=0.0)
        await settlements.fail(world.rows, [lost])
        if many:
            body = {"settlements": [{"job_id": job, "action": "again"}]}
            return lambda: world.post("/v1/unsettled/settle", **body)
        return lambda: world.post(f"/v1/jobs/{job}/settle", action="again")

    return prepare


#: What submits, how, and how many shares of which rate it costs.
SUBMITS: dict[str, tuple[Way, int, str]] = {
    "createRun": (plain("/v1/runs", template="outside"), 1, "submit"),
    "createRuns": (plain("/v1/runs/batch", template="outside", runs=[{}] * 5), 5, "submit"),
    "retryRun": (of_failed("/v1/runs/{run}/retry"), 1, "submit"),
    "retryJob": (of_failed("/v1/jobs/{run}/retry"), 1, "submit"),
    "createOperation": (plain("/v1/operations", action="cancel", filter="created:>1h"), 1, "submit"),
    "settleJob": (settling(), 1, "submit"),
    "settleJobs": (settling(many=True), 1, "submit"),
    "testWebhook": (of_webhook("POST", "/test"), 1, "submit"),
    "redeliverWebhook": (redelivering, 1, "submit"),
    "rerunRun": (rerunning, 1, "submit"),
    "replayDeadLetter": (of_failed("/v1/dead-letters/{task}/replay"), 1, "submit"),
    "replayDeadLetters": (replaying_many, 3, "submit"),
    "runScheduleNow": (of_schedule("/v1/schedules/{schedule}/run-now"), 1, "submit"),
    "backfillSchedule": (of_schedule("/v1/schedules/{schedule}/backfill", **_past(4)), 4, "submit"),
    "completeUpload": (completing, 1, "submit"),
    "createConversion": (converting, 1, "submit"),
    "generateImages": (plain("/v1/images/generations", **_IMAGE), 1, "submit"),
    "generateVideo": (plain("/v1/video/generations", **_IMAGE), 1, "submit"),
    "createUploadUrl": (plain("/upload-url", content_type="image/jpeg", file_name="a.jpg"), 1, "upload"),
    "uploadSourceImages": (uploading_images, 3, "upload"),
}


def of_taken(verb: str, **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        at, held = await world.taken()
        return lambda: world.post(f"{at}/{verb}", **held, **body)

    return prepare


def with_schedule(method: str, **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        schedule = await world.schedule()
        return lambda: world.http.request(method, f"/v1/schedules/{schedule}", json=body or None)

    return prepare


def of_generation(kind: str) -> Way:
    async def prepare(world: World) -> Request:
        task = (await world.post(f"/v1/{kind}/generations", **_IMAGE)).json()["data"]["task_id"]
        return lambda: world.post(f"/v1/{'images' if kind == 'images' else 'video'}/cancel", task_id=task)

    return prepare


async def cancelling(world: World) -> Request:
    run = await world.run()
    return lambda: world.post(f"/v1/runs/{run}/cancel")


async def signalling(world: World) -> Request:
    run = await world.run()
    return lambda: world.post(f"/v1/runs/{run}/signals/go", payload=1)


async def draining(world: World) -> Request:
    worker = uuid4()
    await world.rows.execute(
        "INSERT INTO worker (id, present, host, pid, version, queues) VALUES ($1, false, 'h', 1, '1', '{}')", worker
    )
    return lambda: world.post(f"/v1/workers/{worker}/drain")


async def lifting(world: World) -> Request:
    await world.http.put("/v1/limits", json={"tenant_id": TENANT, "key": "tenant", "at_most": 5})
    return lambda: world.http.delete(f"/v1/limits/{TENANT}/tenant")


async def limiting(world: World) -> Request:
    return lambda: world.http.put("/v1/limits", json={"tenant_id": TENANT, "key": "tenant", "at_most": 5})


async def disabling(world: World) -> Request:
    return lambda: world.http.patch("/v1/templates/outside/1", json={"enabled": False})


async def deleting_template(world: World) -> Request:
    name = f"t{uuid4().hex}"
    assert (await world.post("/v1/templates", type=name, steps=[{"id": "a"}])).status_code == 201
    return lambda: world.http.delete(f"/v1/templates/{name}/1")


def viewing(method: str) -> Way:
    async def prepare(world: World) -> Request:
        view = {"name": uuid4().hex, "filter": "status:failed"}
        if method == "PUT":
            return lambda: world.http.put("/v1/views", json=view)
        made = (await world.http.put("/v1/views", json=view)).json()
        return lambda: world.http.delete(f"/v1/views/{made['id']}")

    return prepare


async def templating(world: World) -> Request:
    return lambda: world.post("/v1/templates", type="another", steps=[{"id": "a"}])


def of_key(path: str = "", **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        key = await create_key(world.rows, tenant_id=TENANT, client_id="other", scopes=("runs:read",))
        at = f"/v1/keys/{key.prefix}{path}"
        return lambda: world.post(at, **body) if path else world.http.delete(at)

    return prepare


def of_person(method: str, **body: Any) -> Way:
    async def prepare(world: World) -> Request:
        person = uuid4()
        await world.rows.execute(
            "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes)"
            " VALUES ($1, $2, 'https://id.example', $3, $3, 'Somebody', '{role:viewer}')",
            person, TENANT, str(person),
        )  # fmt: skip
        at = f"/v1/people/{person}{'/end-sessions' if method == 'POST' else ''}"
        return lambda: world.http.request(method, at, json=body or None)

    return prepare


#: What makes no job of the tenant's, and how it is asked. None: only what it does says so.
MAKES_NOTHING: dict[str, Way | None] = {
    "cancelRun": cancelling,
    "signalRun": signalling,
    "cancelJob": None,  # as cancelRun, of every kind
    "deleteJob": None,  # ends a job
    "cancelImages": None,  # writes the platform's own job, that tells the provider: test_generation_door
    "cancelVideo": None,
    "cancelConversion": None,  # ends a job
    "deleteMedia": None,
    "claimExternal": plain("/v1/external/claim", worker_id="w", queues=["q"]),
    "heartbeatExternal": of_taken("heartbeat"),
    "progressExternal": of_taken("progress", percent=1),
    "completeExternal": of_taken("complete"),
    "failExternal": of_taken("fail", retryable=True),
    "announceExternalFiles": of_taken("files", files=[{"name": "a", "size": 1}]),
    "logExternal": of_taken("logs", first=1, lines=[{"message": "a"}]),
    "emitExternal": of_taken("stream", first=1, chunks=["a"]),
    "acknowledgeCancelExternal": None,
    "releaseExternal": of_taken("release"),
    "createTemplate": templating,
    "enableTemplate": disabling,
    "deleteTemplate": deleting_template,
    "createSchedule": plain("/v1/schedules", template="outside", cron="0 0 1 1 *"),
    "changeSchedule": with_schedule("PATCH", enabled=False),
    "deleteSchedule": with_schedule("DELETE"),
    "saveView": viewing("PUT"),
    "deleteView": viewing("DELETE"),
    "createWebhook": plain("/v1/webhooks", url="https://127.0.0.1/"),
    "changeWebhook": of_webhook("PATCH", enabled=True),
    "rotateWebhookSecret": of_webhook("POST", "/rotate"),
    "deleteWebhook": of_webhook("DELETE"),
    "rotateCallbackSecret": plain("/v1/callbacks/secret"),
    "createKey": plain("/v1/keys", client_id="other", role="viewer"),
    "rotateKey": of_key("/rotate"),
    "expireKey": of_key("/expire", in_seconds=60),
    "revokeKey": of_key(),
    "changePerson": of_person("PATCH", disabled=True),
    "endSessions": of_person("POST"),
    "pauseQueue": plain("/v1/queues/q/pause"),
    "resumeQueue": plain("/v1/queues/q/resume"),
    "drainWorker": draining,
    "setLimit": limiting,
    "liftLimit": lifting,
    "postImagesQuery": None,  # two that are only read, by POST
    "postVideoQuery": None,
    "promoteConversion": None,  # copies what a conversion made
    "hearProvider": None,  # a provider's signal: wakes a job
}


def changing(settings: Settings) -> set[str]:
    """All operations of the API that are not only read. The console's acts are these, behind forms."""
    routes = [route for router in _routers(settings, SHIPPED) for route in router.routes if isinstance(route, APIRoute)]
    of_api = [route for route in routes if not route.path.startswith(f"{settings.console_path}/")]
    return {str(route.operation_id) for route in of_api if methods_of(route) - {"GET", "HEAD"}}


def test_of_every_operation_it_is_known_whether_it_submits(settings: Settings) -> None:
    """A new way in is charged, and named in SUBMITS; or it makes no job, and is named in MAKES_NOTHING."""
    assert changing(settings) == SUBMITS.keys() | MAKES_NOTHING.keys()
    assert not SUBMITS.keys() & MAKES_NOTHING.keys()


async def test_every_way_in_is_charged_at_its_size_and_refused_without_shares(
    known: Settings, rows: Connection
) -> None:
    async with world(known, rows, submissions_per_tenant=RATE) as acme:
        for operation, (way, shares, of) in SUBMITS.items():
            await acme.unspend()
            ask = await way(acme)
            before = await acme.jobs()
            await acme.spend()
            refused = await ask()
            said = problem(refused, 429, "rate_limited")
            assert int(refused.headers["retry-after"]) >= 1, operation
            assert refused.headers["ratelimit-policy"].endswith(f";q={RATE};w=60"), operation
            assert ";r=0;t=" in refused.headers["ratelimit"], operation
            assert str(RATE) in said["detail"], operation
            assert await acme.jobs() == before, operation
            await acme.unspend()
            began = await acme.now()
            accepted = await ask()
            assert accepted.is_success, (operation, accepted.text)
            assert f";r={RATE - shares};" in accepted.headers["ratelimit"], operation
            assert shares in await acme.charged(began, of), operation


async def test_what_makes_no_job_is_neither_charged_nor_refused(known: Settings, rows: Connection) -> None:
    async with world(known, rows, submissions_per_tenant=RATE) as acme:
        for operation, way in MAKES_NOTHING.items():
            if way is None:
                continue
            await acme.unspend()
            ask = await way(acme)
            await acme.spend()
            before = await rows.fetchval("SELECT count(*) FROM job")
            answer = await ask()
            assert answer.is_success, (operation, answer.text)
            assert await rows.fetchval("SELECT count(*) FROM job") == before, operation
            if operation == "enableTemplate":
                await acme.http.patch("/v1/templates/outside/1", json={"enabled": True})


@pytest.mark.parametrize(
    ("bound", "code"),
    [("submissions_per_tenant", "rate_limited"), ("queue_depth_limit", "queue_full"),
     ("unfinished_per_tenant", "too_many_unfinished"), ("stored_bytes_per_tenant", "storage_full")],
)  # fmt: skip
async def test_an_accepted_request_that_is_repeated_is_answered_again_and_not_charged(
    known: Settings, rows: Connection, bound: str, code: str
) -> None:
    """Whatever the tenant has used up since."""
    async with world(known, rows) as acme, world(known, rows, **{bound: 1}) as full:
        run, schedule, hook = await acme.run(), await acme.schedule(), await acme.webhook()
        delivery = (await acme.post(f"/v1/webhooks/{hook}/test")).json()["id"]
        posts: dict[str, tuple[str, dict[str, Any]]] = {
            "run": ("/v1/runs", {"template": "outside"}),
            "deduped run": ("/v1/runs", {"template": "outside", "dedupe": {"key": "k"}}),
            "batch": ("/v1/runs/batch", {"template": "outside", "runs": [{}] * 5}),
            "rerun": (f"/v1/runs/{run}/rerun", {}),
            "generation": ("/v1/images/generations", _IMAGE),
            "named generation": ("/v1/images/generations", _IMAGE | {"task_id": "mine"}),
            "upload": ("/upload-url", {"content_type": "image/jpeg", "file_name": "a.jpg"}),
            "operation": ("/v1/operations", {"action": "cancel", "filter": "created:>1h"}),
            "webhook test": (f"/v1/webhooks/{hook}/test", {}),
            "redelivery": (f"/v1/webhooks/{hook}/deliveries/{delivery}/redeliver", {}),
            "run-now": (f"/v1/schedules/{schedule}/run-now", {}),
            "backfill": (f"/v1/schedules/{schedule}/backfill", _past(4)),
            "replay": ("/v1/dead-letters/replay", {"template": "outside"}),
        }
        await acme.failed(2)
        form = {"user_id": "u", "model_id": "1", "version": "0001", "platform": "720"}

        async def ask(world: World, name: str) -> httpx2.Response:
            # The named generation needs no key: its `task_id` says that the request is a repetition.
            headers = {} if name == "named generation" else {"Idempotency-Key": name.replace(" ", "-")}
            if name in posts:
                path, body = posts[name]
                return await world.http.post(path, json=body, headers=headers)
            files = {"model": ("m.onnx", b"model")}
            return await world.http.post("/api/v1/jobs", data=form, files=files, headers=headers)

        names = [*posts, "conversion"]
        first = {name: await ask(acme, name) for name in names}
        assert all(answer.is_success for answer in first.values()), first
        await acme.spend()
        await keep_99_bytes(rows)
        problem(await full.post("/v1/runs", template="outside"), 429, code)
        jobs = await acme.jobs()
        for name in names:
            again = await ask(full, name)
            assert again.is_success, (name, again.text)
            if name == "upload":  # a second may have passed of the URL's life
                assert again.json()["upload_url"] == first[name].json()["upload_url"]
            elif name != "named generation":
                assert (again.status_code, again.content) == (first[name].status_code, first[name].content), name
        assert await acme.jobs() == jobs


async def test_a_request_that_is_refused_for_anything_else_is_not_charged(known: Settings, rows: Connection) -> None:
    async with world(known, rows, submissions_per_tenant=RATE, submissions_per_key=RATE) as acme:
        await acme.post("/v1/templates", type="alone", steps=[{"id": "a"}], concurrency_policy="reject_same_scope")
        assert (await acme.post("/v1/runs", template="alone")).status_code == 202
        await acme.unspend()
        wrong = [
            acme.post("/v1/runs", template="alone"),
            acme.post("/v1/runs", template="nobody"),
            acme.post("/v1/runs/batch", template="alone", runs=[{}, {}]),
            acme.post("/v1/images/generations", prompt="x", provider="nobody", model="m"),
            acme.post(f"/v1/runs/{uuid4()}/retry"),
            acme.post("/v1/dead-letters/replay", template="outside"),
            acme.post(f"/v1/schedules/{await acme.schedule()}/backfill", **_past(0)),
        ]
        for answer in [await one for one in wrong]:
            assert answer.status_code in (202, 404, 409, 422), answer.text
        assert await rows.fetchval("SELECT count(*) FROM rate_bucket WHERE full_at > clock_timestamp()") == 0


async def test_a_key_is_not_charged_for_what_its_tenants_rate_refuses(known: Settings, rows: Connection) -> None:
    async with world(known, rows, submissions_per_tenant=2, submissions_per_key=100) as acme:
        assert [(await acme.post("/v1/runs", template="outside")).status_code for _ in range(9)] == [202] * 2 + [
            429
        ] * 7
        owed = await rows.fetchval(
            "SELECT extract(epoch FROM full_at - clock_timestamp()) FROM rate_bucket WHERE key LIKE 'submit:key:%'"
        )
        assert float(owed) <= 2 * 0.6


async def test_a_batch_larger_than_the_whole_limit_is_told_that_it_can_never_be_let_in(
    known: Settings, rows: Connection
) -> None:
    batch = {"template": "outside", "runs": [{}] * (RATE + 1)}
    for bound in ("submissions_per_key", "submissions_per_tenant", "queue_depth_limit", "unfinished_per_tenant"):
        async with world(known, rows, **{bound: RATE}) as acme:
            said = problem(await acme.post("/v1/runs/batch", **batch), 422, "batch_too_large")
            assert "never" in said["detail"]
            fits = await acme.post("/v1/runs/batch", template="outside", runs=[{}] * RATE)
            assert fits.status_code == 202, (bound, fits.text)
            assert fits.headers.get("ratelimit", ";r=0;").count(";r=0;") == 1
        await rows.execute("DELETE FROM job; DELETE FROM rate_bucket")


@pytest.mark.parametrize("has_limit", [False, True], ids=["without a limit", "at a concurrency limit with room"])
async def test_a_backfill_larger_than_a_queues_depth_is_told_that_it_can_never_be_let_in(
    known: Settings, rows: Connection, has_limit: bool
) -> None:
    async with world(known, rows, queue_depth_limit=8) as acme:
        if has_limit:
            limit = {"tenant_id": TENANT, "key": "tenant", "at_most": 1000}
            assert (await acme.http.put("/v1/limits", json=limit)).is_success
        backfill = f"/v1/schedules/{await acme.schedule()}/backfill"
        said = problem(await acme.post(backfill, **_past(9)), 422, "batch_too_large")
        assert said["detail"].startswith("9 tasks exceed the 8 that may wait in a queue")
        assert await acme.jobs() == 0
        assert len((await acme.post(backfill, **_past(8))).json()["runs"]) == 8
        problem(await acme.post(backfill, **_past(9)), 429, "queue_full")  # only one tick has no run yet


async def test_a_backfill_is_all_or_nothing_and_costs_what_has_no_run_yet(known: Settings, rows: Connection) -> None:
    async with world(known, rows, submissions_per_tenant=RATE) as acme:
        schedule = await acme.schedule()
        problem(await acme.post(f"/v1/schedules/{schedule}/backfill", **_past(99)), 422, "batch_too_large")
        assert await acme.jobs() == 0
        began = await acme.now()
        assert len((await acme.post(f"/v1/schedules/{schedule}/backfill", **_past(8))).json()["runs"]) == 8
        problem(await acme.post(f"/v1/schedules/{schedule}/backfill", **_past(16)), 429, "rate_limited")
        assert await acme.jobs() == 8
        assert len((await acme.post(f"/v1/schedules/{schedule}/backfill", **_past(10))).json()["runs"]) == 2
        assert 10 in await acme.charged(began)


@pytest.mark.parametrize("has_limit", [False, True], ids=["without a limit", "at a concurrency limit with room"])
async def test_a_depth_holds_on_every_way_in(known: Settings, rows: Connection, has_limit: bool) -> None:
    """Full queues refuse whatever would wait in them; the same request passes once they have room."""
    async with world(known, rows, queue_depth_limit=8) as acme:
        if has_limit:  # then a job waits for its admission until after the commit
            limit = {"tenant_id": TENANT, "key": "tenant", "at_most": 1000}
            assert (await acme.http.put("/v1/limits", json=limit)).is_success
        for operation, (way, _, of) in SUBMITS.items():
            if of == "upload":
                continue
            ask = await way(acme)
            await rows.execute("UPDATE task SET queue = 'elsewhere' WHERE status IN ('pending', 'waiting', 'retry')")
            job = await rows.fetchval("SELECT id FROM job LIMIT 1") or (await acme.run())
            fill = (
                "INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts)"
                " SELECT gen_random_uuid(), $1, 'x', 'filler' || q || n, 0, q, 1, 'pending', 1"
                " FROM unnest($2::text[]) AS q, generate_series(1, 8) AS n"
            )
            queues = ["ext:acme:q", "media", "conversion", "generation", "webhooks", "operations"]
            await rows.execute(fill, UUID(str(job)), queues)
            before = await acme.jobs()
            refused = await ask()
            problem(refused, 429, "queue_full")
            assert {"retry-after", "ratelimit", "ratelimit-policy"} <= refused.headers.keys(), operation
            assert await acme.jobs() == before, operation
            await rows.execute("DELETE FROM task WHERE step LIKE 'filler%'")
            accepted = await ask()
            assert accepted.is_success, (operation, accepted.text)


#: A template whose runs begin with three tasks in one queue.
_WIDE: dict[str, Any] = {"type": "wide", "steps": [{"id": name, "queue": "q", "needs": []} for name in "abc"]}
#: The ways in of one job of it.
_WIDE_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "a run": ("/v1/runs", {"template": "wide"}),
    "a batch of one": ("/v1/runs/batch", {"template": "wide", "runs": [{}]}),
    "a retry of a run": ("/v1/runs/{run}/retry", {}),
    "a retry of a job": ("/v1/jobs/{run}/retry", {}),
    "a replay": ("/v1/dead-letters/{letter}/replay", {}),
    "a replay of all": ("/v1/dead-letters/replay", {"template": "wide"}),
    "a rerun": ("/v1/runs/{run}/rerun", {}),
    "run-now": ("/v1/schedules/{schedule}/run-now", {}),
    "a backfill of one tick": ("/v1/schedules/{schedule}/backfill", {}),
}


@pytest.mark.parametrize("has_limit", [False, True], ids=["without a limit", "at a concurrency limit with room"])
async def test_a_job_with_more_tasks_than_may_wait_in_a_queue_gets_in_while_no_other_task_waits_there(
    known: Settings, rows: Connection, has_limit: bool
) -> None:
    async with world(known, rows, queue_depth_limit=2) as acme:
        assert (await acme.post("/v1/templates", **_WIDE)).status_code == 201
        if has_limit:
            limit = {"tenant_id": TENANT, "key": "tenant", "at_most": 1000}
            assert (await acme.http.put("/v1/limits", json=limit)).is_success
        schedule = (await acme.post("/v1/schedules", template="wide", cron="0 * * * *")).json()["id"]
        for name, (way, body) in _WIDE_WAYS.items():
            await rows.execute("DELETE FROM job")
            run, letter = await acme.run(template="wide"), ""
            claim = {"worker_id": "w", "queues": ["q"], "limit": 3}
            tasks = (await acme.post("/v1/external/claim", **claim)).json()["tasks"]
            assert len(tasks) == 3, name
            for task in tasks:  # all have begun, so a retry begins all of them again
                held = {"worker_id": "w", "epoch": task["epoch"]}
                at = f"/v1/external/tasks/{task['task_id']}"
                if (await acme.post(f"{at}/fail", **held, code="no", retryable=False)).is_success:
                    letter = letter or task["task_id"]
            path = way.format(run=run, letter=letter, schedule=schedule)
            sent = _past(1) if name == "a backfill of one tick" else body
            other = await acme.run()
            refused = await acme.post(path, **sent)
            said = problem(refused, 429, "queue_full")
            assert "has 3 tasks there, so it is accepted while no other task waits" in said["detail"], name
            assert refused.headers["retry-after"] == "5", name
            assert (await acme.post(f"/v1/runs/{other}/cancel")).is_success
            accepted = await acme.post(path, **sent)
            assert accepted.is_success, (name, accepted.text)
            assert await acme.jobs() == 1, name
            problem(await acme.post("/v1/runs", template="wide"), 429, "queue_full")


async def test_two_jobs_that_are_larger_than_a_queues_depth_do_not_pass_together(
    known: Settings, rows: Connection
) -> None:
    """Nor do they in one batch, which is told to send fewer."""
    async with world(known, rows, queue_depth_limit=2) as acme:
        assert (await acme.post("/v1/templates", **_WIDE)).status_code == 201
        batch = await acme.post("/v1/runs/batch", template="wide", runs=[{}, {}])
        assert "fewer" in problem(batch, 422, "batch_too_large")["detail"]
        backfill = f"/v1/schedules/{await acme.schedule()}/backfill"
        problem(await acme.post(backfill, **_past(3)), 422, "batch_too_large")
        answers = await asyncio.gather(*(acme.post("/v1/runs", template="wide") for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [202, 429, 429, 429]
        assert await acme.jobs() == 1


@pytest.mark.parametrize("bound", ["queue_depth_limit", "unfinished_per_tenant", "submissions_per_tenant"])
async def test_whoever_asks_at_the_same_time_does_not_pass_together(
    known: Settings, rows: Connection, bound: str
) -> None:
    async with world(known, rows, **{bound: 5}) as acme:
        single = [acme.post("/v1/runs", template="outside") for _ in range(8)]
        batches = [acme.post("/v1/runs/batch", template="outside", runs=[{}] * 3) for _ in range(4)]
        answers = await asyncio.gather(*single, *batches)
        assert {answer.status_code for answer in answers} == {202, 429}
        assert 3 <= await acme.jobs() <= 5


async def test_a_tenants_unfinished_jobs_are_bounded_on_every_way_in(known: Settings, rows: Connection) -> None:
    async with world(known, rows) as acme, world(known, rows, unfinished_per_tenant=6) as full:
        for _ in range(6):
            await acme.run()
        for operation, (way, _, of) in SUBMITS.items():
            of_other_jobs = (
                "retryRun",
                "retryJob",
                "settleJob",
                "settleJobs",
                "redeliverWebhook",
                "replayDeadLetter",
                "replayDeadLetters",
            )
            if of == "upload" or operation in of_other_jobs:
                continue
            ask = await way(World(full.http, rows, full.running)) if operation != "rerunRun" else None
            if ask is None:
                run = await rows.fetchval("SELECT id FROM job LIMIT 1")
                answer = await full.post(f"/v1/runs/{run}/rerun")
            else:
                answer = await ask()
            problem(answer, 429, "too_many_unfinished")
            assert await acme.jobs() == 6, operation
        other = await create_key(rows, tenant_id="other", client_id="t", scopes=SCOPES)
        async with client_of(str(full.http.base_url), other.text) as http:
            assert (await World(http, rows, full.running).post("/v1/templates", **_OUTSIDE)).status_code == 201
            assert await World(http, rows, full.running).run()


async def test_a_batch_over_the_bound_is_refused_with_a_sentence_that_is_true(
    known: Settings, rows: Connection
) -> None:
    """The tenant has fewer unfinished jobs than the bound: only the batch exceeds it."""
    async with world(known, rows, unfinished_per_tenant=5) as acme:
        await acme.run()
        answer = await acme.post("/v1/runs/batch", template="outside", runs=[{}] * 5)
        problem(answer, 429, "too_many_unfinished")
        assert "may have at most 5 unfinished jobs" in answer.json()["detail"]


async def test_bytes_that_are_kept_for_a_tenant_are_bounded(known: Settings, rows: Connection) -> None:
    async with world(known, rows, stored_bytes_per_tenant=3 * len(JPEG)) as acme:
        media_api = MediaApi(acme.http)
        waiting = [await media_api.upload() for _ in range(4)]
        answers = [await media_api.complete(ticket) for ticket in waiting]
        assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
        problem(answers[-1], 429, "storage_full")
        assert int(answers[-1].headers["retry-after"]) >= 60
        problem(await media_api.ask(), 429, "storage_full")
        problem(await acme.post("/v1/runs", template="outside"), 429, "storage_full")
        await rows.execute("DELETE FROM media WHERE job_id = (SELECT job_id FROM media WHERE size > 0 LIMIT 1)")
        assert (await eventually(lambda: media_api.complete(waiting[-1]), 202)).status_code == 202


@pytest.mark.parametrize("by", ["the completion", "housekeeping"])
async def test_a_refused_picture_does_not_count_as_kept(known: Settings, rows: Connection, by: str) -> None:
    """Its row stays for a week, to say why it was refused. Its object is deleted."""
    bounds = {"stored_bytes_per_tenant": 3 * len(JPEG), "picture_max_bytes": 3 * len(JPEG)}
    async with world(known, rows, **bounds) as acme:
        media_api = MediaApi(acme.http)
        refused, good = await media_api.upload(JPEG + bytes(3 * len(JPEG))), await media_api.upload()
        if by == "the completion":
            problem(await media_api.complete(refused), 422, "too_large")
        else:
            await rows.execute("UPDATE upload SET look_at = clock_timestamp() WHERE key = $1", refused.original_key)
            services = acme.running.services
            await Housekeeping(services.settings, services.pool.acquire, services.store, SHIPPED).uploads()
        assert (await media_api.look(refused)).json()["error"]["code"] == "too_large"
        assert (await acme.running.services.admission.measure(rows, TENANT))["stored_bytes"] == 0
        assert (await media_api.complete(good)).status_code == 202


async def test_outputs_and_models_count_as_kept(known: Settings, rows: Connection) -> None:
    async with world(known, rows, stored_bytes_per_tenant=1000) as acme:
        run = await acme.run()
        task = await rows.fetchval("SELECT id FROM task WHERE job_id = $1", UUID(run))
        await rows.execute(
            "INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)"
            " VALUES ($1, 'o', $2, 'acme', 'only', 'k', 1000, '', '')",
            task, UUID(run),
        )  # fmt: skip
        problem(await eventually(lambda: acme.post("/v1/runs", template="outside"), 429), 429, "storage_full")
        await rows.execute("DELETE FROM output")
        await eventually(lambda: acme.post("/v1/runs", template="outside"), 202)
        form = {"user_id": "u", "model_id": "1", "version": "0001", "platform": "720"}
        made = await acme.http.post("/api/v1/jobs", data=form, files={"model": ("m.onnx", bytes(1000))})
        assert made.status_code == 201, made.text
        problem(await acme.post("/v1/runs", template="outside"), 429, "storage_full")


async def test_reference_images_count_as_kept(known: Settings, rows: Connection) -> None:
    """There may be a gigabyte of them for each model."""

    async def send(user: str, *images: bytes) -> httpx2.Response:
        form = {"user_id": user, "model_id": "1", "version": "0001", "platform": "720"}
        files = [("model", ("m.onnx", b"m")), *(("ref_images[]", ("a.png", image)) for image in images)]
        return await acme.http.post("/api/v1/jobs", data=form, files=files)

    async with world(known, rows, stored_bytes_per_tenant=3000) as acme:  # a small image has 2048 in its archive
        assert (await send("first", PNG)).status_code == 201
        problem(await send("second", PNG), 429, "storage_full")
        assert (await send("second")).status_code == 201


async def test_source_images_count_as_kept(known: Settings, rows: Connection) -> None:
    """A client may upload them and never order a generation."""

    async def send(*images: bytes) -> httpx2.Response:
        return await acme.http.post("/v1/upload/images", files=[("image", ("a.png", image)) for image in images])

    async with world(known, rows, stored_bytes_per_tenant=3 * len(PNG)) as acme:
        problem(await send(PNG, PNG + b"another", PNG + b"a third"), 429, "storage_full")
        # The refused form's images expire at once, and count until housekeeping has deleted them.
        assert await rows.fetchval("SELECT count(*) FROM source_image WHERE expires_at < clock_timestamp()") == 2
        await rows.execute("DELETE FROM source_image")
        assert (await eventually(lambda: send(PNG, PNG + b"2"), 200)).status_code == 200
        sizes = await rows.fetch("SELECT size FROM source_image ORDER BY size")
        assert [row["size"] for row in sizes] == [len(PNG), len(PNG) + 1]
        problem(await send(PNG + b"3"), 429, "storage_full")
        assert await rows.fetchval("SELECT count(*) FROM source_image") == 2


async def eventually(ask: Request, status: int) -> httpx2.Response:
    """What a worker or the sweeper wrote is counted anew after a moment."""
    async with asyncio.timeout(60):
        while (answer := await ask()).status_code != status:
            await asyncio.sleep(0.1)
    return answer


async def fire(rows: Connection, bounds: Settings) -> int:
    """As each worker does it again and again; what was set aside for a moment is tried now."""
    await rows.execute("DELETE FROM quarantine")
    made, _ = await schedules.fire_due(rows, Templates(Pipelines()), 60, admission=Admission(bounds, SHIPPED))
    return len(made)


@pytest.mark.parametrize(
    ("bound", "code"),
    [("submissions_per_tenant", "rate_limited"), ("queue_depth_limit", "queue_full"),
     ("unfinished_per_tenant", "too_many_unfinished"), ("stored_bytes_per_tenant", "storage_full")],
)  # fmt: skip
async def test_a_schedules_tick_over_a_bound_stays_due_and_says_why(
    known: Settings, rows: Connection, bound: str, code: str
) -> None:
    async with world(known, rows) as acme:
        schedule = UUID(await acme.schedule(SELDOM))
        tick = await rows.fetchval(
            "UPDATE schedule SET next_run_at = date_trunc('second', clock_timestamp()), overlap = 'allow_all'"
            " WHERE id = $1 RETURNING next_run_at",
            schedule,
        )
        await acme.run()
        await acme.spend()
        await keep_99_bytes(rows)
        before = await acme.jobs()
        assert await fire(rows, known.model_copy(update={bound: 1})) == 0
        assert await acme.jobs() == before
        row = await rows.fetchrow(
            "SELECT last_error, next_run_at, enabled, failures FROM schedule WHERE id = $1", schedule
        )
        assert row is not None
        assert (row["last_error"]["code"], row["next_run_at"], row["enabled"], row["failures"]) == (code, tick, True, 0)
        await acme.unspend()
        assert await fire(rows, known.model_copy(update={bound: 1000})) == 1
        assert await rows.fetchval("SELECT tick FROM run WHERE schedule_id = $1", schedule) == tick


async def test_of_many_missed_ticks_as_many_run_as_the_rate_lets_in_and_the_rest_stay_due(
    known: Settings, rows: Connection
) -> None:
    async with world(known, rows) as acme:
        schedule = UUID(await acme.schedule("* * * * *"))
        await rows.execute(
            "UPDATE schedule SET next_run_at = date_trunc('minute', clock_timestamp()) - interval '19 min',"
            " catch_up = 'all', overlap = 'allow_all' WHERE id = $1",
            schedule,
        )
        bounds = known.model_copy(update={"submissions_per_tenant": RATE})
        began = await acme.now()
        first, second = await fire(rows, bounds), await fire(rows, bounds)
        came_back = (await acme.now() - began) // timedelta(seconds=60 / RATE)
        assert RATE <= first <= RATE + came_back
        assert first + second <= RATE + came_back
        await acme.unspend()
        assert first + second + await fire(rows, bounds) >= 20
        ticks = [
            row["tick"]
            for row in await rows.fetch("SELECT tick FROM run WHERE schedule_id = $1 ORDER BY tick", schedule)
        ]
        assert len(ticks) >= 20
        assert all(after - before == timedelta(minutes=1) for before, after in pairwise(ticks))


@pytest.mark.parametrize(
    ("bound", "code", "path"),
    [
        ("templates_per_tenant", "too_many_templates", "/v1/templates"),
        ("schedules_per_tenant", "too_many_schedules", "/v1/schedules"),
        ("webhooks_per_tenant", "too_many_webhooks", "/v1/webhooks"),
        ("limits_per_tenant", "too_many_limits", "/v1/limits"),
    ],
)
async def test_what_a_tenant_may_have_is_bounded_also_at_once(
    known: Settings, rows: Connection, bound: str, code: str, path: str
) -> None:
    async with world(known, rows, **{bound: 3}) as acme:

        def ask(number: int) -> Awaitable[httpx2.Response]:
            bodies: dict[str, dict[str, Any]] = {
                "/v1/templates": {"type": f"t{number}", "steps": [{"id": "a", "queue": "q"}]},
                "/v1/schedules": {"template": "outside", "cron": "0 0 1 1 *"},
                "/v1/webhooks": {"url": "https://127.0.0.1/"},
                "/v1/limits": {"tenant_id": TENANT, "key": f"payload:outside:/{number}", "at_most": 1},
            }
            method = "PUT" if path == "/v1/limits" else "POST"
            return acme.http.request(method, path, json=bodies[path])

        answers = await asyncio.gather(*(ask(number) for number in range(8)))
        there = 1 if path == "/v1/templates" else 0  # the world's own
        good = [answer for answer in answers if answer.is_success]
        assert len(good) == 3 - there
        for answer in answers:
            if answer not in good:
                problem(answer, 409, code)
        if path == "/v1/limits":  # setting one again needs no more room
            done = good[0].json()
            assert (await acme.http.put(path, json=done | {"at_most": 2})).is_success
