"""Templates: a version never changes, and a wrong one is refused when it is written."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from leasehold import App, Context
from leasehold.db.database import Connection
from leasehold.domain.errors import Invalid
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.template import Template
from leasehold.evaluation.templates import Templates
from leasehold.limits.bounds import lock_additions
from leasehold.pipelines import RESERVED_NAMES, RESERVED_QUEUES
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.media_api import problem
from tests.runs.conftest import SECONDS, Client, step_of
from tests.support.lock_waits import until_waiting

STEP = {"id": "only", "worker_type": "external", "queue": "q"}


async def test_a_version_is_written_once_read_and_disabled(client: Client, stranger: Client) -> None:
    body = {"type": "report", "name": "A report", "steps": [STEP], "payload_schema": {"required": ["n"]}}
    assert (await client.post("/v1/templates", **body)).headers["location"] == "/v1/templates/report/1"
    problem(await client.post("/v1/templates", **body), 409, "template_exists")
    assert (await client.post("/v1/templates", **(body | {"version": 2}))).status_code == 201
    said = (await client.http.get("/v1/templates/report/1")).json()
    assert (said["name"], said["enabled"], said["source"]) == ("A report", True, "api")
    problem(await stranger.http.get("/v1/templates/report/1"), 404, "template_not_found")
    run = (await client.submit("report", payload={"n": 1})).json()
    assert run["version"] == 2  # the newest enabled one
    await client.http.patch("/v1/templates/report/2", json={"enabled": False})
    assert (await client.submit("report", payload={"n": 1})).json()["version"] == 1
    problem(await client.submit("report", version=2, payload={"n": 1}), 409, "template_disabled")
    assert (await client.look(run["id"]))["version"] == 2  # a run keeps the version that it started with


async def test_templates_of_code_are_listed_and_cannot_be_overwritten(client: Client) -> None:
    listed = (await client.http.get("/v1/templates")).json()["templates"]
    code = {one["type"]: one for one in listed if one["source"] == "code"}
    assert code["scripted"]["payload_schema"]["properties"]["number"]["type"] == "integer"
    assert [step["id"] for step in code["branches"]["steps"]] == ["top", "left", "right", "bottom"]
    problem(await client.post("/v1/templates", type="scripted", steps=[STEP]), 409, "template_reserved")
    problem(await client.http.patch("/v1/templates/scripted/1", json={"enabled": False}), 409, "template_reserved")


async def test_a_tenant_s_template_whose_name_a_pipeline_for_no_client_took_later_is_still_its_own(
    client: Client, rows: Connection
) -> None:
    await client.post("/v1/templates", type="mine", steps=[STEP])
    await rows.execute(  # as a release wrote it that had no pipeline of this name
        "UPDATE template SET type = $1::text, declaration = declaration || jsonb_build_object('type', $1::text)",
        "bulk_operation",
    )
    for enabled in (False, True):
        answer = await client.http.patch("/v1/templates/bulk_operation/1", json={"enabled": enabled})
        assert (answer.status_code, answer.json()["enabled"]) == (200, enabled)
    assert (await client.submit("bulk_operation")).status_code == 202
    problem(
        await client.post("/v1/templates", type="bulk_operation", version=2, steps=[STEP]), 409, "template_reserved"
    )


@pytest.mark.parametrize("limit", [1, 3, 1000])
async def test_a_list_of_templates_continues_until_every_version_was_listed_once(client: Client, limit: int) -> None:
    names = ["b-2", "a_1", "a-1", "zz", "scripted-too"]  # a language's order has other places for these marks
    for name in names:
        for version in (1, 2):
            body = {"type": name, "version": version, "steps": [STEP]}
            assert (await client.post("/v1/templates", **body)).status_code == 201
    everything = (await client.http.get("/v1/templates")).json()
    assert everything["next_cursor"] is None
    versions = [(one["type"], -one["version"]) for one in everything["templates"]]
    assert (versions, {name for name, _ in versions} >= {*names, "scripted"}) == (sorted(versions), True)
    for path, expected in (
        ("/v1/templates", versions),
        ("/v1/templates/zz", [("zz", -2), ("zz", -1)]),
    ):
        listed, cursor = [], None
        while True:
            params = {"limit": limit} | ({} if cursor is None else {"cursor": cursor})
            page = (await client.http.get(path, params=params)).json()
            assert len(page["templates"]) <= limit
            listed += [(one["type"], -one["version"]) for one in page["templates"]]
            if (cursor := page["next_cursor"]) is None:
                break
        assert listed == expected
    for cursor in ("x", "A" * 87, "Ä" * 88):
        problem(await client.http.get("/v1/templates", params={"cursor": cursor}), 422, "invalid_cursor")
    for cursor in ("_" * 88, "A" * 88):  # of the right length and alphabet: some place of the list
        assert (await client.http.get("/v1/templates", params={"cursor": cursor})).status_code == 200


async def test_a_version_that_this_release_cannot_read_is_disabled_and_not_enabled(
    client: Client, rows: Connection
) -> None:
    for version in (1, 2):
        await client.post("/v1/templates", type="mine", version=version, steps=[STEP])
    await rows.execute("UPDATE template SET declaration = '{\"steps\": 7}' WHERE version = 2")
    problem(await client.submit("mine"), 409, "template_unreadable")
    answer = await client.http.patch("/v1/templates/mine/2", json={"enabled": False})
    assert (answer.status_code, answer.json()) == (
        200, {"type": "mine", "version": 2, "enabled": False, "source": "api"},
    )  # fmt: skip
    assert (await client.submit("mine")).json()["version"] == 1
    problem(await client.http.patch("/v1/templates/mine/2", json={"enabled": True}), 409, "template_unreadable")
    assert await rows.fetchval("SELECT enabled FROM template WHERE version = 2") is False
    listed = [(await client.http.get("/v1/templates/mine", params={"limit": 1})).json()]
    listed.append((await client.http.get("/v1/templates/mine", params={"cursor": listed[0]["next_cursor"]})).json())
    assert [[one["version"] for one in page["templates"]] for page in listed] == [[], [1]]


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_template_is_listed_also_where_this_release_reads_none_of_the_first_versions(
    client: Client, rows: Connection, enabled: bool
) -> None:
    """Not found is only a template without any version."""
    for version in (1, 2):
        await client.post("/v1/templates", type="mine", version=version, steps=[STEP])
    await rows.execute("UPDATE template SET declaration = '{\"steps\": 7}', enabled = $1 WHERE version = 2", enabled)
    page = (await client.http.get("/v1/templates/mine", params={"limit": 1})).json()
    assert page["templates"] == []
    page = (await client.http.get("/v1/templates/mine", params={"cursor": page["next_cursor"]})).json()
    assert [one["version"] for one in page["templates"]] == [1]
    await rows.execute("UPDATE template SET declaration = '{\"steps\": 7}', enabled = $1", enabled)
    answer = await client.http.get("/v1/templates/mine")
    assert (answer.status_code, answer.json()) == (200, {"templates": [], "next_cursor": None})
    problem(await client.http.get("/v1/templates/others"), 404, "template_not_found")


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
async def test_the_names_of_shipped_work_are_reserved_whatever_the_process_has(client: Client, name: str) -> None:
    problem(await client.post("/v1/templates", type=name, steps=[STEP]), 409, "template_reserved")


@pytest.mark.parametrize(
    "body",
    [
        {"steps": []},
        {"steps": [STEP, STEP]},
        {"steps": [STEP | {"needs": ["nobody"]}]},
        {"steps": [{"id": "a", "needs": ["b"]}, {"id": "b", "needs": ["a"]}]},
        {"type": "NO NAME"},
        {"payload_schema": {"type": "nonsense"}},
        {"payload_schema": {"$ref": "http://127.0.0.1:1/schema"}},
        {"payload_schema": {"description": "x" * 70_000}},
        {"steps": [STEP | {"worker_type": "rm -rf"}]},
        {"steps": [STEP | {"skip_if": {"pointer": "no pointer"}}]},
        {"retry_policy": {"max_attempts": 0}},
        {"unknown": 1},
    ],
)
async def test_a_template_that_cannot_work_is_refused(client: Client, body: dict[str, Any]) -> None:
    answer = await client.post("/v1/templates", **({"type": "report", "steps": [STEP]} | body))
    problem(answer, 422, "invalid_request")


@pytest.mark.parametrize("handler", ["nobody.nothing", "scripted.nothing", "isolated.count", "spread.piece"])
async def test_a_handler_that_is_not_offered_is_refused(client: Client, handler: str) -> None:
    answer = await client.post("/v1/templates", type="report", steps=[STEP | {"worker_type": handler}])
    problem(answer, 422, "unknown_worker_type")


@pytest.mark.parametrize("queue", sorted(RESERVED_QUEUES))
async def test_no_handler_of_a_template_runs_in_a_queue_of_the_platforms_own_work(client: Client, queue: str) -> None:
    """There it would take the slots of everybody's deliveries, bulk operations and conversions."""
    step = STEP | {"worker_type": "scripted.first", "queue": queue}
    first = STEP | {"id": "before", "worker_type": "scripted.first", "queue": "default"}
    problem(await client.post("/v1/templates", type="mine", steps=[first, step]), 422, "queue_reserved")
    assert (await client.post("/v1/templates", type="mine", steps=[first])).status_code == 201
    outside = step | {"worker_type": "external"}  # of the tenant's own workers: the queue is another one
    assert (await client.post("/v1/templates", type="outside", steps=[outside])).status_code == 201


def test_the_reserved_queues_are_those_of_the_shipped_kinds() -> None:
    assert {"conversion", "generation", "media", "operations", "webhooks"} == RESERVED_QUEUES


async def test_a_template_that_names_such_a_queue_since_an_earlier_release_still_runs(
    client: Client, rows: Connection
) -> None:
    step = STEP | {"worker_type": "scripted.first", "queue": "default"}
    await client.post("/v1/templates", type="mine", steps=[step])
    await rows.execute("UPDATE template SET declaration = jsonb_set(declaration, '{steps,0,queue}', '\"webhooks\"')")
    run = await client.start("mine")
    assert (await client.look(run))["progress"]["steps"][0]["queue"] == "webhooks"


async def test_the_queue_of_a_pipeline_with_slots_of_its_own_serves_this_pipeline_alone() -> None:
    alone = Pipeline("alone", module="", steps=[Step("wait", queue="slow")], slots="webhook_slots")
    templates = Templates(Pipelines(alone, Pipeline("other", module="", steps=[Step("do")])))
    step = STEP | {"worker_type": "other.do"}
    with pytest.raises(Invalid) as refused:
        await templates.check("acme", Template.model_validate({"type": "mine", "steps": [step | {"queue": "slow"}]}))
    assert refused.value.code == "queue_reserved"
    await templates.check("acme", Template.model_validate({"type": "mine", "steps": [step | {"queue": "quick"}]}))


async def test_a_step_of_code_that_external_workers_do_is_no_handler_and_is_refused() -> None:
    steps = [Step("ask", external=True), Step("answer")]
    templates = Templates(Pipelines(Pipeline("outside", module="", steps=steps)))
    mine = [Template.model_validate({"type": "mine", "steps": [STEP | {"worker_type": f"outside.{step.name}"}]})
            for step in steps]  # fmt: skip
    await templates.check("acme", mine[1])
    with pytest.raises(Invalid) as refused:  # otherwise the step would wait for ever: no worker has code of it
        await templates.check("acme", mine[0])
    assert refused.value.code == "unknown_worker_type"


async def test_two_workflows_in_a_template_are_refused_also_when_it_is_stored_already(rows: Connection) -> None:
    """A run has one journal: the second workflow would take the results of the first one's calls, and run nothing."""
    code = App("code")

    @code.workflow
    async def listens(ctx: Context) -> None:
        await ctx.wait_for("go")

    @code.task
    async def works() -> None: ...

    templates = Templates(code.pipelines())
    step, after = (STEP | {"id": name, "worker_type": "code.listens.run", "queue": "default"} for name in "ab")
    one, two = (
        Template.model_validate({"type": "mine", "version": version, "steps": steps})
        for version, steps in enumerate([[step, after | {"worker_type": "code.works.run"}], [step, after]], start=1)
    )
    await templates.check("acme", one)
    with pytest.raises(Invalid) as refused:
        await templates.check("acme", two)
    assert refused.value.code == "two_workflows"
    for template in (one, two):
        await templates.write(rows, "acme", template)
    assert (await templates.find_usable(rows, "acme", "mine", 1)).template == one
    for usable in (templates.find_usable, templates.find_for_rerun, templates.find_schedulable):
        with pytest.raises(Invalid) as refused:
            await usable(rows, "acme", "mine", 2)
        assert refused.value.code == "two_workflows"


async def test_a_payload_is_checked_by_the_template_and_the_path_is_named(client: Client) -> None:
    schema = {"type": "object", "properties": {"who": {"type": "array", "items": {"type": "string"}}}}
    await client.post("/v1/templates", type="letter", steps=[STEP], payload_schema=schema)
    said = problem(await client.submit("letter", payload={"who": ["me", 7]}), 422, "invalid_payload")
    assert "/who/1" in said["detail"]
    problem(await client.submit("letter", payload={"who": ["x" * 300_000]}), 422, "payload_too_large")


async def test_a_pattern_made_to_blow_up_takes_no_time(client: Client) -> None:
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    await client.post("/v1/templates", type="evil", steps=[STEP], payload_schema=schema)
    problem(await client.submit("evil", payload={"a": "a" * 5000 + "!"}), 422, "invalid_payload")


async def test_steps_of_a_template_run_beside_each_other_and_skip_as_declared(client: Client, worker: Worker) -> None:
    inside = {"worker_type": "scripted.second"}
    steps = [
        {"id": "a", **inside},
        {"id": "b", "needs": ["a"], "skip_if": {"pointer": "/quick"}, **inside},
        {"id": "c", "needs": ["a"], **inside},
        {"id": "d", "needs": ["b", "c"], **inside},
    ]
    assert (await client.post("/v1/templates", type="diamond", steps=steps)).status_code == 201
    schema_of_code = {"do": "finish"}
    said = await client.until(await client.start("diamond", payload=schema_of_code), "succeeded")
    assert [step["status"] for step in said["progress"]["steps"]] == ["succeeded"] * 4
    problem(await client.submit("diamond-of-nothing", payload={}), 404, "template_not_found")


@pytest.mark.parametrize(
    ("handler", "do"), [("scripted.first", "fail always"), ("scripted.second", "let a CancelledError out")]
)
@pytest.mark.parametrize("of_step", [True, False], ids=["the step's", "the template's"])
async def test_a_step_that_the_platform_does_is_tried_again_by_the_retry_policy_and_not_by_its_code(
    client: Client, worker: Worker, rows: Connection, of_step: bool, handler: str, do: str
) -> None:
    """The code waits for 10 ms before each attempt, and that of `scripted.first` allows two attempts."""
    policy = {"max_attempts": 3, "backoff_seconds": [0, 7200]}
    step = {"id": "only", "worker_type": handler}
    declared = {"steps": [step | {"retry": policy}]} if of_step else {"steps": [step], "retry_policy": policy}
    assert (await client.post("/v1/templates", type="patient", **declared)).status_code == 201
    run = await client.start("patient", payload={"do": do})
    async with asyncio.timeout(SECONDS):
        while step_of(said := await client.look(run), "only")["attempt"] < 2:
            await asyncio.sleep(0.02)
    said = await client.until_step(run, "only", "retry")
    assert step_of(said, "only")["attempt"] == 2
    waits_long = "SELECT available_at > clock_timestamp() + interval '30 minutes' FROM task WHERE job_id = $1"
    assert await rows.fetchval(waits_long, UUID(run))


@pytest.mark.parametrize("template", ["spreading", "spread"])
async def test_the_parts_of_a_step_are_tried_again_by_their_code(
    client: Client, runs_settings: Settings, rows: Connection, template: str
) -> None:
    """A template declares no parts. Also not one in code, of which an earlier release submitted the run."""
    policy = {"max_attempts": 1, "backoff_seconds": [7200]}
    steps = [{"id": "only", "worker_type": "spread.gather", "retry": policy}]
    assert (await client.post("/v1/templates", type="spreading", version=7, steps=steps)).status_code == 201
    run = UUID(await client.start(template, payload={"do": "fail pieces", "number": 1}))
    await rows.execute("UPDATE job SET pipeline_version = 7 WHERE id = $1", run)
    soon = (
        "SELECT available_at < clock_timestamp() + interval '30 minutes' FROM task"
        " WHERE job_id = $1 AND status = 'retry'"
    )
    async with Worker(runs_settings), asyncio.timeout(SECONDS):
        while (is_soon := await rows.fetchval(soon, run)) is None:
            await asyncio.sleep(0.02)
    assert is_soon


async def test_a_template_says_whether_its_runs_are_repeated(client: Client) -> None:
    once: dict[str, Any] = {"type": "once", "steps": [STEP], "repeatable": False}
    assert (await client.post("/v1/templates", **once)).status_code == 201
    run = await client.start("once")
    await client.post(f"/v1/runs/{run}/cancel")
    problem(await client.post(f"/v1/runs/{run}/rerun"), 409, "not_repeatable")


async def test_a_template_says_whether_its_runs_are_scheduled_also_to_the_schedules_it_has(client: Client) -> None:
    """A schedule that names no version follows the newest: it fires no more once that one forbids it."""
    body: dict[str, Any] = {"type": "report", "steps": [STEP]}
    schedule = {"template": "report", "cron": "0 9 * * *", "timezone": "UTC", "payload_template": {}}
    assert (await client.post("/v1/templates", **body)).status_code == 201
    made = await client.post("/v1/schedules", **schedule)
    assert made.status_code == 201, made.text
    path = f"/v1/schedules/{made.json()['id']}"
    assert (await client.post(f"{path}/run-now")).status_code == 202
    assert (await client.post("/v1/templates", **body, version=2, schedulable=False)).status_code == 201
    problem(await client.post("/v1/schedules", **schedule), 409, "not_schedulable")
    problem(await client.post(f"{path}/run-now"), 409, "not_started")
    assert (await client.http.get(path)).json()["last_error"]["code"] == "not_schedulable"
    assert len((await client.http.get("/v1/runs", params={"template": "report"})).json()["runs"]) == 1


async def test_a_version_that_nothing_uses_is_deleted(client: Client, rows: Connection) -> None:
    """And makes room for another where the tenant has as many as it may."""
    for version in (1, 2):
        assert (await client.post("/v1/templates", type="mine", version=version, steps=[STEP])).status_code == 201
    at = "/v1/templates/mine"
    run = (await client.submit("mine")).json()["id"]
    problem(await client.http.delete(f"{at}/2"), 409, "template_in_use")
    await client.http.post(f"/v1/runs/{run}/cancel")
    schedule = {"template": "mine", "cron": "0 0 1 1 *"}
    newest = (await client.post("/v1/schedules", **schedule)).json()["id"]
    second = (await client.post("/v1/schedules", **schedule, version=2)).json()["id"]
    problem(await client.http.delete(f"{at}/2"), 409, "template_in_use")
    await client.http.patch(f"{at}/2", json={"enabled": False})
    problem(await client.http.delete(f"{at}/1"), 409, "template_in_use")  # no other is enabled, and a schedule runs it
    await client.http.patch(f"{at}/2", json={"enabled": True})
    assert (await client.http.delete(f"{at}/1")).status_code == 204
    await client.http.delete(f"/v1/schedules/{second}")
    problem(await client.http.delete(f"{at}/2"), 409, "template_in_use")  # it is the last: the other schedule runs it
    await client.http.delete(f"/v1/schedules/{newest}")
    assert (await client.http.delete(f"{at}/2")).status_code == 204
    problem(await client.http.delete(f"{at}/2"), 404, "template_not_found")
    problem(await client.http.get(at), 404, "template_not_found")
    assert (await client.http.get(f"/v1/runs/{run}")).json()["status"] == "cancelled"
    in_code = (await client.http.get("/v1/templates")).json()["templates"][0]
    assert in_code["source"] == "code"
    problem(await client.http.delete(f"/v1/templates/{in_code['type']}/1"), 409, "template_reserved")
    acts = await rows.fetch("SELECT target FROM audit WHERE action = 'template.deleted' ORDER BY seq")
    assert [act["target"] for act in acts] == ["mine/1", "mine/2"]


async def test_a_deleted_version_never_returns(client: Client, stranger: Client) -> None:
    """Else the rerun of a run would find other steps under the version that the run names."""
    body: dict[str, Any] = {"type": "mine", "steps": [STEP]}
    for version in (1, 2, 4):
        assert (await client.post("/v1/templates", **body, version=version)).status_code == 201
    run = (await client.submit("mine", version=4)).json()["id"]
    await client.http.post(f"/v1/runs/{run}/cancel")
    for version in (4, 1):
        assert (await client.http.delete(f"/v1/templates/mine/{version}")).status_code == 204
    for version in (1, 3, 4):
        refused = await client.post("/v1/templates", **body, version=version)
        problem(refused, 409, "template_version_used")
        assert "Version 4 was deleted" in refused.text
    problem(await client.http.post(f"/v1/runs/{run}/rerun"), 404, "template_not_found")
    assert (await client.post("/v1/templates", **body, version=5)).status_code == 201
    assert (await client.post("/v1/templates", type="other", steps=[STEP])).status_code == 201
    assert (await stranger.post("/v1/templates", **body)).status_code == 201  # of another tenant


async def test_a_failed_run_whose_version_was_deleted_is_not_retried_and_keeps_its_failure(
    client: Client, rows: Connection
) -> None:
    assert (await client.post("/v1/templates", type="mine", steps=[STEP])).status_code == 201
    run = await client.start("mine")
    failed = {"code": "x", "message": "y"}
    await rows.execute("UPDATE job SET status = 'failed', error = $1, finished_at = clock_timestamp()", failed)
    step = await rows.fetchval("UPDATE task SET status = 'failed', finished_at = clock_timestamp() RETURNING id")
    assert (await client.http.delete("/v1/templates/mine/1")).status_code == 204
    for path in (f"/v1/runs/{run}/retry", f"/v1/dead-letters/{step}/replay"):
        problem(await client.http.post(path), 404, "template_not_found")
    assert (await client.look(run))["error"]["code"] == "x"


@pytest.mark.parametrize("commits", [True, False])
async def test_a_version_that_is_written_while_it_is_deleted_waits_and_does_not_return(
    client: Client, rows: Connection, commits: bool
) -> None:
    body: dict[str, Any] = {"type": "mine", "steps": [STEP]}
    assert (await client.post("/v1/templates", **body)).status_code == 201
    tenant = await rows.fetchval("SELECT tenant_id FROM template WHERE type = 'mine'")
    transaction = rows.transaction()
    await transaction.start()
    await lock_additions(rows, "template", tenant)
    await Templates(Pipelines()).delete(rows, tenant, "mine", 1)
    writing = asyncio.create_task(client.post("/v1/templates", **body))
    await until_waiting(rows, kind="advisory")
    await (transaction.commit() if commits else transaction.rollback())
    problem(await writing, 409, "template_version_used" if commits else "template_exists")


async def test_a_schedule_that_is_made_while_its_version_is_deleted_finds_none(
    client: Client, rows: Connection
) -> None:
    assert (await client.post("/v1/templates", type="mine", steps=[STEP])).status_code == 201
    tenant = await rows.fetchval("SELECT tenant_id FROM template WHERE type = 'mine'")
    transaction = rows.transaction()
    await transaction.start()
    await lock_additions(rows, "schedule", tenant)
    await Templates(Pipelines()).delete(rows, tenant, "mine", 1)
    making = asyncio.create_task(client.post("/v1/schedules", template="mine", cron="0 0 1 1 *", version=1))
    await until_waiting(rows, kind="advisory")
    await transaction.commit()
    problem(await making, 404, "template_not_found")


@pytest.mark.parametrize("thing", ["template", "schedule"])
async def test_a_deletion_waits_for_what_is_written_beside_it(client: Client, rows: Connection, thing: Any) -> None:
    """A schedule that commits meanwhile is seen by the deletion, and keeps the version."""
    assert (await client.post("/v1/templates", type="mine", steps=[STEP])).status_code == 201
    schedule = (await client.post("/v1/schedules", template="mine", cron="0 0 1 1 *", version=1)).json()["id"]
    tenant = await rows.fetchval("SELECT tenant_id FROM template WHERE type = 'mine'")
    await rows.execute("UPDATE schedule SET version = 2 WHERE id = $1", UUID(schedule))
    transaction = rows.transaction()
    await transaction.start()
    await lock_additions(rows, thing, tenant)
    await rows.execute("UPDATE schedule SET version = 1 WHERE id = $1", UUID(schedule))
    deleting = asyncio.create_task(client.http.delete("/v1/templates/mine/1"))
    await until_waiting(rows, kind="advisory")
    await transaction.commit()
    problem(await deleting, 409, "template_in_use")
