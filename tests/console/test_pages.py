"""What the pages show, and what their forms do, beside the API that serves them."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

import pytest

from leasehold import App
from leasehold.api.console import findings, overview
from leasehold.api.console import queues as pages
from leasehold.api.fleet.health import Check
from leasehold.app.calls import Call
from leasehold.app.writing import write
from leasehold.db import cell_reads, job_lists
from leasehold.db.database import Connection, connected
from leasehold.domain.ids import id_of_instant, new_id
from leasehold.selfcheck import Finding as SelfCheck
from leasehold.settings import Settings
from leasehold.transitions import queues, workers
from tests.api.conftest import Running
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker

shop = App("shop")
_ROW = re.compile(r'<tr id="job-([0-9a-f-]{36})" data-href')


@shop.task
def ordered(number: int) -> int:
    return number


async def test_a_filter_finds_and_an_error_points_at_its_character(person: MakePerson, maker: Maker) -> None:
    somebody = await person()
    run, picture = await maker.make("run"), await maker.make("media")
    assert _ROW.findall(await somebody.see("/jobs")) == [str(picture), str(run)]
    assert _ROW.findall(await somebody.see("/jobs?q=kind:media")) == [str(picture)]
    assert "1 match" in await somebody.see("/jobs?q=kind:media&count=true")
    wrong = await somebody.see("/jobs?q=kind:media+staus:failed", 422)
    assert "<bdi>kind:media </bdi><mark>s</mark><bdi>taus:failed</bdi></pre>There is no term" in wrong
    after_arabic = await somebody.see("/jobs?q=tag.owner:مها+nope:1", 422)
    assert "<bdi>tag.owner:مها </bdi><mark>n</mark><bdi>ope:1</bdi>" in after_arabic
    at_the_end = await somebody.see("/jobs?q=kind:", 422)
    assert "<bdi>kind:</bdi><mark>^</mark>" in at_the_end or "<mark>k</mark>" in at_the_end
    assert "No job matches." in await somebody.see("/jobs?q=status:failed")
    assert "There is no kind" in await somebody.see("/jobs?q=kind:nothing", 422)


async def test_a_job_that_should_have_started_is_marked_as_late(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """And not one that is scheduled for later, or that has started."""
    somebody = await person()
    later = (datetime.now(UTC) + timedelta(hours=20)).isoformat()
    waits, new, started = [await maker.make("run", scope="user", scope_id=str(n)) for n in range(3)]
    planned = await maker.make("run", scope="user", scope_id="planned", scheduled_at=later)
    await maker.claim(started)
    await rows.execute("UPDATE job SET created_at = created_at - interval '20 minutes' WHERE id <> $1", new)
    page = await somebody.see("/jobs")
    row_of = {job_id: page[page.index(f'id="job-{job_id}"') :].split("</tr>")[0] for job_id in (waits, new, planned)}
    assert [job_id for job_id, row in row_of.items() if ">late</small>" in row] == [waits]
    assert ">20 min</time>" in row_of[waits]
    assert re.search(r"due <time [^>]*>in 19 h 59 min<", row_of[planned])
    late = [job_id for job_id in (waits, new, started, planned) if ">late<" in await somebody.see(f"/jobs/{job_id}")]
    assert late == [waits]


async def test_how_long_a_job_waited_and_ran_says_the_exact_times_on_hover(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    somebody = await person()
    waits, runs, ended = [await maker.make("run", scope="user", scope_id=str(n)) for n in range(3)]
    planned = await maker.make("run", scope="user", scope_id="3", scheduled_at="2030-01-02T03:04:05Z")
    for job_id in (runs, ended):
        await maker.claim(job_id)
    await rows.execute(
        "UPDATE job SET created_at = '2026-01-02 03:00:00Z', started_at = '2026-01-02 03:00:07Z' WHERE id = ANY($1)",
        [runs, ended],
    )
    await rows.execute("UPDATE job SET created_at = '2026-01-02 03:00:00Z' WHERE id = $1", waits)
    await rows.execute("UPDATE job SET finished_at = '2026-01-02 04:00:00Z', status = 'succeeded' WHERE id = $1", ended)
    page = await somebody.see("/jobs")
    cells = {
        job_id: [
            re.findall(r'title="(?:until )?(2\d{3}-[^"]*)"', cell)
            for cell in page[page.index(f'id="job-{job_id}"') :].split("</tr>")[0].split("<td")[-4:-2]
        ]
        for job_id in (waits, runs, ended, planned)
    }
    began = "2026-01-02 03:00:07 UTC"
    assert cells[waits] == [["2026-01-02 03:00:00 UTC"], []]
    assert cells[runs] == [[began], [began]]
    assert cells[ended] == [[began], ["2026-01-02 04:00:00 UTC"]]
    assert cells[planned] == [["2030-01-02 03:04:05 UTC"], []]
    for job_id, n in ((waits, 1), (ended, 2)):  # and on the page of the job
        facts = (await somebody.see(f"/jobs/{job_id}")).split('<dl class="facts">')[1].split("</dl>")[0]
        assert len(re.findall(r'<dt>(?:Waited|Ran)</dt><dd><\w+[^>]* title="(?:until )?2', facts)) == n


async def test_the_list_goes_on_in_pages(person: MakePerson, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.api.console.jobs.PAGE", 2)
    somebody = await person()
    made = [str(await maker.make("run", scope="user", scope_id=str(n))) for n in range(3)]
    first = await somebody.see("/jobs")
    assert _ROW.findall(first) == [made[2], made[1]]
    older = re.search(r'rel="next" href="/console([^"]*)"', first)
    assert older is not None
    assert _ROW.findall(await somebody.see(older[1].replace("&amp;", "&"))) == [made[0]]


async def test_a_refresh_keeps_the_rows_and_counts_newer_ones(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    somebody = await person()
    first = await maker.make("run")
    page = await somebody.see("/jobs?q=status:waiting_worker")
    address = re.search(r'hx-get="/console([^"]*)"', page)
    assert address is not None
    fresh = address[1].replace("&amp;", "&")
    assert "newer" not in await somebody.see(fresh)
    await maker.fail(first)  # it no longer matches, and stays where it is
    await maker.make("run", scope="user", scope_id="2")
    page = await somebody.see(fresh)
    assert _ROW.findall(page) == [str(first)]
    assert '<span class="state failed">' in page
    assert ">1 newer</a>" in page
    await rows.execute("DELETE FROM job WHERE id = $1", first)
    assert f'<tr class="gone" id="job-{first}">' in await somebody.see(fresh)


async def test_a_job_whose_id_has_no_time_or_a_time_ahead_hides_no_newer_job(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """Earlier code wrote any UUID that a program gave to a run, and the clock of a program may be wrong."""
    somebody = await person()
    first = await maker.make("run")
    ahead = id_of_instant(datetime.now(UTC) + timedelta(hours=2))
    odd = [UUID(int=first.int | 0xF << 124, version=4), UUID("ffffffff-ffff-7fff-bfff-ffffffffffff"), ahead]
    await write(rows, [Call(ordered, {"number": 1}, id=job_id) for job_id in odd], "acme", 3600)
    page = await somebody.see("/jobs")
    assert set(_ROW.findall(page)) == {str(job_id) for job_id in (first, *odd)}
    address = re.search(r'hx-get="/console([^"]*)"', page)
    assert address is not None
    fresh = address[1].replace("&amp;", "&")
    assert "newer" not in await somebody.see(fresh)
    await maker.make("run", scope="user", scope_id="2")
    assert ">1 newer</a>" in await somebody.see(fresh)


async def test_a_refresh_without_news_is_empty(person: MakePerson, maker: Maker) -> None:
    somebody = await person()
    job_id = await maker.make("run")
    address = f"/console/jobs/fresh?shown={job_id}"
    answer = await somebody.http.get(address)
    headers = {"X-Console-Mark": answer.headers["x-console-mark"], "HX-Request": "true"}
    await asyncio.sleep(1.1)  # the times of the page have changed: its browser counts them
    again = await somebody.http.get(address, headers=headers)
    assert (again.status_code, again.content) == (204, b"")
    await maker.claim(job_id)
    assert (await somebody.http.get(address, headers=headers)).status_code == 200


async def test_a_job_shows_its_steps_its_errors_and_what_it_was_given(person: MakePerson, maker: Maker) -> None:
    somebody = await person()
    job_id = await maker.make("run", payload={"customer": "<b>Ünal & Söhne</b>"}, tags={"env": "prod"})
    page = await somebody.see(f"/jobs/{job_id}")
    assert "a waits until an external worker claims tasks of the queue q." in page
    assert "&lt;b&gt;Ünal &amp; Söhne&lt;/b&gt;" in page
    assert "env: prod" in page
    await maker.fail(job_id, "no_space")
    page = await somebody.see(f"/jobs/{job_id}")
    assert page.count("It did not work.") >= 2  # of the job, and of the attempt
    assert '<rect class="no"' in page
    assert 'aria-label="a: ' in page


async def test_a_job_says_how_many_further_steps_and_outputs_it_has(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    somebody, job_id = await person(), await maker.make("run")
    own = int(await rows.fetchval("SELECT count(*) FROM task WHERE job_id = $1", job_id))
    for first, last, more in ((1, 102 - own, "2"), (103 - own, 999 - own, "899"), (1000 - own, 1300, "900+")):
        await rows.execute(
            "WITH added AS (INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, max_attempts,"
            " status, finished_at) SELECT gen_random_uuid(), $1, 'acme', 'step-' || n, 7, 'q', 1, 1, 'succeeded', now()"
            " FROM generate_series($2::int, $3) AS n RETURNING id, step)"
            " INSERT INTO output (task_id, name, job_id, step, key, size, sha256, content_type)"
            " SELECT id, 'x', $1, step, 'k', 1, 's', 't' FROM added",
            job_id,
            first,
            last,
        )
        seen = await somebody.see(f"/jobs/{job_id}")
        assert re.findall(r">(\S+) more steps: <code>GET /v1/runs/", seen) == [more]
    assert re.findall(r">(\S+) more outputs: <code>GET /v1/runs/", seen) == ["960+"]


async def test_parameters_that_are_secret_are_not_shown(person: MakePerson, maker: Maker) -> None:
    somebody = await person()
    page = await somebody.see(f"/jobs/{await maker.make('generation')}")
    assert "sesame" not in page
    assert "Not shown: " in page


async def test_acts_of_a_job(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody = await person()
    job_id = await maker.make("run")
    await maker.fail(job_id)
    page = await somebody.do(f"/jobs/{job_id}/retry", back=f"/jobs/{job_id}")
    assert "The job runs again." in page
    page = await somebody.do(f"/jobs/{job_id}/cancel", reason="ordered by mistake")
    assert "The job is cancelled." in page
    assert "ordered by mistake" in page
    page = await somebody.do(f"/jobs/{job_id}/delete")
    assert f"The job {job_id} is deleted." in page
    assert await rows.fetchval("SELECT count(*) FROM job WHERE id = $1", job_id) == 0
    assert "The job was deleted at" in await somebody.see(f"/jobs/{job_id}", 410)


async def test_a_retry_with_another_payload_is_checked(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody = await person()
    job_id = await maker.make("run", payload={"n": 1})
    await maker.fail(job_id)
    back = f"/jobs/{job_id}"
    for wrong in ("{", "[1]", "[" * 150 + "]" * 150):
        assert "flash bad" in await somebody.do(f"{back}/retry", back=back, payload=wrong)
    assert ">{\n  &#34;n&#34;: 1\n}</textarea>" in await somebody.see(back)
    assert "flash good" in await somebody.do(f"{back}/retry", back=back, payload='{ "n": 1 }', from_step="a")
    details = await rows.fetchval("SELECT details FROM audit WHERE action = 'job.retried'")
    assert "other_payload" not in details  # it is the same
    await maker.fail(job_id)
    assert "flash good" in await somebody.do(f"{back}/retry", back=back, payload='{"n": 2}', from_step="a")
    assert await rows.fetchval("SELECT params FROM job WHERE id = $1", job_id) == {"n": 2}


async def test_picked_jobs_are_done_and_each_refusal_is_counted(person: MakePerson, maker: Maker) -> None:
    somebody = await person()
    failed = [await maker.make("run", scope="user", scope_id=str(n)) for n in range(3)]
    for job_id in failed[:2]:
        await maker.fail(job_id)
    page = await somebody.do("/jobs/act", job=[str(job_id) for job_id in failed], action="retry")
    assert "2 of 3 jobs retried. 1 refused: The job is " in page
    for bad in ({"job": "x", "action": "retry"}, {"job": str(failed[0]), "action": "burn"}, {"action": "retry"}):
        assert (await somebody.send("/jobs/act", **bad)).status_code == 422


@pytest.mark.parametrize("code", ["broken", 'HTTP 503: "no \\ room"'])
async def test_dead_letters_are_grouped_and_tried_by_a_canary(person: MakePerson, maker: Maker, code: str) -> None:
    somebody = await person()
    made = [await maker.make("run", scope="user", scope_id=str(n)) for n in range(3)]
    for job_id in made:
        await maker.fail(job_id, code)
    await maker.fail(await maker.make("run", scope="user", scope_id="another"), "another")
    groups = await somebody.see("/dead-letters")
    found = re.search(r'data-href="/console(/dead-letters/[0-9a-f]{16})"', groups)
    assert found is not None
    assert 'data-label="jobs">3</td>' in groups
    page = await somebody.see(found[1])
    assert page.count("It did not work.") == 3
    operation = re.search(r'href="/console(/operations/new[^"]+)"', page)
    assert operation is not None
    assert "Retry 3 jobs" in await somebody.see(operation[1].replace("&amp;", "&"))
    assert "as a trial of its group" in await somebody.do(f"{found[1]}/replay", canary="yes")
    assert "2 jobs run again." in await somebody.do(f"{found[1]}/replay")
    assert "The group is empty" in await somebody.see(found[1])


async def test_the_overview_says_what_is_wrong_and_leads_there(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    somebody = await person()
    await queues.pause(rows, "default", "the disk is full")
    job_id = await maker.make("run")
    await maker.fail(job_id, "no_space")
    await rows.execute(
        "UPDATE job SET created_at = created_at - interval '20 minutes' WHERE id = $1", await maker.make("media")
    )
    page = await somebody.see("/")
    assert "No worker has a heartbeat: nothing runs." in page
    assert "The queue default is paused: the disk is full" in page
    assert "1 step has failed for good in the last hour, mostly with no_space." in page
    assert "The oldest waiting job has waited 20 min" in page
    assert "<dd>1</dd><dt>jobs of all tenants in the last hour" in page
    nobody = await person(frozenset())
    page = await nobody.see("/")
    assert "no_space" not in page
    assert "the disk is full" not in page


async def test_each_number_of_the_overview_says_whose_jobs_it_counts(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    for tenant in ("acme", "other"):
        await rows.execute("UPDATE job SET tenant_id = $2 WHERE id = $1", await maker.make("media"), tenant)
    page = await (await person(ROLES["viewer"])).see("/")
    assert '<dd>1</dd><dt><a href="/console/jobs">unfinished jobs</a>' in page
    assert "<dd>1</dd><dt>jobs in the last hour" in page
    assert "all tenants" not in page
    operator = await person(ROLES["admin"])
    page = await operator.see("/")
    own = re.search(r'<dd>1</dd><dt><a href="/console(/jobs[^"]+)">unfinished jobs of acme</a>', page)
    assert own is not None
    assert len(set(re.findall(r"/console/jobs/[0-9a-f-]{36}", await operator.see(own[1])))) == 1
    assert "<dd>2</dd><dt>jobs of all tenants in the last hour" in page
    assert "<h2>Jobs of all tenants in the last hour" in page


async def test_the_overview_names_the_oldest_job_that_is_late_beside_older_ones_that_wait_on_purpose(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "REFRESH_SECONDS", 0)
    monkeypatch.setattr(findings, "_MAX_EXPLAINED", 1)
    somebody = await person(ROLES["viewer"])
    later = (datetime.now(UTC) + timedelta(hours=20)).isoformat()
    for n in range(3):
        await maker.make("run", scope="user", scope_id=f"planned {n}", scheduled_at=later)
    await maker.make("run", scope="user", scope_id="for an external worker")
    await rows.execute("UPDATE job SET created_at = created_at - interval '1 day'")
    assert "The oldest waiting job" not in await somebody.see("/")
    late = await maker.make("media")
    await rows.execute("UPDATE job SET created_at = created_at - interval '20 minutes' WHERE id = $1", late)
    page = await somebody.see("/")
    assert "The oldest waiting job has waited 20 min: " in page
    assert f'href="/console/jobs/{late}"' in page
    # A job that waits since the time that it was scheduled for has not waited since its submission.
    due = await rows.fetchval("SELECT min(job_id::text)::uuid FROM run WHERE scheduled_at > now()")
    await rows.execute("UPDATE run SET scheduled_at = now() - interval '30 minutes' WHERE job_id = $1", due)
    await rows.execute("UPDATE task SET available_at = now() - interval '30 minutes' WHERE job_id = $1", due)
    assert "The oldest waiting job has waited 20 min: " in await somebody.see("/")  # an external worker may take it
    await rows.execute("UPDATE task SET queue = 'q' WHERE job_id = $1", due)
    await rows.execute("UPDATE job SET status = 'queued' WHERE id = $1", due)
    page = await somebody.see("/")
    assert "The oldest waiting job has waited 30 min: No worker serves the queue q." in page
    assert f'href="/console/jobs/{due}"' in page


async def test_the_overview_counts_only_what_is_set_aside_now(person: MakePerson, rows: Connection) -> None:
    """A unit that works again keeps its row for some minutes, without effect."""
    for unit, seconds in (("works again", -1.0), ("fails", 600.0), ("fails, too", 600.0)):
        await rows.execute(
            "INSERT INTO quarantine (duty, unit, failures, error, failed_at, retry_at)"
            " VALUES ('leases', $1, 1, $2, now(), now() + make_interval(secs => $3))",
            unit, {"code": "unforeseen", "message": "it failed"}, seconds,
        )  # fmt: skip
    assert "The duty leases leaves 2 things alone for now: unforeseen." in await (await person()).see("/")


@pytest.mark.parametrize(
    ("isolation", "act"),
    [("repeatable_read", "SELECT 1"), ("read_committed", "SELECT pg_current_xact_id()")],
    ids=["reads", "has written, and waits"],
)
async def test_the_overview_names_a_session_that_holds_a_snapshot(
    person: MakePerson,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    isolation: Literal["repeatable_read", "read_committed"],
    act: str,
) -> None:
    monkeypatch.setattr(findings, "_LONG_SNAPSHOT", timedelta(0))
    async with connected(settings, "report") as holder, holder.transaction(isolation=isolation):
        await holder.execute("SET application_name = 'a report by hand'")
        pid = await holder.fetchval("SELECT pg_backend_pid()")
        await holder.execute(act)
        page = await (await person(ROLES["admin"])).see("/")
        sentence = rf"The session {pid} of PostgreSQL \(a report by hand\) has held a snapshot for \d+ s"
        assert re.search(sentence, page)
        assert "held a snapshot" not in await (await person(ROLES["operator"])).see("/")


async def test_without_trouble_the_overview_is_calm(
    person: MakePerson, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "REFRESH_SECONDS", 0)
    await rows.execute(
        "INSERT INTO worker (id, present, host, pid, version, queues) VALUES ($1, false, 'h', 1, '0', '{default}')",
        new_id(),
    )
    viewer = await person(ROLES["viewer"])
    async with asyncio.timeout(60):
        while "All is well" not in await viewer.see("/"):  # the API has just started, and connects
            await asyncio.sleep(0.05)


async def test_a_worker_that_has_died_serves_no_queue(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row stays for a while, and for good where no other worker deletes it."""
    monkeypatch.setattr(overview, "REFRESH_SECONDS", 0)
    somebody, died, lives = await person(), new_id(), new_id()
    await workers.register(rows, died, host="h", pid=1, version="u", queues=["media"])
    await rows.execute("UPDATE worker SET seen_at = seen_at - interval '31 seconds'")
    await maker.make("media")
    page = await somebody.see("/")
    assert ("No worker has a heartbeat: nothing runs." in page, "No worker serves the queue" in page) == (True, False)
    await workers.register(rows, lives, host="h", pid=2, version="v", queues=["default"])
    assert "No worker serves the queue media, in which 1 task waits." in await somebody.see("/")
    answer = await somebody.http.get("/v1/queues", headers={"Authorization": f"Bearer {somebody.key.text}"})
    assert {queue["queue"]: queue["workers"] for queue in answer.json()["queues"]} == {"media": 0, "default": 1}
    load = await cell_reads.load(rows, 30.0)
    assert (load["workers"], load["versions"]) == (1, ["v"])


async def test_a_worker_without_a_heartbeat_is_silent_whatever_else_it_is(person: MakePerson, rows: Connection) -> None:
    """A killed worker's row, which nobody has deleted, is not taken for a worker that serves."""
    somebody = await person()
    workers_of = {pid: new_id() for pid in (1, 2, 3, 4)}
    for pid, worker in workers_of.items():
        await workers.register(rows, worker, host="h", pid=pid, version="v", queues=["default"])
    await workers.ask_to_drain(rows, workers_of[2])
    await workers.ask_to_drain(rows, workers_of[4])
    await rows.execute("UPDATE worker SET seen_at = seen_at - interval '31 seconds' WHERE pid IN (3, 4)")
    page = await somebody.see("/workers")
    shown = re.findall(
        r'<a class="name"[^>]*>h<wbr>:(\d)</a>.*?\n<td><span class="state (\w+)"[^>]*>(\w+)</span></td>', page
    )
    assert shown[:2] == [("3", "silent", "silent"), ("4", "silent", "silent")]
    assert shown[2:] == [("1", "active", "serving"), ("2", "draining", "draining")]
    assert '4 registered, <span class="late">2 silent</span>' in page
    answer = await somebody.http.get("/v1/workers", headers={"Authorization": f"Bearer {somebody.key.text}"})
    assert {row["pid"]: row["silent"] for row in answer.json()["workers"]} == {1: False, 2: False, 3: True, 4: True}


async def test_of_more_workers_than_the_page_shows_the_silent_ones_are_shown_and_the_rest_is_counted(
    person: MakePerson, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    somebody = await person()
    for pid in (1, 2, 3):
        await workers.register(rows, new_id(), host="h", pid=pid, version="v", queues=["default"])
    await rows.execute("UPDATE worker SET seen_at = seen_at - interval '31 seconds' WHERE pid = 3")
    for at_most, shown, rest in ((3, ["3", "1", "2"], False), (2, ["3", "1"], True)):
        monkeypatch.setattr(pages, "_MAX_WORKERS", at_most)
        page = await somebody.see("/workers")
        assert re.findall(r"<wbr>:(\d)</a>", page) == shown
        assert ("1 more: <code>GET /v1/workers</code> has them." in page) is rest


async def test_a_queue_shows_how_many_attempts_started_within_the_minute(person: MakePerson, rows: Connection) -> None:
    worker = new_id()
    await workers.register(rows, worker, host="h", pid=1, version="v", queues=["default", "ext:acme:reports"])
    await workers.record_alive(rows, worker, {"default": 1234})
    somebody = await person()
    page = await somebody.see("/queues")
    shown = re.findall(r'data-label="started/min">(?:<span[^>]*>)?([^<]*)<', page)
    assert shown == ["1,234", "–"]  # noqa: RUF001 - an en dash
    assert '<td class="n t-spare">1,234</td>' in await somebody.see("/")


async def test_pictures_come_from_the_consoles_own_origin(
    person: MakePerson, maker: Maker, rows: Connection, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    somebody = await person()
    job_id = await maker.make("media")
    content = b"\x89PNG\r\n\x1a\n and pixels"
    stored = await running.services.store.put(f"media/{job_id}/a b.png", content, content_type="image/png", metadata={})
    task_id = await rows.fetchval("SELECT id FROM task WHERE job_id = $1 ORDER BY position LIMIT 1", job_id)
    for name, content_type in (("a b.png", "image/png"), ("page.svg", "image/svg+xml")):
        await rows.execute(
            "INSERT INTO output (task_id, name, job_id, step, key, size, sha256, content_type, tenant_id)"
            " VALUES ($1, $2, $3, 'resize', $4, $5, $6, $7, 'acme')",
            task_id, name, job_id, f"media/{job_id}/a b.png", stored.size, stored.sha256, content_type,
        )  # fmt: skip
    page = await somebody.see(f"/jobs/{job_id}")
    source = f"/jobs/{job_id}/outputs/resize/a%20b.png"
    assert f'<img src="/console{source}"' in page
    assert "page.svg" not in "".join(re.findall(r"<img [^>]*>", page))
    picture = await somebody.http.get(f"/console{source}")
    assert (picture.content, picture.headers["content-type"]) == (content, "image/png")
    assert "sandbox" in picture.headers["content-security-policy"]
    await somebody.see(f"/jobs/{job_id}/outputs/resize/page.svg", 404)
    stranger = await person(tenant="other", scopes=ROLES["viewer"])
    await stranger.see(source, 404)
    for at_most, status in ((len(content), 200), (len(content) - 1, 404)):
        changed = running.services.settings.model_copy(update={"console_picture_bytes": at_most})
        monkeypatch.setattr(running.services, "settings", changed)
        await somebody.see(source, status)
    assert "<img " not in await somebody.see(f"/jobs/{job_id}")  # a larger one is linked


async def test_a_job_shows_the_end_of_its_log(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody = await person()
    job_id = await maker.make("run")
    task_id = await rows.fetchval("SELECT id FROM task WHERE job_id = $1 ORDER BY position LIMIT 1", job_id)
    line = {"at": "2026-11-22T20:00:00.123+00:00", "level": "error", "logger": "work", "message": "no <space> left"}
    lines = [line | {"fields": {"free": 0}}, line | {"message": "it ended", "traceback": "Traceback: OSError"}]
    await rows.execute("INSERT INTO tail (job_id, log_seq) VALUES ($1, 2) ON CONFLICT DO NOTHING", job_id)
    await rows.execute(
        "INSERT INTO job_log (job_id, last, tenant_id, task_id, step, epoch, attempt, first, n, lines)"
        " VALUES ($1, 2, 'acme', $2, 'a', 1, 1, 1, 2, $3)",
        job_id,
        task_id,
        lines,
    )
    page = await somebody.see(f"/jobs/{job_id}")
    assert '20:00:00.123 a</i> <span class="error">no &lt;space&gt; left</span> <i>free=0</i>' in page
    assert "Traceback: OSError" in page


async def test_every_view_can_be_read_beside_many_jobs_of_other_tenants(
    person: MakePerson, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all tenants no index finds jobs by their status: such a view would be refused as too broad."""
    for number in range(6):
        await maker.make("run", scope="user", scope_id=str(number))
    monkeypatch.setattr(job_lists, "MAX_READ", 9)
    for tenant, scopes in (("elsewhere", ROLES["admin"]), ("elsewhere", ROLES["viewer"])):
        somebody = await person(scopes, tenant=tenant)
        views = re.findall(
            r'<a href="/console(/jobs\?q=[^"]+)"',
            await somebody.see("/jobs?q=created:<1m+code:none", 422)
            if scopes is ROLES["admin"]
            else await somebody.see("/jobs"),
        )
        assert len(views) >= 6
        for view in views:
            if "created" not in view:
                await somebody.see(view.replace("&amp;", "&"))


async def test_a_search_that_found_nothing_yet_goes_on_further_back(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [await maker.make("run") for _ in range(3)]
    await rows.execute("UPDATE task SET queue = 'rare' WHERE job_id = $1", made[0])
    monkeypatch.setattr(job_lists, "MAX_READ_BY_QUEUE", 2 * 5)
    somebody = await person()
    page = await somebody.see("/jobs?q=queue:rare")
    assert "No job of those searched matches." in page
    assert "No job matches." not in page
    further = re.search(r'<a href="/console(/jobs[^"]+)">Search further back<', page)
    assert further is not None
    assert str(made[0]) in await somebody.see(further[1].replace("&amp;", "&"))
    assert "No job matches." in await somebody.see("/jobs?q=queue:nowhere+created:>1h")


class Broken:
    """A broker that is away, as the process's readiness and its self-check say it, each in its own words."""

    async def checks(self) -> list[Check]:
        return [Check("database", ok=True, required=True, detail="migrated"),
                Check("broker", ok=False, required=False, detail="amqp is not connected")]  # fmt: skip

    async def findings(self) -> list[SelfCheck]:
        return [
            SelfCheck("broker", ok=False, found="not connected", meaning="workers poll the database"),
            SelfCheck("store", ok=False, found="ignores If-None-Match", meaning="two writers may race"),
        ]


async def test_a_part_that_does_not_answer_has_one_line(person: MakePerson, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.api.console.findings.readiness_of", lambda _: Broken())
    page = await (await person(ROLES["admin"])).see("/")
    assert "The broker: amqp is not connected. Workers poll the database." in page
    assert page.count("not connected") == 1
    assert "The store: ignores If-None-Match. Two writers may race." in page
    page = await (await person(ROLES["viewer"])).see("/")
    assert ("The broker: amqp is not connected." in page, "Workers poll" in page) == (True, False)
