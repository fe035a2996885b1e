"""Schemas and payloads that clients write are checked where they can be killed, and cost their own tenant alone."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest

from leasehold.db.database import Connection
from leasehold.domain.errors import Invalid
from leasehold.domain.template import Template
from leasehold.evaluation.evaluator import EvaluationLimits, Evaluator
from leasehold.evaluation.flat import weight
from leasehold.evaluation.templates import Templates
from leasehold.runtime.gather import cancel_and_wait
from leasehold.schedules import firing as schedules
from leasehold.settings import Settings
from tests.api.conftest import Running
from tests.api.media_api import problem
from tests.factories import SELDOM
from tests.runs.conftest import Client, client, running, runs_settings, stranger
from tests.runs.work import pipelines

__all__ = ["client", "running", "runs_settings", "stranger"]

STEP = {"id": "only", "worker_type": "external", "queue": "q"}
#: Ten levels of two references are just under the bound; a list of many numbers is looked at that often for each.
LEVELS = 10
MANY = [1] * 100_000
#: Seconds that the event loop may be kept: what an evaluation may take at most, and so takes where it is refused.
LONGEST = 0.25
NO_END = 60.0
PROC = Path("/proc")


def doubling(levels: int, keyword: str = "allOf", last: Any = None) -> dict[str, Any]:
    """`levels` definitions, each of which refers to the next one twice."""
    defs = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": defs | {f"d{levels}": last or {"type": "integer"}}, "$ref": "#/$defs/d0"}


def costly() -> dict[str, Any]:
    schema = doubling(LEVELS)
    return {"$defs": schema["$defs"], "properties": {"list": {"items": {"$ref": "#/$defs/d0"}}}}


async def write(client: Client, schema: Any, **more: Any) -> Any:
    return await client.post("/v1/templates", **({"type": "evil", "steps": [STEP], "payload_schema": schema} | more))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    changes = {
        "evaluation_cpu_seconds": 0.1,  # so that many attacks take no minutes
        "evaluation_wall_seconds": NO_END,  # a busy machine may stand still
    }
    return settings.model_copy(update=changes)


@dataclass
class Loop:
    """How long the event loop, which the API under test shares, stood still at most."""

    worst: float = 0.0

    async def watch(self) -> None:
        before = time.thread_time()  # of this thread's CPU: a machine that is busy with other things does not count
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.worst = max(self.worst, now - before)
            before = now


@pytest.fixture
async def loop() -> AsyncIterator[Loop]:
    """Without the garbage collector: how long it takes depends on the tests before."""
    watched = Loop()
    gc.disable()
    task = asyncio.create_task(watched.watch())
    yield watched
    task.cancel()
    gc.enable()


@pytest.fixture
async def evaluator(settings: Settings) -> AsyncIterator[Evaluator]:
    evaluator = Evaluator(EvaluationLimits.of(settings))
    yield evaluator
    await evaluator.close()


# --- what is refused when it is written


@pytest.mark.parametrize(
    "schema",
    [
        doubling(27),
        *(doubling(27, keyword) for keyword in ("anyOf", "oneOf", "prefixItems")),
        {"$defs": {f"d{n}": {"if": {"$ref": f"#/$defs/d{n + 1}"}, "then": {"$ref": f"#/$defs/d{n + 1}"}}
                   for n in range(27)} | {"d27": True}, "$ref": "#/$defs/d0"},
        {"$defs": {f"d{n}": {"not": {"$ref": f"#/$defs/d{n + 1}"}, "else": {"$ref": f"#/$defs/d{n + 1}"}}
                   for n in range(27)} | {"d27": True}, "$ref": "#/$defs/d0"},
        {"$defs": {f"d{n}": {"properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"}}
                   for n in range(27)} | {"d27": True}, "$ref": "#/$defs/d0"},
        {"$defs": {f"d{n}": {"$anchor": f"d{n}", "allOf": [{"$ref": f"#d{n + 1}"}] * 2}
                   for n in range(27)} | {"d27": {"$anchor": "d27"}}, "$ref": "#d0"},
        {"$defs": {f"d{n}": {"$id": f"urn:x:d{n}", "allOf": [{"$ref": f"urn:x:d{n + 1}"}] * 2}
                   for n in range(27)} | {"d27": {"$id": "urn:x:d27"}}, "$ref": "urn:x:d0"},
        {"$defs": {f"d{n}": {"$dynamicAnchor": f"d{n}", "allOf": [{"$dynamicRef": f"#d{n + 1}"}] * 2}
                   for n in range(27)} | {"d27": {"$dynamicAnchor": "d27"}}, "$dynamicRef": "#d0"},
        {"$defs": {f"d{n}": {"unevaluatedProperties": False, "allOf": [{"$ref": f"#/$defs/d{n + 1}"}]}
                   for n in range(27)} | {"d27": True}, "$ref": "#/$defs/d0"},
        {"properties": {"again": {"$ref": "#"}}, "allOf": [{"$ref": "#/$defs/d0"}], "$defs": doubling(27)["$defs"]},
        {"$ref": "#"},
        {"allOf": [{"anyOf": [{"$ref": "#"}]}]},
        {"enum": list(range(12_000))},
        {"pattern": "(a{100}){5000}b{8000}"},
    ],
)  # fmt: skip
async def test_a_schema_that_grows_when_it_is_written_out_is_refused(evaluator: Evaluator, schema: Any) -> None:
    with pytest.raises(Invalid) as refused:
        await evaluator.check_schema("acme", schema)
    assert refused.value.code == "schema_too_complex"


async def test_a_schema_is_counted_outside_the_event_loop(client: Client, loop: Loop) -> None:
    problem(await write(client, doubling(27)), 422, "schema_too_complex")
    wide = {"properties": {f"p{n}": {"minLength": 1, "maxLength": 2} for n in range(1300)}}
    assert (await write(client, wide)).status_code == 201
    assert loop.worst < LONGEST


@pytest.mark.parametrize(
    "schema",
    [
        doubling(LEVELS),
        {"type": "object", "properties": {side: {"$ref": "#"} for side in ("left", "right")}},
        {"$dynamicAnchor": "node", "properties": {"children": {"items": {"$dynamicRef": "#node"}}}},
        {"properties": {f"field{n}": {"type": "string", "pattern": "^[a-z]{1,63}$"} for n in range(60)}},
        {"enum": [f"code-{n}" for n in range(3000)]},
    ],
)
async def test_an_honest_schema_is_accepted(evaluator: Evaluator, schema: Any) -> None:
    await evaluator.check_schema("acme", schema)


async def test_a_schema_that_takes_long_to_compile_is_refused(settings: Settings) -> None:
    limits = EvaluationLimits.of(settings.model_copy(update={"evaluation_cpu_seconds": 0.01, "schema_max_size": 10**6}))
    evaluator = Evaluator(limits)
    with pytest.raises(Invalid) as refused:
        await evaluator.check_schema("acme", {"patternProperties": {f"\\w{{90}}{n}": True for n in range(3000)}})
    assert refused.value.code == "schema_too_complex"
    await evaluator.close()


# --- what is refused when it is checked, on every way in


async def test_a_payload_that_takes_too_long_is_refused_while_everybody_else_is_served(
    client: Client, stranger: Client, loop: Loop
) -> None:
    assert (await write(client, costly())).status_code == 201
    assert (await write(stranger, {"properties": {"a": {"pattern": "^[a-z]+$"}}}, type="honest")).status_code == 201
    for turn in range(5):  # a part that everybody needs may stand still while attacks end
        attacks = [
            asyncio.create_task(client.submit("evil", payload={"list": MANY, "n": 5 * turn + n})) for n in range(5)
        ]
        honest = 0
        while not all(attack.done() for attack in attacks):
            assert (await stranger.http.get("/livez")).status_code == 200
            assert (await stranger.submit("honest", payload={"a": "abc"})).status_code == 202
            honest += 1
        answers = [await attack for attack in attacks]
        assert {answer.json()["code"] for answer in answers} <= {"payload_too_complex", "evaluations_waiting"}
        problem(answers[0], 422, "payload_too_complex")  # the others may have waited too long for their turn
        if honest > len(attacks):
            break
    assert honest > len(attacks)  # nobody waited for as many attacks as there were
    assert loop.worst < LONGEST


async def test_a_payload_with_a_key_of_any_length_is_refused_in_time_and_costs_no_child(evaluator: Evaluator) -> None:
    schema = {"additionalProperties": {"allOf": [{"type": "integer"}]}}
    for key in ("short", "k" * 100_000, "a/b" * 30_000):
        with pytest.raises(Invalid) as refused:
            await evaluator.check("acme", schema, [orjson.dumps({key: "x"})])
        assert (refused.value.code, len(refused.value.message) < 1000) == ("invalid_payload", True)
    process = evaluator._quick._process
    assert process is not None
    assert process.answered >= 3


async def test_a_payload_nested_so_that_each_level_doubles_the_work_harms_nobody(client: Client, loop: Loop) -> None:
    again = {"properties": {"a": {"$ref": "#/$defs/node"}}}
    schema = {"$defs": {"node": {"allOf": [again, again], "unevaluatedProperties": False}}, "$ref": "#/$defs/node"}
    assert (await write(client, schema)).status_code == 201
    payload: dict[str, Any] = {}
    for _ in range(60):
        payload = {"a": payload}
    answer = await client.submit("evil", payload=payload)
    assert answer.status_code == 202 or problem(answer, 422, "payload_too_complex")
    assert loop.worst < LONGEST


async def test_a_batch_is_checked_within_the_same_time(client: Client) -> None:
    assert (await write(client, costly())).status_code == 201
    runs = [{"payload": {}}, {"payload": {"list": MANY}}]
    problem(await client.post("/v1/runs/batch", template="evil", runs=runs), 422, "payload_too_complex")
    small = [{"payload": {"list": [1] * 2, "n": n}} for n in range(200)]
    assert (await client.post("/v1/runs/batch", template="evil", runs=small)).status_code == 202
    said = await client.post("/v1/runs/batch", template="evil", runs=[*small, {"payload": {"list": ["x"]}}])
    assert "runs[200]" in problem(said, 422, "invalid_payload")["detail"]


async def test_a_replay_with_another_payload_is_checked_within_the_same_time(client: Client, rows: Connection) -> None:
    assert (await write(client, costly())).status_code == 201
    run = await client.start("evil", payload={})
    problem(await client.post(f"/v1/runs/{run}/retry", payload={"list": MANY}), 422, "payload_too_complex")
    task = await rows.fetchval("SELECT id FROM task WHERE job_id = $1", UUID(run))
    await rows.execute("UPDATE task SET status = 'failed', finished_at = clock_timestamp() WHERE id = $1", task)
    answer = await client.post(f"/v1/dead-letters/{task}/replay", payload={"list": MANY})
    problem(answer, 422, "payload_too_complex")


async def test_a_rerun_checks_nothing_anew(client: Client, loop: Loop) -> None:
    assert (await write(client, costly())).status_code == 201
    run = await client.start("evil", payload={"list": [1]})
    assert (await client.http.post(f"/v1/runs/{run}/rerun")).status_code == 202
    assert loop.worst < LONGEST


async def test_a_request_that_repeats_one_is_told_the_first_answer_whatever_its_template_has_become(
    client: Client,
) -> None:
    assert (await write(client, {})).status_code == 201
    key = {"Idempotency-Key": "again"}
    body = {"template": "evil", "payload": {"list": MANY}}
    first = await client.http.post("/v1/runs", json=body, headers=key)
    assert (await write(client, costly(), version=2)).status_code == 201
    assert (await client.http.post("/v1/runs", json=body, headers=key)).content == first.content
    other = await client.http.post("/v1/runs", json=body, headers={"Idempotency-Key": "new"})
    problem(other, 422, "payload_too_complex")
    other = await client.http.post("/v1/runs", json=body, headers={"Idempotency-Key": "new"})
    problem(other, 422, "payload_too_complex")  # and a refusal is not kept as an answer


async def test_a_schedule_whose_template_turned_malicious_fails_alone(
    client: Client, stranger: Client, rows: Connection, evaluator: Evaluator, loop: Loop
) -> None:
    assert (await write(client, {"type": "object"})).status_code == 201
    evil = await client.post("/v1/schedules", template="evil", cron=SELDOM, payload_template={"list": MANY})
    honest = await stranger.post("/v1/schedules", template="scripted", cron=SELDOM)
    assert (evil.status_code, honest.status_code) == (201, 201)
    assert (await write(client, costly(), version=2)).status_code == 201
    await rows.execute("UPDATE schedule SET next_run_at = clock_timestamp() - interval '1 second'")
    made, _ = await schedules.fire_due(rows, Templates(pipelines(), evaluator), 60)  # as a worker's scheduler does it
    assert len(made) == 1
    said = (await client.http.get(f"/v1/schedules/{evil.json()['id']}")).json()
    assert said["last_error"]["code"] == "payload_too_complex"
    assert (await stranger.http.get(f"/v1/schedules/{honest.json()['id']}")).json()["last_error"] is None
    problem(await client.http.post(f"/v1/schedules/{said['id']}/run-now"), 409, "not_started")
    changed = await client.http.patch(f"/v1/schedules/{said['id']}", json={"payload_template": {"list": MANY, "n": 1}})
    problem(changed, 422, "payload_too_complex")
    disabled = await client.http.patch(f"/v1/schedules/{said['id']}", json={"enabled": False})
    assert disabled.status_code == 200  # which nothing may stand in the way of
    new = await client.post("/v1/schedules", template="evil", cron=SELDOM, payload_template={"list": MANY})
    problem(new, 422, "payload_too_complex")
    assert loop.worst < LONGEST


async def test_no_connection_is_held_while_payloads_wait_to_be_checked(
    running: Running, client: Client, rows: Connection
) -> None:
    assert (await write(client, costly())).status_code == 201
    made = await client.post("/v1/schedules", template="evil", cron="0 0 1 1 *")
    many = running.services.settings.database_pool_size + 2
    await rows.execute("UPDATE schedule SET payload_template = $1", {"list": MANY})
    now = f"/v1/schedules/{made.json()['id']}/run-now"

    async def attacked(turn: int) -> bool:
        """Whether attacks were waiting whenever others had a connection."""
        attacks = [
            *(asyncio.create_task(client.submit("evil", payload={"list": MANY, "n": n, "x": turn}))
              for n in range(many)),
            *(asyncio.create_task(client.http.post(now)) for _ in range(many)),
        ]  # fmt: skip
        await asyncio.sleep(0.1)
        waited = True
        async with asyncio.timeout(NO_END):
            for _ in range(5):
                assert (await client.http.get("/v1/runs")).status_code == 200
                async with running.services.pool.acquire():
                    waited = waited and not all(attack.done() for attack in attacks)
        await asyncio.gather(*attacks)
        return waited

    for turn in range(3):  # PostgreSQL may stand still while attacks end
        waited = await attacked(turn)
        if waited:
            break
    assert waited


# --- the evaluator itself


async def code_of(evaluator: Evaluator, tenant: str, schema: Any, payload: Any) -> str | None:
    try:
        await evaluator.check(tenant, schema, [orjson.dumps(payload)])
    except Invalid as error:
        return error.code
    return None


async def test_a_tenant_of_cheap_schemas_does_not_wait_for_the_slow_ones_of_another(settings: Settings) -> None:
    # So long that a busy machine, too, answers the cheap questions before two slow ones have ended.
    evaluator = Evaluator(EvaluationLimits.of(settings.model_copy(update={"evaluation_cpu_seconds": 1.0})))
    ended: list[str] = []

    async def ask(tenant: str, schema: Any, payload: Any) -> None:
        await code_of(evaluator, tenant, schema, payload)
        ended.append(tenant)

    cheap = {"anyOf": [{"type": "object"}]}
    await ask("honest", cheap, {})
    await ask("evil", costly(), {"list": [*MANY, 2]})
    for turn in range(1, 4):  # the child that answers the cheap ones may stand still
        ended.clear()
        slow = [asyncio.create_task(ask("evil", costly(), {"list": [*MANY, 4 * turn + n]})) for n in range(4)]
        await asyncio.sleep(0)
        await asyncio.gather(*(ask("honest", cheap, {"n": n}) for n in range(20)))
        before_two_slow_ones = ended[:20].count("honest")
        await cancel_and_wait(*slow)
        if before_two_slow_ones >= 19:
            break
    assert before_two_slow_ones >= 19
    await evaluator.close()


async def test_who_leaves_kills_no_child_and_keeps_the_turn_of_its_tenant(evaluator: Evaluator) -> None:
    await code_of(evaluator, "evil", {"anyOf": [True]}, {})
    process = evaluator._quick._process
    leaving = asyncio.create_task(code_of(evaluator, "evil", {"anyOf": [{"type": "object"}]}, {}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    assert await code_of(evaluator, "evil", {"anyOf": [{"type": "array"}]}, {}) == "invalid_payload"
    assert evaluator._quick._process is process


async def test_a_tenant_whose_only_client_leaves_is_forgotten_once_the_child_has_answered(evaluator: Evaluator) -> None:
    leaving = asyncio.create_task(code_of(evaluator, "evil", {"anyOf": [True]}, {}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    (left,) = evaluator._running
    assert evaluator._tenants.keys() == {"evil"}
    await left
    assert not evaluator._tenants


async def test_a_child_that_needs_too_much_memory_dies_and_the_next_question_is_answered(evaluator: Evaluator) -> None:
    hungry = {"anyOf": [{"enum": ["x" * 1000]}]}
    process = await evaluator._quick._start_if_dead()
    while resource.prlimit(process.pid, resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:  # it is still loading
        await asyncio.sleep(0.01)
    used = int((PROC / str(process.pid) / "statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(process.pid, resource.RLIMIT_AS, (used + 1024 * 1024, used + 1024 * 1024))
    assert await code_of(evaluator, "acme", hungry, {"a": ["y" * 1000] * 200}) == "invalid_payload"
    assert await code_of(evaluator, "acme", hungry, "x" * 1000) is None


async def test_the_child_sees_no_secret_and_holds_no_descriptor_of_its_parent(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEASEHOLD_DATABASE_URL", "postgresql://u:canary@h/d")
    await code_of(evaluator, "acme", {"anyOf": [True]}, {})
    process = evaluator._quick._process
    assert process is not None
    environment = (PROC / str(process.pid) / "environ").read_bytes()
    assert b"canary" not in environment
    assert b"LEASEHOLD" not in environment
    assert sorted(one.name for one in (PROC / str(process.pid) / "fd").iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"},
        {"pattern": "a"},
        {"properties": {"a": {"allOf": []}}},
        {"items": {"uniqueItems": True}},
        {"additionalProperties": {"format": "regex"}},
        {"properties": {"a": {"unevaluatedItems": False}}},
        {"properties": {"a": {"contains": True}}},
    ],
)
def test_only_what_visits_each_value_once_is_checked_in_the_event_loop(schema: Any) -> None:
    assert weight(schema) is None


async def test_the_weight_of_a_flat_schema_and_the_size_of_the_payload_decide_where_it_is_checked(
    evaluator: Evaluator,
) -> None:
    heavy = {"additionalProperties": {"required": [f"name{n}" for n in range(300)]}}
    assert await code_of(evaluator, "acme", heavy, {"a": 1}) is None
    assert evaluator._quick._process is None
    assert await code_of(evaluator, "acme", heavy, {"a": "x" * 2000}) is None
    assert evaluator._quick._process is not None


async def test_reading_a_template_does_not_compile_its_schema() -> None:
    """What was stored before a bound came must stay readable, and cheap to read."""
    body = {"type": "old", "steps": [STEP], "payload_schema": {"type": "nonsense", "$ref": "#"}}
    assert Template.model_validate(body).payload_schema == body["payload_schema"]
