"""A concurrency limit that is declared acts on every kind of job, or it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from uuid import UUID

import httpx2
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.api.auth.security import (
    CONVERSION_WRITE,
    GENERATION_WRITE,
    MEDIA_READ,
    MEDIA_WRITE,
    OPERATE,
    RUNS_READ,
    RUNS_WRITE,
    TEMPLATES_WRITE,
)
from leasehold.db.database import Connection, connect
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.runtime.gather import cancel_and_wait
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import concurrency, jobs, limits
from leasehold.transitions.jobs import NewJob
from tests.api.conftest import client_of, serving
from tests.api.media_api import MediaApi, problem
from tests.factories import ONE
from tests.support.lock_waits import until_waiting

SCOPES = (
    RUNS_WRITE, RUNS_READ, TEMPLATES_WRITE, OPERATE, MEDIA_WRITE, MEDIA_READ, CONVERSION_WRITE, GENERATION_WRITE,
)  # fmt: skip
TENANT = "acme"


@pytest.fixture
async def http(settings: Settings, rows: Connection) -> AsyncIterator[httpx2.AsyncClient]:
    key = await create_key(rows, tenant_id=TENANT, client_id="tests", scopes=SCOPES)
    known = settings.model_copy(
        update={
            "generation_credentials": {"jimeng": SecretStr("id:secret")},
            "generation_per_server": 0,
            "pipelines": "leasehold.pipelines:with_demonstrations",
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
        }
    )
    async with serving(known) as running, client_of(running.url, key.text) as client:
        yield client


async def picture(http: httpx2.AsyncClient, _number: int) -> UUID:
    media_api = MediaApi(http)
    answer = await media_api.complete(await media_api.upload())
    return UUID(answer.json()["job_id"])


async def conversion(http: httpx2.AsyncClient, number: int) -> UUID:
    form = {"user_id": f"u{number}", "model_id": "1", "version": "0001", "platform": "720"}
    answer = await http.post("/api/v1/jobs", data=form, files={"model": ("m.onnx", b"model")})
    assert answer.status_code == 201, answer.text
    return UUID(answer.json()["job_id"])


async def generation(http: httpx2.AsyncClient, number: int) -> UUID:
    body = {"prompt": f"a cat {number}", "provider": "jimeng", "model": "m"}
    answer = await http.post("/v1/images/generations", json=body)
    assert answer.status_code == 202, answer.text
    return UUID(answer.json()["data"]["task_id"])


async def run(http: httpx2.AsyncClient, _number: int) -> UUID:
    answer = await http.post("/v1/runs", json={"template": "noop"})
    assert answer.status_code == 202, answer.text
    return UUID(answer.json()["id"])


async def held(rows: Connection, job_id: UUID) -> bool:
    return bool(await rows.fetchval("SELECT held FROM job WHERE id = $1", job_id))


async def end(rows: Connection, job_id: UUID) -> None:
    """As whoever ends a job does."""
    names = await concurrency.limits_of(rows, [job_id])
    await jobs.request_cancel(rows, [job_id], TENANT, reason="", by="test", forced=True)
    await concurrency.admit(rows, names, [job_id])


async def limit(http: httpx2.AsyncClient, key: str, tenant: str = TENANT, at_most: int = 1) -> httpx2.Response:
    return await http.put("/v1/limits", json={"tenant_id": tenant, "key": key, "at_most": at_most})


Submit = Callable[[httpx2.AsyncClient, int], Awaitable[UUID]]
KINDS = [(picture, "media", "media"), (conversion, "conversion", "conversion")]
KINDS += [(generation, "generation", "generation"), (run, "default", "noop")]


@pytest.mark.parametrize("tenant", [TENANT, "*"])
@pytest.mark.parametrize(("submit", "queue", "kind"), KINDS, ids=lambda one: str(one)[:12])
async def test_a_limit_acts_on_every_kind_of_job(
    http: httpx2.AsyncClient, rows: Connection, submit: Submit, queue: str, kind: str, tenant: str
) -> None:
    for key in (f"queue:{queue}", f"template:{kind}", "tenant"):
        assert (await limit(http, key, tenant)).status_code == 200
        first, second = await submit(http, 1), await submit(http, 2)
        assert [await held(rows, one) for one in (first, second)] == [False, True], key
        await end(rows, first)
        assert not await held(rows, second), key
        await end(rows, second)
        assert (await http.delete(f"/v1/limits/{tenant}/{key}")).status_code == 200


async def test_kinds_share_the_limit_of_their_tenant(http: httpx2.AsyncClient, rows: Connection) -> None:
    await limit(http, "tenant", at_most=2)
    made = [await submit(http, 1) for submit in (picture, conversion, generation, run)]
    assert [await held(rows, one) for one in made] == [False, False, True, True]


async def test_a_limit_by_a_value_acts_on_every_kind(http: httpx2.AsyncClient, rows: Connection) -> None:
    assert (await limit(http, "payload:generation:/prompt")).status_code == 200
    made = [await generation(http, number) for number in (1, 1, 2)]
    assert [await held(rows, one) for one in made] == [False, True, False]


@pytest.mark.parametrize(
    "key", ["queue:webhooks", "template:webhook", "template:generation_withdrawal", "queue:nobody", "template:nobody",
            "payload:nobody:/x", "payload:webhook:/webhook_id"],
)  # fmt: skip
async def test_a_limit_that_could_never_act_is_refused(http: httpx2.AsyncClient, rows: Connection, key: str) -> None:
    for tenant in (TENANT, "*"):
        problem(await limit(http, key, tenant), 422, "limit_without_effect")
    assert await rows.fetchval("SELECT count(*) FROM gate") == 0


async def test_a_limit_for_a_template_is_taken_once_the_template_is_written(http: httpx2.AsyncClient) -> None:
    keys = ("template:mine", "queue:far", "payload:mine:/x")
    for key in keys:
        problem(await limit(http, key), 422, "limit_without_effect")
    steps = [{"id": "a", "queue": "near"}, {"id": "b", "queue": "far"}]
    assert (await http.post("/v1/templates", json={"type": "mine", "steps": steps})).status_code == 201
    for key in keys:
        assert (await limit(http, key)).status_code == 200
        assert (await limit(http, key, "*")).status_code == 200
        problem(await limit(http, key, "other"), 422, "limit_without_effect")


async def test_a_run_counts_at_the_limits_of_its_later_steps(http: httpx2.AsyncClient, rows: Connection) -> None:
    steps = [{"id": "a", "queue": "near"}, {"id": "b", "queue": "far"}]
    await http.post("/v1/templates", json={"type": "mine", "steps": steps})
    await limit(http, "queue:far")
    made = [UUID((await http.post("/v1/runs", json={"template": "mine"})).json()["id"]) for _ in range(2)]
    assert [await held(rows, one) for one in made] == [False, True]


async def test_a_tenants_own_bound_goes_before_everybodys(http: httpx2.AsyncClient, rows: Connection) -> None:
    await limit(http, "tenant", "*", at_most=1)
    await limit(http, "tenant", TENANT, at_most=2)
    made = [await run(http, 1) for _ in range(3)]
    assert [await held(rows, one) for one in made] == [False, False, True]
    await http.delete(f"/v1/limits/{TENANT}/tenant")
    await end(rows, made[0])
    assert await held(rows, made[2])  # everybody's bound is left
    await end(rows, made[1])
    assert not await held(rows, made[2])


@pytest.mark.parametrize(("owner", "key"), [(TENANT, "template:one"), ("*", "tenant"), ("*", "payload:one:/x")])
async def test_a_limit_that_is_lifted_while_a_job_is_written_does_not_come_back_with_it(
    rows: Connection, owner: str, key: str
) -> None:
    await limits.declare(rows, [ONE], ConcurrencyLimit(owner, key, at_most=0))
    job = NewJob(ONE, TENANT)
    declared = await rows.fetch("SELECT tenant_id, key, at_most, per_minute FROM gate WHERE declared")
    job = replace(job, limits=limits.applicable_limits(declared, TENANT, ONE, {}))
    assert await limits.withdraw(rows, owner, key)
    async with rows.transaction():
        await jobs.submit(rows, [job])
    await concurrency.admit(rows, await concurrency.limits_of(rows, [job.id]))
    assert not await held(rows, job.id)


@pytest.mark.parametrize("is_lifted", [True, False])
@pytest.mark.parametrize("owners", [("*", TENANT), (TENANT, "*")])
async def test_everybodys_bound_that_changes_while_a_tenants_own_is_lifted_changes_for_the_tenant(
    rows: Connection, settings: Settings, owners: tuple[str, str], is_lifted: bool
) -> None:
    """The tenant's jobs, which wait at its own bound, get everybody's bound, and that is lifted or raised just then."""

    async def change(connection: Connection, owner: str) -> None:
        if is_lifted or owner == TENANT:
            assert await limits.withdraw(connection, owner, "tenant")
        else:
            await limits.declare(connection, [ONE], ConcurrencyLimit(owner, "tenant", at_most=1))

    for owner in owners:
        await limits.declare(rows, [ONE], ConcurrencyLimit(owner, "tenant", at_most=0))
    declared = await rows.fetch("SELECT tenant_id, key, at_most, per_minute FROM gate WHERE declared")
    job = replace(NewJob(ONE, TENANT), limits=limits.applicable_limits(declared, TENANT, ONE, {}))
    async with rows.transaction():
        await jobs.submit(rows, [job])
    other = await connect(settings, "test")
    async with rows.transaction():
        await change(rows, owners[0])
        changing = asyncio.create_task(change(other, owners[1]))
        waiting = asyncio.create_task(until_waiting(rows))
        await asyncio.wait([changing, waiting], return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(waiting)
    await changing
    await other.close()
    await concurrency.admit(rows, await concurrency.limits_of(rows, [job.id]))
    assert not await held(rows, job.id)


@pytest.mark.parametrize("key", ["tenant", "payload:noop:/x"])
async def test_a_limit_that_is_changed_or_lifted_is_so_for_those_that_wait(
    http: httpx2.AsyncClient, rows: Connection, key: str
) -> None:
    await limit(http, key, "*", at_most=1)
    made = [await run(http, 1) for _ in range(4)]
    assert [await held(rows, one) for one in made] == [False, True, True, True]
    await limit(http, key, "*", at_most=2)
    assert [await held(rows, one) for one in made] == [False, False, True, True]
    await http.delete(f"/v1/limits/*/{key}")
    assert [await held(rows, one) for one in made] == [False] * 4
