"""A button that is pressed twice. Without JavaScript a browser sends its form twice, and shows the second answer."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest

from leasehold.api.console import dead_letters
from leasehold.api.jobs import jobs
from leasehold.db import idempotency
from leasehold.db.database import Connection
from tests.api.conftest import Running, client_of
from tests.console.conftest import ROLES, MakePerson, Person
from tests.jobs.conftest import Maker

_ONCE = re.compile(r'name="once" value="([^"]+)"')
_HIDDEN = re.compile(r'name="(once|start|end)" value="([^"]+)"')
_FLASH = re.compile(r'<p class="flash (good|bad)" role="status">([^<]*)</p>')
_KEY = re.compile(r"lh_[a-z0-9]{12}_[A-Za-z0-9_-]{43}")


async def form_on(somebody: Person, path: str) -> str:
    """The one-time token of the form on this page."""
    return str(_ONCE.findall(await somebody.see(path))[0])


async def press(somebody: Person, path: str, **fields: Any) -> tuple[str, tuple[str, str]]:
    """Where the browser goes after the form, and the sentence that it shows there."""
    answer = await somebody.send(path, **fields)
    assert answer.status_code == 303, (answer.status_code, answer.text)
    found = _FLASH.search((await somebody.http.get(answer.headers["location"])).text)
    assert found is not None
    return answer.headers["location"], (found[1], unescape(found[2]))


async def audited(rows: Connection, action: str) -> int:
    n: int = await rows.fetchval("SELECT count(*) FROM audit WHERE action = $1", action)
    return n


async def test_picked_jobs_are_retried_once(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody = await person()
    picked = [await maker.make("run", scope="user", scope_id=str(n)) for n in range(2)]
    for job_id in picked:
        await maker.fail(job_id)
    fields = {"job": [str(job_id) for job_id in picked], "action": "retry", "back": "/jobs"}
    once = await form_on(somebody, "/jobs")
    assert once == await form_on(somebody, "/jobs"), "a refresh shows the same page"
    first = await press(somebody, "/jobs/act", once=once, **fields)
    assert first[1] == ("good", "2 of 2 jobs retried.")
    await maker.fail(picked[0])  # before the browser sends the form again
    assert await press(somebody, "/jobs/act", once=once, **fields) == first
    assert await rows.fetchval("SELECT status FROM job WHERE id = $1", picked[0]) == "failed"
    assert await audited(rows, "job.retried") == 2
    seen = await form_on(somebody, "/jobs")  # who saw that one has failed again
    assert (await press(somebody, "/jobs/act", once=seen, **fields))[1][1].startswith("1 of 2 jobs retried. 1 refused")
    once = await form_on(somebody, "/jobs")
    for _ in range(2):
        _, flash = await press(somebody, "/jobs/act", once=once, **fields | {"action": "cancel"})
        assert flash == ("good", "2 of 2 jobs asked to stop.")
    assert await audited(rows, "job.cancelled") == 2


async def test_a_press_that_did_nothing_is_no_first_press(person: MakePerson, maker: Maker) -> None:
    """Its refusals may not hold any more."""
    somebody, job_id = await person(), await maker.make("run")
    fields = {"job": str(job_id), "action": "retry", "once": await form_on(somebody, "/jobs")}
    assert (await press(somebody, "/jobs/act", **fields))[1][1].startswith("0 of 1 job retried. 1 refused")
    await maker.fail(job_id)
    assert (await press(somebody, "/jobs/act", **fields))[1] == ("good", "1 of 1 job retried.")


async def test_a_group_of_dead_letters_is_retried_once(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second press would retry the next jobs of the group, and another canary."""
    monkeypatch.setattr(dead_letters, "_MAX_RETRIED", 2)
    somebody = await person()
    made = [await maker.make("run", scope="user", scope_id=str(n)) for n in range(5)]
    for job_id in made:
        await maker.fail(job_id)
    letter = (await maker.client.get("/v1/dead-letters")).json()["dead_letters"][0]
    path = f"/dead-letters/{letter['fingerprint']}"
    for fields, n in (({"canary": "yes"}, 1), ({}, 3)):
        once = await form_on(somebody, path)
        first = await press(somebody, f"{path}/replay", once=once, **fields)
        assert first[1][0] == "good"
        assert await press(somebody, f"{path}/replay", once=once, **fields) == first
        assert await audited(rows, "job.retried") == n
    assert await form_on(somebody, path) != await form_on(somebody, path), "a page opened again acts again"


async def test_a_dead_letter_is_retried_once(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody, job_id = await person(), await maker.make("run")
    await maker.fail(job_id)
    (letter,) = (await maker.client.get("/v1/dead-letters")).json()["dead_letters"]
    once = await form_on(somebody, f"/dead-letters/{letter['fingerprint']}")
    path = f"/dead-letters/letters/{letter['task_id']}/replay"
    first = await press(somebody, path, once=once)
    assert first == (f"/console/jobs/{job_id}", ("good", "The job runs again."))
    await maker.fail(job_id)
    assert await press(somebody, path, once=once) == first
    assert await audited(rows, "job.retried") == 1


async def test_each_preview_of_a_backfill_acts_for_its_own_range(person: MakePerson, maker: Maker) -> None:
    """Without an end, each preview has another one. With the key of the first, the second form would be refused."""
    somebody = await person()
    await maker.make("run")
    now = datetime.now(UTC)
    body = {"template": "outside", "cron": f"0 {(now.hour + 12) % 24} * * *", "overlap": "allow_all"}
    path = f"/schedules/{(await maker.client.post('/v1/schedules', json=body)).json()['id']}/backfill"
    days = [f"{now - timedelta(days=past):%Y-%m-%d}" for past in (9, 8, 4)]
    pages = [await somebody.see(f"{path}?start={days[2]}") for _ in range(2)]
    forms = [dict(_HIDDEN.findall(page)) for page in pages]
    first = await press(somebody, path, **forms[0])
    assert first[1][0] == "good"
    assert await press(somebody, path, **forms[0]) == first
    assert (await press(somebody, path, **forms[1]))[1] == ("bad", "No run has started.")
    keys = {await form_on(somebody, f"{path}?start={start}&end={days[2]}") for start in days[:2]}
    assert len(keys) == 2


async def test_an_order_is_settled_once(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody, job_id = await person(), await maker.make("generation")
    await maker.lose_order(job_id)
    once = await form_on(somebody, "/to-settle")
    for _ in range(2):
        _, flash = await press(somebody, "/to-settle/settle", once=once, job=str(job_id), action="give_up")
        assert flash == ("good", "1 of 1 given up.")
    assert await audited(rows, "job.settled") == 1


async def test_a_template_and_a_view_are_deleted_once(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody, job_id = await person(), await maker.make("run")
    await maker.succeed(job_id)
    once = await form_on(somebody, "/templates/outside/1")
    back = "/templates/outside/1"
    for _ in range(2):
        to, flash = await press(somebody, "/templates/outside/1/delete", once=once, back=back)
        assert (to, flash) == ("/console/templates", ("good", "Version 1 of outside is deleted."))
    await somebody.do("/jobs/views/save", name="mine", filter="status:failed created:<3h")
    view_id = await rows.fetchval("SELECT id FROM saved_view")
    page = await somebody.see("/jobs?q=status:failed%20created:%3C3h")
    for _ in range(2):
        _, flash = await press(somebody, f"/jobs/views/{view_id}/delete", once=_ONCE.findall(page)[0], back="/jobs")
        assert flash == ("good", "The view is deleted.")


async def test_the_second_press_waits_for_the_answer_to_the_first(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    somebody, job_id = await person(), await maker.make("run")
    await maker.fail(job_id)
    began, may_end, retry_job = asyncio.Event(), asyncio.Event(), jobs.retry_job

    async def slow(*arguments: Any) -> Any:
        began.set()
        await may_end.wait()
        return await retry_job(*arguments)

    monkeypatch.setattr(jobs, "retry_job", slow)
    fields = {"job": str(job_id), "action": "retry", "once": await form_on(somebody, "/jobs")}
    first = asyncio.create_task(somebody.send("/jobs/act", **fields))
    await began.wait()
    # As after a second: nobody may hold the key any more, and yet the first press is at work.
    monkeypatch.setattr(idempotency, "_LOCK_GRACE", timedelta(0))
    second = asyncio.create_task(somebody.send("/jobs/act", **fields))
    done, _ = await asyncio.wait([second], timeout=1)
    assert not done, "the second press waits"
    may_end.set()
    answers = [await first, await second]
    assert [answer.status_code for answer in answers] == [303, 303]
    assert answers[0].cookies["leasehold_flash"] == answers[1].cookies["leasehold_flash"]
    assert await audited(rows, "job.retried") == 1


async def test_a_form_makes_one_key_and_shows_it_at_both_presses(
    person: MakePerson, running: Running, rows: Connection
) -> None:
    admin, other = await person(ROLES["admin"]), await person(ROLES["admin"], name="other")
    fields = {"client_id": "billing", "role": "viewer", "days": "30", "once": await form_on(admin, "/keys")}
    answers = await asyncio.gather(*(admin.send("/keys/new", **fields) for _ in range(2)))
    assert [(answer.status_code, answer.headers["cache-control"]) for answer in answers] == [(200, "no-store")] * 2
    (text,) = {_KEY.findall(answer.text)[0] for answer in answers}
    async with client_of(running.url, text) as billing:
        assert (await billing.get("/v1/jobs")).status_code == 200
    assert await audited(rows, "key.created") == 1
    texts = {
        _KEY.findall((await somebody.send("/keys/new", **changed)).text)[0]
        for somebody, changed in (
            (admin, fields | {"client_id": "shipping"}),
            (admin, fields | {"once": await form_on(admin, "/keys")}),
            (other, fields),
        )
    }
    assert len(texts | {text}) == 4, "another form, other fields or another person: another key"
    secret = text.split("_", 2)[2]
    stored = await rows.fetch("SELECT key, convert_from(body, 'UTF8') AS body FROM idempotency")
    assert not any(secret in row["key"] + (row["body"] or "") for row in stored)


async def test_a_form_rotates_a_key_once(person: MakePerson, running: Running, rows: Connection) -> None:
    admin = await person(ROLES["admin"])
    made = await admin.send("/keys/new", client_id="billing", role="viewer", days="30")
    prefix = _KEY.findall(made.text)[0].split("_")[1]
    fields = {"hours": "0", "once": await form_on(admin, "/keys")}  # the old key ends at once
    pages = [(await admin.send(f"/keys/{prefix}/rotate", **fields)).text for _ in range(2)]
    assert all("It ends <time" in page for page in pages)
    texts = {_KEY.findall(page)[0] for page in pages}
    assert len(texts) == 1
    async with client_of(running.url, texts.pop()) as billing:
        assert (await billing.get("/v1/jobs")).status_code == 200
    assert await audited(rows, "key.rotated") == 1


async def test_a_form_shows_its_key_no_more_after_a_minute(person: MakePerson, rows: Connection) -> None:
    """Or the page in the history of a browser would lead to the secret for as long as the session."""
    admin = await person(ROLES["admin"])
    fields = {"client_id": "billing", "role": "viewer", "once": await form_on(admin, "/keys"), "back": "/keys"}
    text = _KEY.findall((await admin.send("/keys/new", **fields)).text)[0]
    prefix = text.split("_")[1]
    for change in ("created_at = now() - interval '2 minutes'", "created_at = now(), revoked_at = now()"):
        await rows.execute(f"UPDATE api_key SET {change} WHERE prefix = $1", prefix)
        _, flash = await press(admin, "/keys/new", **fields)
        assert flash == ("bad", f"This form has made the key lh_{prefix} before. Open the page again to make another.")
    assert await audited(rows, "key.created") == 1
