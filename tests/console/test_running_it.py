"""The pages from which an installation is run: queues, workers, limits, schedules, templates, webhooks, keys."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leasehold.api.console import people, schedules
from leasehold.cli.main import app
from leasehold.db import overview_reads
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.security.credentials import revoke_key
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker

_ONCE = re.compile(r'name="once" value="([^"]+)"')


async def test_a_queue_is_paused_with_a_reason_and_goes_on(person: MakePerson, maker: Maker, rows: Connection) -> None:
    admin = await person()
    await maker.make("media")
    page = await admin.see("/queues")
    assert re.search(r'media</a></td>\n<td class="n" data-label="waiting">1</td>', page)
    assert '<span class="late">none</span>' in page
    page = await admin.do("/queues/media/pause", reason="the disk is <full>")
    assert "The queue media is paused." in page
    assert "the disk is &lt;full&gt;" in page
    assert await rows.fetchval("SELECT reason FROM paused_queue WHERE queue = 'media'") == "the disk is <full>"
    assert "The queue media goes on." in await admin.do("/queues/media/resume")
    assert await rows.fetchval("SELECT count(*) FROM paused_queue") == 0


async def test_the_queue_of_a_tenant_with_a_slash_in_its_name_is_paused_and_goes_on(
    person: MakePerson, rows: Connection
) -> None:
    admin = await person()
    await rows.execute("INSERT INTO paused_queue (queue, reason) VALUES ('ext:a/b:gpu', 'a look')")
    form = re.search(r'action="/console(/queues/[^"]+/resume)"', await admin.see("/queues"))
    assert form is not None
    assert "The queue ext:a/b:gpu goes on." in await admin.do(form[1])
    assert await rows.fetchval("SELECT count(*) FROM paused_queue") == 0
    assert "The queue ext:a/b:gpu is paused." in await admin.do(form[1].replace("/resume", "/pause"), reason="x")
    assert await rows.fetchval("SELECT queue FROM paused_queue") == "ext:a/b:gpu"


async def test_a_worker_is_drained(person: MakePerson, rows: Connection) -> None:
    admin, worker_id = await person(), new_id()
    await rows.execute(
        "INSERT INTO worker (id, present, host, pid, version, queues, pool)"
        " VALUES ($1, false, 'box-7', 41, '0', '{a,a@gpu,b,b@gpu}', 'models')",
        worker_id,
    )
    page = await admin.see("/workers")
    assert "box-7:41" in page
    assert re.search(r">models</td><td[^>]*>a, b <small[^>]*>gpu</small></td>", page)
    assert '<span class="state draining">' in await admin.do(f"/workers/{worker_id}/drain")
    assert (await admin.send(f"/workers/{new_id()}/drain")).status_code == 404


async def test_limits_show_who_fills_them(person: MakePerson, maker: Maker, rows: Connection) -> None:
    admin = await person()
    assert "No limit is declared." in await admin.see("/limits")
    assert "is set." in await admin.do("/limits/set", tenant="acme", key="tenant", at_most="1")
    for number in range(3):
        await maker.make("run", scope="user", scope_id=str(number))
    page = await admin.see("/limits")
    assert re.search(r'tenant</code></a></td><td>acme</td><td class="n">1</td>', page)
    assert re.search(r'<td class="n">1</td><td class="n"><span class="late">2</span></td>', page)
    for wrong in ({"key": "nothing", "at_most": "1"}, {"key": "tenant"}, {"key": "tenant", "at_most": "-1"}):
        answer = await admin.send("/limits/set", tenant="acme", **wrong)
        assert answer.status_code == 422, wrong
    assert "is lifted." in await admin.do("/limits/lift", tenant="acme", key="tenant")
    assert await rows.fetchval("SELECT count(*) FROM gate_job WHERE admitted_at IS NULL") == 0


async def test_a_queue_shows_its_limits_and_who_fills_them(person: MakePerson, maker: Maker) -> None:
    admin = await person()
    await admin.do("/limits/set", tenant="*", key="queue:media", at_most="2", per_minute="60")
    for _ in range(3):
        await maker.make("media")
    page = re.sub(r"<[^>]+>", "", await admin.see("/queues"))
    assert "limit: 2 at once, 60 a minute; 2 inside, 1 waiting" in page
    assert page.count("inside,") == 1


async def test_a_schedule_shows_its_firings_and_is_run_paused_and_changed(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    operator = await person(ROLES["operator"])
    await maker.make("run")
    body = {"template": "outside", "cron": "30 9 * * 1-5", "timezone": "Europe/Berlin", "overlap": "allow_all"}
    schedule = (await maker.client.post("/v1/schedules", json=body | {"scope": "user", "scope_id": "s"})).json()
    path = f"/schedules/{schedule['id']}"
    assert "At 09:30 on Monday through Friday" in await operator.see("/schedules")
    page = await operator.see(path)
    assert len(re.findall(r"09:30 CES?T", page)) == 5
    assert f"{datetime.fromisoformat(schedule['next_runs'][4]):%Y-%m-%d %H:%M:%S} UTC" in page
    once = _ONCE.findall(page)[0]
    first = await operator.send(f"{path}/run-now", once=once)
    second = await operator.send(f"{path}/run-now", once=once)  # a double click
    assert first.headers["location"] == second.headers["location"]
    assert await rows.fetchval("SELECT count(*) FROM run WHERE schedule_id = $1", schedule["id"]) == 1
    assert first.headers["location"].removeprefix("/console") in await operator.see(path)
    assert "The schedule is paused." in await operator.do(f"{path}/change", enabled="false")
    assert "None while it is paused." in await operator.see(path)
    page = await operator.do(f"{path}/change", cron="0 3 * * *", timezone="UTC")
    assert "At 03:00 every day" in page
    assert "The schedule goes on." in await operator.do(f"{path}/change", enabled="true")
    for wrong in ({"cron": "61 * * * *"}, {"timezone": "Mars/Olympus"}, {"enabled": "perhaps"}):
        assert "flash bad" in await operator.do(f"{path}/change", back=path, **wrong), wrong


@pytest.mark.parametrize(
    ("cron", "words"), [("@hourly", "At the start of every hour"), ("0 0 * * 0", "At 00:00 on Sunday"), ("no", "no")]
)
def test_cron_in_words(cron: str, words: str) -> None:
    assert schedules.in_words(cron) == words


async def test_a_version_of_a_template_is_disabled(person: MakePerson, maker: Maker) -> None:
    admin = await person()
    await maker.make("run")
    assert 'href="/console/templates/outside/1"' in await admin.see("/templates")
    assert "disabled: new runs of it are refused" in await admin.do("/templates/outside/1/enable", enabled="false")
    answer = await maker.client.post("/v1/runs", json={"template": "outside", "version": 1})
    assert answer.status_code in (404, 409)
    assert "is enabled." in await admin.do("/templates/outside/1/enable", enabled="true")
    await admin.see("/templates/nothing/1", 404)


async def test_a_webhooks_deliveries_are_seen_and_sent_again(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    operator = await person(ROLES["operator"])
    delivery = await maker.make("webhook")
    await maker.fail(delivery, "http_500")
    webhook = await rows.fetchval("SELECT params ->> 'webhook_id' FROM job WHERE id = $1", delivery)
    assert "http://127.0.0.1/hook" in await operator.see("/webhooks")
    page = await operator.see(f"/webhooks/{webhook}")
    assert "http_500" in page
    once = _ONCE.findall(page)[0]
    for _ in range(2):
        assert "on its way again" in await operator.do(
            f"/webhooks/{webhook}/deliveries/{delivery}/redeliver", once=once
        )
    assert "on its way." in await operator.do(f"/webhooks/{webhook}/test", once=once)
    assert await rows.fetchval("SELECT count(*) FROM job WHERE pipeline = 'webhook'") == 3
    for number in (4, 5):  # the page shows what was sent: who sends once more, within the same minute, means it
        once = _ONCE.findall(await operator.see(f"/webhooks/{webhook}"))[0]
        for _ in range(2):
            assert "on its way." in await operator.do(f"/webhooks/{webhook}/test", once=once)
        assert await rows.fetchval("SELECT count(*) FROM job WHERE pipeline = 'webhook'") == number
    assert "The webhook is disabled." in await operator.do(f"/webhooks/{webhook}/enable", enabled="false")
    await rows.execute("UPDATE webhook SET disabled_because = 'ten deliveries failed'")
    assert "ten deliveries failed" in await operator.see("/")
    stranger = await person(ROLES["operator"], tenant="other")
    await stranger.see(f"/webhooks/{webhook}", 404)


async def test_keys_are_listed_without_their_secrets(person: MakePerson, rows: Connection) -> None:
    admin, other = await person(), await person(ROLES["viewer"], tenant="other")
    page = html.unescape(await admin.see("/keys"))
    assert f"lh_{other.key.prefix}" in page
    assert other.key.text.split("_", 2)[2] not in page
    await revoke_key(rows, other.key.prefix)
    assert other.key.prefix not in await admin.see("/keys?tenant=other")
    assert '<span class="state revoked">' in await admin.see("/keys?tenant=other&ended=true")
    assert other.key.prefix not in await admin.see("/keys?tenant=acme&ended=true")
    assert str(datetime.now(UTC).year) in page


async def test_a_schedule_that_paused_itself_is_on_the_overview(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    operator = await person(ROLES["operator"])
    await maker.make("run")
    await maker.client.post("/v1/schedules", json={"template": "outside", "cron": "0 9 * * *"})
    await rows.execute("UPDATE schedule SET enabled = false, next_run_at = NULL, paused_because = 'three runs failed'")
    assert "A schedule of outside paused itself: three runs failed" in await operator.see("/")


async def test_past_ticks_are_seen_before_their_runs_start_and_start_once(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    operator = await person(ROLES["operator"])
    await maker.make("run")
    body = {"template": "outside", "cron": "0 9 * * *", "timezone": "Europe/Berlin", "overlap": "allow_all"}
    at = f"/schedules/{(await maker.client.post('/v1/schedules', json=body)).json()['id']}"
    day = datetime.now(UTC).date()
    start, end = (f"{day - timedelta(days=past)}T12:00" for past in (4, 1))
    assert "Backfill…" in await operator.see(at)
    page = await operator.see(f"{at}/backfill?start={start}&end={end}")
    assert "Backfill 3 runs" in page
    assert "fires 3 times." in page
    assert page.count("09:00 CE") == 3  # in the schedule's zone, in winter or in summer
    assert await rows.fetchval("SELECT count(*) FROM run WHERE schedule_id IS NOT NULL") == 0
    once = re.findall(r'name="once" value="([^"]+)"', page)[0]
    fields = {"start": start, "end": end, "once": once}
    assert "3 runs have started." in await operator.do(f"{at}/backfill", **fields)
    assert "3 runs have started." in await operator.do(f"{at}/backfill", **fields)  # a double click
    assert await rows.fetchval("SELECT count(*) FROM run WHERE schedule_id IS NOT NULL") == 3
    earlier = f"{day - timedelta(days=5)}T12:00"
    page = await operator.see(f"{at}/backfill?start={earlier}&end={end}")
    assert ("Backfill 1 run<" in page, "3 of these have their run" in page) == (True, True)
    assert "There is no run to start." in await operator.see(f"{at}/backfill?start={start}&end={end}")
    ahead = f"?start={start}&end={day + timedelta(days=2)}"
    for wrong in ("", "?start=yesterday", ahead, "?start=1999-01-01"):
        await operator.see(f"{at}/backfill{wrong}", 422)
    viewer = await person(ROLES["viewer"])
    assert "Backfill…" not in await viewer.see(at)
    await viewer.see(f"{at}/backfill?start={start}", 403)


async def test_a_schedule_is_changed_in_all_that_decides_about_its_runs(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    operator = await person(ROLES["operator"])
    await maker.make("run")
    body = {"template": "outside", "cron": "0 9 * * *", "payload_template": {"n": 1}}
    at = f"/schedules/{(await maker.client.post('/v1/schedules', json=body)).json()['id']}"
    page = await operator.do(f"{at}/change", cron="0 8 * * *", overlap="cancel_other", catch_up="one")
    assert "The schedule is changed." in page
    row = await rows.fetchrow("SELECT cron, overlap, catch_up, payload_template FROM schedule")
    assert row is not None
    assert tuple(row) == ("0 8 * * *", "cancel_other", "one", {"n": 1})
    await operator.do(f"{at}/change", payload_template='{"n": 2}')
    assert await rows.fetchval("SELECT payload_template FROM schedule") == {"n": 2}
    for wrong in ({"payload_template": "{"}, {"payload_template": "[1]"}, {"overlap": "never"}, {"catch_up": "x"}):
        assert "flash bad" in await operator.do(f"{at}/change", back=at, **wrong), wrong


async def test_a_limit_shows_which_jobs_fill_it_and_which_wait(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    await rows.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('acme', 'tenant', 1, true)")
    inside = await maker.make("run", scope="user", scope_id="1")
    waiting = await maker.make("run", scope="user", scope_id="2")
    admin, operator = await person(ROLES["admin"]), await person(ROLES["operator"])
    link = re.findall(r'href="/console(/limits/jobs[^"]+)"', await admin.see("/limits"))
    first, second = (await admin.see(html.unescape(link[0]))).split("<h2>Waiting")
    assert (str(inside) in first, str(waiting) in first) == (True, False)
    assert (str(inside) in second, str(waiting) in second) == (False, True)
    await operator.see(html.unescape(link[0]), 403)
    assert (await admin.see("/limits/jobs?tenant=acme&key=nothing")).count("None.") == 2


async def test_the_audit_is_exported_as_a_file_that_verifies(
    person: MakePerson, rows: Connection, tmp_path: Path
) -> None:
    admin, operator = await person(ROLES["admin"]), await person(ROLES["operator"])
    await admin.do("/queues/media/pause", reason="x")
    await admin.do("/limits/set", tenant="acme", key="tenant", at_most="5")
    assert "/audit/export?tenant=acme" in await admin.see("/audit?tenant=acme")
    answer = await admin.http.get("/console/audit/export?tenant=acme")
    assert answer.headers["content-disposition"] == 'attachment; filename="audit.jsonl"'
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[0]["head"]["tenant_id"] == "acme"
    assert [line["action"] for line in lines[1:]][-1] == "limit.set"
    (tmp_path / "audit.jsonl").write_text(answer.text)
    verified = CliRunner().invoke(app, ["audit", "verify", str(tmp_path / "audit.jsonl")])
    assert verified.exit_code == 0, verified.output
    await operator.see("/audit/export", 403)


async def test_the_list_of_shortcuts_has_each_page_that_the_person_may_open(person: MakePerson) -> None:
    for role, more in (("viewer", 0), ("admin", 1)):
        page = await (await person(ROLES[role])).see("/")
        keys = re.findall(r'data-go="(.)"', page)
        assert len(keys) == len(set(keys))
        assert re.findall(r"<kbd>g</kbd> <kbd>(.)</kbd>", page) == keys
        assert ("a" in keys) == bool(more)


async def test_limits_and_people_go_on_in_pages(
    person: MakePerson, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(people, "_SHOWN", 2)
    admin = await person(ROLES["admin"])
    assert 'rel="next"' not in await admin.see("/limits")
    for number in range(overview_reads.MAX_LIMITS + 1):
        await rows.execute(
            "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('acme', $1, 5, true)",
            f"payload:t:/{number:02}",
        )
        if number < 3:
            await rows.execute(
                "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes)"
                " VALUES ($1, 'acme', 'https://id.example', $2, $2, 'Anna', '{role:viewer}')",
                new_id(), f"login{number}",
            )  # fmt: skip
    for path, last in (("/limits", "payload:t:/25"), ("/people", "login0")):
        first = await admin.see(path)
        assert last not in first
        further = re.findall(r'rel="next" href="/console([^"]+)"', first)
        page = await admin.see(html.unescape(further[0]))
        assert (last in page, 'rel="next"' in page) == (True, False)


async def test_a_template_is_deleted_where_nothing_uses_it(person: MakePerson, maker: Maker, rows: Connection) -> None:
    admin = await person(ROLES["admin"])
    job_id = await maker.make("run")
    back = "/templates/outside/1"
    assert f'action="/console{back}/delete"' in await admin.see(back)
    page = await admin.do(f"{back}/delete", back=back)
    assert "Runs of this version are unfinished" in page
    await maker.client.post(f"/v1/jobs/{job_id}/cancel")
    assert "Version 1 of outside is deleted." in await admin.do(f"{back}/delete", back=back)
    assert await rows.fetchval("SELECT count(*) FROM template") == 0
