"""What only a person settles, approvals among them; keys with their secrets shown once; the audit, and people."""

from __future__ import annotations

import re
from datetime import datetime, tzinfo
from functools import partial
from html import unescape
from typing import Any, Literal
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel

from leasehold.api.console import assets, overview
from leasehold.api.console.signal_form import Input, inputs_of, payload_of
from leasehold.db import unsettled
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from tests.api.conftest import Running, client_of
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker

_KEY = re.compile(r"lh_[a-z0-9]{12}_[A-Za-z0-9_-]{43}")


async def unknown(maker: Maker) -> UUID:
    """A generation whose provider never answered the order."""
    job_id = await maker.make("generation")
    await maker.lose_order(job_id)
    return job_id


async def test_orders_are_settled_in_bulk_and_each_refusal_is_told(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    somebody = await person(ROLES["operator"])
    one, other = await unknown(maker), await unknown(maker)
    page = await somebody.see("/to-settle")
    assert page.count('name="job"') == 2
    assert "2 of 2 given up." in await somebody.do("/to-settle/settle", job=[str(one), str(other)], action="give_up")
    assert "No order waits for a person." in await somebody.see("/to-settle")
    again = await somebody.do("/to-settle/settle", job=[str(one)], action="again", back="/to-settle")
    assert "0 of 1 ordered again. 1 was refused, because: somebody gave the order up" in again
    acts = await rows.fetch("SELECT target FROM audit WHERE action = 'job.settled'")
    assert {act["target"] for act in acts} == {str(one), str(other)}


async def test_an_order_is_adopted_by_its_id_in_its_row(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody = await person(ROLES["operator"])
    job_id = await unknown(maker)
    without = await somebody.do("/to-settle/settle", job=[str(job_id)], action="adopt", back="/to-settle")
    assert "write the id that it has at the provider into its row" in without
    wrong = await somebody.do(
        "/to-settle/settle", job=[str(job_id)], action="adopt", back="/to-settle", **{f"ref-{job_id}": "/order/17"}
    )
    assert f"Nothing was settled: {job_id}: String should match pattern" in unescape(wrong)
    fields = {f"ref-{job_id}": "order-17", f"ref-{uuid4()}": "another"}
    assert "1 of 1 adopted." in await somebody.do("/to-settle/settle", job=[str(job_id)], action="adopt", **fields)
    assert await rows.fetchval("SELECT ref FROM settlement WHERE job_id = $1", job_id) == "order-17"
    assert "Pick the orders first." in await somebody.do("/to-settle/settle", action="again", back="/to-settle")


async def test_a_viewer_sees_what_waits_and_settles_nothing(person: MakePerson, maker: Maker, rows: Connection) -> None:
    await unknown(maker)
    await rows.execute(
        "INSERT INTO webhook (id, tenant_id, url, events, secrets, enabled, disabled_because)"
        " VALUES ($1, 'acme', 'https://hook.example/', '{job.failed}', '{}', false, 'it failed for a day')",
        uuid4(),
    )
    viewer, operator = await person(ROLES["viewer"]), await person(ROLES["operator"])
    page = await viewer.see("/to-settle")
    assert ("It did not work." in page, 'action="/console/to-settle' in page) == (True, False)
    assert "hook.example" in await viewer.see("/to-settle?what=webhooks")
    assert 'value="true"' not in await viewer.see("/to-settle?what=webhooks")
    assert 'value="true"' in await operator.see("/to-settle?what=webhooks")
    assert "No external step is silent." in await viewer.see("/to-settle?what=external")
    stranger = await person(ROLES["operator"], tenant="other")
    assert "No order waits for a person." in await stranger.see("/to-settle")


async def test_overview_names_what_waits_for_a_person_and_leads_to_it(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "REFRESH_SECONDS", 0)
    viewer, stranger = await person(ROLES["viewer"]), await person(ROLES["viewer"], tenant="other")
    assert "to-settle?what=" not in await viewer.see("/")
    await unknown(maker)
    assert "The outcome of one order is unknown." in await viewer.see("/")
    await unknown(maker)
    page = await viewer.see("/")
    assert ("2 orders have an unknown outcome." in page, "/console/to-settle?what=orders" in page) == (True, True)
    assert "what=external" not in page
    job_id = await maker.make("run")
    await rows.execute("UPDATE job SET external = 1 WHERE id = $1", job_id)
    await rows.execute(
        "UPDATE task SET queue = 'ext:acme:people', available_at = now() - interval '1 day' WHERE job_id = $1", job_id
    )
    page = await viewer.see("/")
    assert "One due step has no external worker." in page
    assert "/console/to-settle?what=external" in page
    assert "to-settle?what=" not in await stranger.see("/")


async def waits(maker: Maker, rows: Connection, schema: dict[str, Any] | None = None) -> UUID:
    """A run whose workflow waits for the signal `approved`."""
    job_id = await maker.make("run", scope="user", scope_id=str(uuid4()))
    await rows.execute(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, value, epoch)"
        " VALUES ($1, '', 1, 'signal', 'approved', 'open', jsonb_build_object('schema', $2::jsonb), 1)",
        job_id, schema,
    )  # fmt: skip
    return job_id


async def test_workflows_that_wait_for_a_signal_are_listed_in_pages(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they have their answer, or have ended."""
    viewer, stranger = await person(ROLES["viewer"]), await person(ROLES["viewer"], tenant="other")
    assert "No workflow waits for a signal." in await viewer.see("/to-settle?what=approvals")
    made = [await waits(maker, rows) for _ in range(3)]
    await rows.execute(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, epoch, due_at)"
        " VALUES ($1, 'b', 1, 'signal', 'other', 'open', 1, now() + interval '1 hour')",
        made[0],
    )
    page = await viewer.see("/to-settle?what=approvals")
    found = re.findall(r'<tr data-href="/console/jobs/([0-9a-f-]{36})"', page)
    assert found == [str(job_id) for job_id in reversed(made)]
    assert '<td class="long">approved, other</td>' in page
    assert str(made[0]) not in await stranger.see("/to-settle?what=approvals")
    without = client_of(str(maker.client.base_url), (await person(frozenset({"jobs:read"}))).key.text)
    async with without:
        assert (await without.get("/v1/unsettled?what=approvals")).json()["items"] == []
        assert (await without.get("/v1/unsettled?what=schedules")).json()["items"] == []
    first = (await maker.client.get("/v1/unsettled?what=approvals&limit=2")).json()
    assert [item["job_id"] for item in first["items"]] == found[:2]
    second = (await maker.client.get(f"/v1/unsettled?what=approvals&limit=2&cursor={first['next_cursor']}")).json()
    assert [(item["job_id"], item["signals"]) for item in second["items"]] == [(found[2], ["approved", "other"])]
    assert (second["items"][0]["until"] is not None, second["next_cursor"]) == (True, None)
    await rows.execute("UPDATE journal SET state = 'done' WHERE job_id = $1", made[1])
    assert (await maker.client.post(f"/v1/jobs/{made[2]}/cancel")).status_code == 202
    page = await viewer.see("/to-settle?what=approvals")
    assert re.findall(r'<tr data-href="/console/jobs/([0-9a-f-]{36})"', page) == [str(made[0])]


async def test_a_search_for_waiting_workflows_goes_on_after_its_bound(
    maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = await waits(maker, rows)
    for number in range(3):
        await maker.make("run", scope="user", scope_id=str(number))
    monkeypatch.setattr(unsettled, "waiting_runs", partial(unsettled.waiting_runs, max_searched=2))
    more, found = "", []
    for _ in range(3):
        page = (await maker.client.get(f"/v1/unsettled?what=approvals{more}")).json()
        found.append([item["job_id"] for item in page["items"]])
        if page["next_cursor"] is None:
            break
        more = f"&cursor={page['next_cursor']}"
    assert found == [[], [str(waiting)], []]


async def test_a_schedule_that_paused_itself_is_resumed_where_it_is_listed(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    viewer, operator = await person(ROLES["viewer"]), await person(ROLES["operator"])
    assert "No schedule has paused itself." in await viewer.see("/to-settle?what=schedules")
    await maker.make("run")
    made = [
        (await maker.client.post("/v1/schedules", json={"template": "outside", "cron": "0 9 * * *"})).json()["id"]
        for _ in range(2)
    ]
    await maker.client.patch(f"/v1/schedules/{made[1]}", json={"enabled": False})  # a person paused this one
    await rows.execute(
        "UPDATE schedule SET enabled = false, paused_because = 'the last 3 runs failed' WHERE id = $1", UUID(made[0])
    )
    page = await viewer.see("/to-settle?what=schedules")
    assert "the last 3 runs failed" in page
    assert made[1] not in page
    assert 'method="post" action="/console/schedules' not in page
    assert f'action="/console/schedules/{made[0]}/change"' in await operator.see("/to-settle?what=schedules")
    assert "The schedule goes on." in await operator.do(f"/schedules/{made[0]}/change", enabled="true")
    assert "No schedule has paused itself." in await viewer.see("/to-settle?what=schedules")


#: Deeper than any JSON here.
DEEP = 64
APPROVAL = {
    "type": "object",
    "title": "Approval",
    "required": ["by", "amount"],
    "properties": {
        "by": {"type": "string", "title": "By"},
        "amount": {"type": "integer"},
        "grade": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        "final": {"type": "boolean"},
    },
}


async def test_a_wait_is_answered_by_its_form_and_a_wrong_answer_says_what_is_wrong(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    somebody, viewer = await person(ROLES["operator"]), await person(ROLES["viewer"])
    job_id = await waits(maker, rows, APPROVAL)
    path = f"/jobs/{job_id}/signals/approved"
    page = await somebody.see(f"/jobs/{job_id}")
    assert re.findall(r'name="(payload[^"]*)"', page) == [
        "payload.by", "payload.amount", "payload.final", "payload.grade"
    ]  # fmt: skip
    seen = await viewer.see(f"/jobs/{job_id}")
    assert ("waits for" in seen, path in seen) == (True, False)
    back = {"back": f"/jobs/{job_id}"}
    wrong = {"payload.by": "anna", "payload.amount": "many"}
    assert "amount: this is not a number." in await somebody.do(path, **wrong, **back)
    assert "integer" in await somebody.do(path, **{"payload.by": "anna", "payload.amount": "1.5"}, **back)
    assert await rows.fetchval("SELECT count(*) FROM signal") == 0
    right = {"payload.by": "anna", "payload.amount": "12", "payload.final": "true", "payload.grade": ""}
    assert "The job has your answer to approved." in await somebody.do(path, **right, once="x", **back)
    await somebody.do(path, **right, once="x", **back)
    sent = await rows.fetch("SELECT payload FROM signal WHERE job_id = $1", job_id)
    assert [row["payload"] for row in sent] == [{"by": "anna", "amount": 12, "final": True}]
    stranger = await person(ROLES["operator"], tenant="other")
    assert (await stranger.send(path, payload="1")).status_code == 404


async def test_an_operator_of_all_tenants_sees_a_wait_and_its_form_only_for_runs_of_his_own_tenant(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """A signal is for the run's tenant to send. The form was there, and its answer was 404."""
    job_id = await waits(maker, rows, APPROVAL)
    for tenant, has_form in (("acme", True), ("other", False)):
        operator = await person(ROLES["admin"], tenant=tenant)
        page = await operator.see(f"/jobs/{job_id}")
        assert ("waits for" in page, f"/jobs/{job_id}/signals/approved" in page) == (True, has_form)


async def test_an_answer_with_a_number_that_cannot_be_kept_exactly_is_refused(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """As the API refuses it. Rounded, the number of an order would be that of another order."""
    somebody = await person(ROLES["operator"])
    huge = "12345678901234567890123"
    for schema, field, text in (
        (APPROVAL, "payload.amount", huge),
        (None, "payload", f'{{"order": {huge}}}'),
    ):
        job_id = await waits(maker, rows, schema)
        answer = {"payload.by": "anna", field: text, "back": f"/jobs/{job_id}"}
        assert "an integer beyond 64 bits" in await somebody.do(f"/jobs/{job_id}/signals/approved", **answer)
    assert await rows.fetchval("SELECT count(*) FROM signal") == 0


async def test_a_choice_is_sent_as_the_schema_has_it(person: MakePerson, maker: Maker, rows: Connection) -> None:
    """Of an option without a value, a browser sends the text with its white space collapsed."""
    somebody = await person(ROLES["operator"])
    choices = ["two  spaces", " before", '<b>"bold"</b>']
    job_id = await waits(maker, rows, {"enum": choices})
    page = await somebody.see(f"/jobs/{job_id}")
    select = page[page.index('name="payload"') :].split("</select>")[0]
    assert [unescape(value) for value in re.findall(r'<option value="([^"]*)">', select)] == ["", *choices]


async def test_each_of_two_waits_for_one_signal_gets_the_answer_that_a_person_gives_it_within_a_minute(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is sent again, even from a page that was opened since, is one answer."""

    class Noon(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Noon:
            return cls(2026, 11, 27, 12, tzinfo=tz)

    monkeypatch.setattr("leasehold.api.console.rendering.datetime", Noon)
    somebody = await person(ROLES["operator"])
    job_id = await waits(maker, rows, {"type": "boolean"})

    async def answer() -> str:
        (once,) = re.findall(r'name="once" value="([^"]+)"', await somebody.see(f"/jobs/{job_id}"))
        return await somebody.do(f"/jobs/{job_id}/signals/approved", payload="true", once=once, back=f"/jobs/{job_id}")

    for number in (2, 3):
        for _ in range(2):
            assert "The job has your answer to approved." in await answer()
        # The workflow consumes the answer, and waits once more.
        assert len(await rows.fetch("DELETE FROM signal WHERE job_id = $1 RETURNING id", job_id)) == 1
        await rows.execute("UPDATE journal SET state = 'done' WHERE job_id = $1", job_id)
        await rows.execute(
            "INSERT INTO journal (job_id, branch, number, kind, name, state, epoch)"
            " VALUES ($1, '', $2, 'signal', 'approved', 'open', 1)",
            job_id, number,
        )  # fmt: skip


def test_a_form_has_the_fields_of_its_schema_or_one_for_json() -> None:
    anything = [Input("", "Payload (JSON)", "json", required=False)]
    assert inputs_of(None) == anything
    assert [one.kind for one in inputs_of({"type": "boolean"})] == ["boolean"]
    assert [one.kind for one in inputs_of({"type": "array", "items": {}})] == ["json"]
    nested = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    assert [one.kind for one in inputs_of(nested)] == ["json"]
    assert payload_of(anything, {"payload": '{"a": [1]}'}, DEEP) == {"a": [1]}
    assert payload_of(anything, {"payload": ""}, DEEP) is None
    assert payload_of(inputs_of({"type": "boolean"}), {"payload": "false"}, DEEP) is False
    text = [Input("a", "A", "text", required=True), Input("b", "B", "text", required=False)]
    assert payload_of(text, {"payload.a": "", "payload.b": ""}, DEEP) == {"a": ""}


class Grading(BaseModel):
    by: str | None
    grade: Literal["a", "b"] | None
    amount: int | None
    final: bool | None
    remark: str | None = None


async def test_an_empty_field_answers_null_where_a_required_member_may_be_null(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """A member that may be left out is left out."""
    somebody = await person(ROLES["operator"])
    job_id = await waits(maker, rows, Grading.model_json_schema())
    page = await somebody.see(f"/jobs/{job_id}")
    assert page.count("may stay empty") == len(Grading.model_fields)
    assert not re.findall(r'name="payload[^>]* required', page)
    empty = {f"payload.{name}": "" for name in Grading.model_fields}
    path, back = f"/jobs/{job_id}/signals/approved", f"/jobs/{job_id}"
    assert "The job has your answer to approved." in await somebody.do(path, **empty, once="x", back=back)
    full = {"by": "anna", "grade": "a", "amount": "0", "final": "false"}
    answer = empty | {f"payload.{name}": value for name, value in full.items()}
    assert "The job has your answer to approved." in await somebody.do(path, **answer, once="y", back=back)
    sent = [
        row["payload"] for row in await rows.fetch("SELECT payload FROM signal WHERE job_id = $1 ORDER BY id", job_id)
    ]
    assert sent == [
        {"by": None, "grade": None, "amount": None, "final": None},
        {"by": "anna", "grade": "a", "amount": 0, "final": False},
    ]


def test_a_field_with_one_option_that_is_not_null_must_be_filled_in() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"anyOf": [{"type": "integer"}]}}}
    assert inputs_of(schema) == [Input("n", "n", "integer", required=True)]
    assert payload_of(inputs_of(schema), {"payload.n": ""}, DEEP) == {}


async def test_a_keys_secret_is_shown_once_and_the_key_works(
    person: MakePerson, running: Running, rows: Connection
) -> None:
    admin = await person(ROLES["admin"])
    made = await admin.send("/keys/new", client_id="billing", role="viewer", days="30")
    (text,) = set(_KEY.findall(made.text))
    assert (made.status_code, made.headers["cache-control"]) == (200, "no-store")
    assert text.split("_", 2)[2] not in str(made.headers)
    async with client_of(running.url, text) as billing:
        assert (await billing.get("/v1/jobs")).status_code == 200
    prefix = text.split("_")[1]
    page = await admin.see("/keys")
    assert ("billing" in page, text.split("_", 2)[2] in page) == (True, False)
    rotated = await admin.send(f"/keys/{prefix}/rotate", hours="1")
    assert "It ends <time" in rotated.text
    successor = _KEY.findall(rotated.text)[0].split("_")[1]
    assert f"lh_{successor} has its end set." in await admin.do(f"/keys/{successor}/expire", days="2")
    assert f"lh_{prefix} is revoked." in await admin.do(f"/keys/{prefix}/revoke")
    acts = [
        row["action"] for row in await rows.fetch("SELECT action FROM audit WHERE target_kind = 'key' ORDER BY seq")
    ]
    assert acts == ["key.created", "key.rotated", "key.expired", "key.revoked"]
    weaker = await person(ROLES["admin"] - {"fleet:operate"})
    refused = await weaker.do("/keys/new", client_id="x", scopes="fleet:operate", role="", back="/keys")
    assert "You can only give scopes that you have" in refused


async def test_the_audit_says_who_did_what(person: MakePerson, maker: Maker) -> None:
    admin = await person(ROLES["admin"])
    job_id = await maker.make("run")
    await admin.do(f"/jobs/{job_id}/cancel", reason="enough of it")
    page = await admin.see("/audit?actor=somebody&action=job.cancelled")
    assert (f'href="/console/jobs/{job_id}"' in page, "enough of it" in page, "unbroken" in page) == (True, True, True)
    assert "No act matches." in await admin.see("/audit?action=job.deleted")
    assert "No act matches." in await admin.see("/audit?until=2020-01-01")
    assert "A time is written as" in await admin.see("/audit?since=yesterday", 422)
    stranger = await person(ROLES["admin"] - {"fleet:operate"}, tenant="other")
    assert str(job_id) not in await stranger.see("/audit?tenant=acme")


async def test_a_chain_that_somebody_changed_is_shown_as_broken(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the newest rows are checked."""
    monkeypatch.setattr("leasehold.api.console.audit.MAX_CHECKED", 3)
    admin, other = await person(ROLES["admin"]), await person(ROLES["admin"])
    for _ in range(4):
        job_id = await maker.make("run", scope="user", scope_id=str(uuid4()))
        await admin.do(f"/jobs/{job_id}/cancel")
    assert "the newest 3 are as they were written" in await admin.see("/audit?tenant=acme")
    await rows.execute("UPDATE audit SET actor = 'nobody' WHERE tenant_id = 'acme' AND target = $1", str(job_id))
    page = await other.see("/audit?tenant=acme")
    assert "unbroken" in page  # the answer of a moment ago is shared
    monkeypatch.setattr("leasehold.api.console.shared.monotonic", lambda: 1e12)
    seq = await rows.fetchval("SELECT seq FROM audit WHERE actor = 'nobody'")
    broken = f"is broken</b> at row {seq}: its content is not what was written"
    assert broken in await admin.see("/audit?tenant=acme")


async def test_pages_of_many_keys_and_people_stay_light(person: MakePerson, rows: Connection) -> None:
    admin = await person(ROLES["admin"])
    for number in range(60):
        await create_key(rows, tenant_id="acme", client_id=f"client-{number:03}", scopes=["role:viewer"])
    await rows.execute(
        "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes)"
        " SELECT gen_random_uuid(), 'acme', 'https://id.example', n::text, 'p' || n, 'P', '{role:viewer}'"
        " FROM generate_series(1, 300) n"
    )
    files = sum(len(assets.content(name)) for name in assets.FILES)
    pages = [await admin.see("/keys")]
    while (link := re.search(r'rel="next" href="/console(/keys[^"]*)"', pages[-1])) is not None:
        pages.append(await admin.see(unescape(link[1])))
    assert [page.count(">active<") for page in pages] == [25, 25, 11]
    people = await admin.see("/people")
    assert people.count(">viewer</span>") == 25
    assert max(len(page.encode()) for page in (pages[0], people)) + files < 150_000
