"""Who acts beside others, twice, or on a stale page: one act is done, and everybody sees what is true now."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from dataclasses import replace
from html import unescape
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.transitions import claims, settlements, sweeps
from leasehold.transitions.settlements import Completion, Failure, Output
from tests.api.conftest import Running
from tests.api.driver import TERMS
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker
from tests.jobs.test_operations import ended, operating, submit
from tests.support.not_here import not_here

_SEEN = re.compile(r'name="seen" value="(\d+)"')
_FLASH = re.compile(r'<p class="flash (good|bad)" role="status">([^<]*)</p>')


async def acts(rows: Connection, job_id: UUID) -> list[tuple[str, str]]:
    found = await rows.fetch("SELECT actor, action FROM audit WHERE target = $1 ORDER BY seq", str(job_id))
    return [(row["actor"], row["action"]) for row in found]


def flash_of(page: str) -> tuple[str, str]:
    found = _FLASH.search(page)
    assert found is not None, page
    return found[1], unescape(found[2])


def seen_in(page: str) -> str:
    return str(_SEEN.findall(page)[0])


async def test_two_people_who_act_on_the_same_job_both_see_what_happened(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    anna, bert = await person(name="anna"), await person(name="bert")
    job_id = await maker.make("run")
    await maker.fail(job_id)
    path = f"/jobs/{job_id}"
    seen = [seen_in(await one.see(path)) for one in (anna, bert)]
    assert flash_of(await anna.do(f"{path}/retry", back=path, seen=seen[0])) == ("good", "The job runs again.")
    good, sentence = flash_of(await bert.do(f"{path}/retry", back=path, seen=seen[1]))
    assert good == "bad"
    assert re.fullmatch(
        r"The job has changed since you opened its page: it is waiting worker. anna retried it \d+ s ago.", sentence
    )
    assert "<dd><bdi>anna</bdi> retried it" in await bert.see(path)
    assert flash_of(await bert.do(f"{path}/cancel", back=path, reason="wrong order"))[0] == "good"
    good, sentence = flash_of(await anna.do(f"{path}/cancel", back=path))
    assert good == "bad"
    assert re.fullmatch(r"The job is cancelled: its state does not allow this. bert cancelled it \d+ s ago.", sentence)
    for one in (anna, bert):
        page = await one.see(path)
        listed = page[page.index(">Acts <") :].split("</table>")[0]
        assert re.findall(r"<bdi>(\w+)</bdi></td><td>(\w+)<", listed) == [("bert", "cancelled"), ("anna", "retried")]
        assert "reason wrong order" in listed
    assert await acts(rows, job_id) == [("anna", "job.retried"), ("bert", "job.cancelled")]


async def test_a_job_names_the_bulk_operations_that_acted_on_it(
    person: MakePerson, maker: Maker, rows: Connection, running: Running
) -> None:
    """With a link to each, for as long as the operation exists and for who may see it."""
    somebody, job_id = await person(name="anna"), await maker.make("run")
    await maker.fail(job_id)
    operations = []
    async with operating(running.services.settings):
        for action, q in (("retry", "status:failed"), ("cancel", "kind:run")):
            operations.append(await submit(maker.client, action, q, reason="the disk is mended"))
            assert (await ended(maker.client, operations[-1]))["acted"] == 1
    page = await somebody.see(f"/jobs/{job_id}")
    listed = page[page.index(">Acts <") :].split("</table>")[0]
    acts_listed = re.findall(r"<bdi>(\w+)</bdi></td><td>(\w+)<.*?operation (<a[^>]*>)", listed)
    links = [f'<a href="/console/operations/{operation}">' for operation in operations]
    assert acts_listed == [("tests", "cancelled", links[1]), ("tests", "retried", links[0])]
    assert f"by the operation {links[1]}" in page.split('<dl class="facts">')[1].split("</dl>")[0]
    await somebody.see(f"/operations/{operations[0]}")
    late = flash_of(await somebody.do(f"/jobs/{job_id}/cancel", back=f"/jobs/{job_id}"))[1]
    assert re.search(r"tests cancelled it \d+ s ago\.$", late)
    await rows.execute("UPDATE job SET tenant_id = 'platform' WHERE id = $1", UUID(operations[1]))
    tenants_own = await person(ROLES["viewer"])
    page = await tenants_own.see(f"/jobs/{job_id}")
    assert (links[0] in page, links[1] in page) == (True, False)


async def test_a_second_press_of_a_button_does_nothing_more(person: MakePerson, maker: Maker, rows: Connection) -> None:
    """Without JavaScript a browser sends the form twice, and shows the answer to the second."""
    somebody = await person()
    job_id = await maker.make("run")
    await maker.fail(job_id)
    path = f"/jobs/{job_id}"
    seen = seen_in(await somebody.see(path))
    for _ in range(2):
        answer = await somebody.do(f"{path}/retry", back=path, seen=seen)
        assert flash_of(answer) == ("good", "The job runs again.")
    await maker.fail(job_id)  # before the browser sent the form a third time
    await somebody.do(f"{path}/retry", back=path, seen=seen)
    assert await rows.fetchval("SELECT status FROM job WHERE id = $1", job_id) == "failed"
    assert len(await acts(rows, job_id)) == 1
    await somebody.do(f"{path}/retry", back=path, seen=seen_in(await somebody.see(path)))  # who saw that it failed
    for _ in range(2):
        assert flash_of(await somebody.do(f"{path}/cancel", back=path)) == ("good", "The job is cancelled.")
    first, second = [await somebody.do(f"{path}/delete", back=path) for _ in range(2)]
    assert flash_of(first) == ("good", f"The job {job_id} is deleted.")
    assert flash_of(second)[1].startswith("The job was deleted at ")
    assert [action for _, action in await acts(rows, job_id)] == [
        "job.retried", "job.retried", "job.cancelled", "job.deleted",
    ]  # fmt: skip


async def test_a_page_of_a_failure_that_is_over_retries_nothing(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """Somebody else retried the job since, and it failed again: the page showed another failure."""
    anna, bert = await person(name="anna"), await person(name="bert")
    job_id = await maker.make("run")
    await maker.fail(job_id, "no_space")
    path = f"/jobs/{job_id}"
    stale = seen_in(await bert.see(path))
    await anna.do(f"{path}/retry", back=path, seen=stale)
    await maker.fail(job_id, "no_memory")
    page = await bert.do(f"{path}/retry", back=path, seen=stale)
    assert flash_of(page)[0] == "bad"
    assert "it is failed. anna retried it" in page
    assert "<b>no_memory</b>" in page
    assert await acts(rows, job_id) == [("anna", "job.retried")]
    assert flash_of(await bert.do(f"{path}/retry", back=path, seen=seen_in(page)))[0] == "good"


@pytest.mark.parametrize("how", ["deleted", "kept until"])
@pytest.mark.parametrize("act", ["retry", "cancel", "signals/approved"])
async def test_an_act_on_a_job_that_went_answers_its_tombstone(
    person: MakePerson, maker: Maker, rows: Connection, act: str, how: str
) -> None:
    somebody = await person()
    job_id = await maker.make("run")
    await maker.fail(job_id)
    path = f"/jobs/{job_id}"
    seen = seen_in(await somebody.see(path))
    if how == "deleted":
        assert (await maker.client.delete(f"/v1{path}")).status_code == 204
    else:
        await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 second'")
        await sweeps.forget_jobs(rows, [job_id])
    page = await somebody.do(f"{path}/{act}", back=path, seen=seen)
    assert flash_of(page)[0] == "bad"
    if act != "signals/approved":  # of a run, whose own answer is that there is none
        assert f"The job was {how} " in flash_of(page)[1]
    assert f"The job was {how} " in await somebody.see(path, 410)
    assert flash_of(await somebody.do(f"{path}/delete", back=path))[1].startswith(f"The job was {how} ")


async def test_a_page_of_an_ended_job_is_refreshed_without_being_made_again(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And shows what somebody else has done with the job."""
    somebody = await person()
    job_id = await maker.make("run")
    await maker.fail(job_id)
    path = f"/console/jobs/{job_id}"
    answer = await somebody.http.get(path)
    assert 'data-live="10"' in answer.text
    mark = {"X-Console-Mark": answer.headers["x-console-mark"], "HX-Request": "true"}
    with monkeypatch.context() as patch:
        patch.delattr("leasehold.api.console.job.explain")  # an unchanged page reads no explanation
        assert (await somebody.http.get(path, headers=mark)).status_code == 204
    assert (await maker.client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    answer = await somebody.http.get(path, headers=mark)
    assert (answer.status_code, 'data-live="2"' in answer.text) == (200, True)
    assert "<bdi>tests</bdi> retried it" in answer.text
    assert await acts(rows, job_id) == [("tests", "job.retried")]


async def test_the_ledger_says_which_worker_and_epoch_wrote_what(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """A worker that was lost, and the one that took the step over."""
    job_id, heir = await maker.make("media"), new_id()
    lost = await maker.claim(job_id)
    task_id = lost.lease.task_id
    await rows.execute("UPDATE task SET lease_until = clock_timestamp() - interval '1 hour' WHERE id = $1", task_id)
    (claimed,) = await claims.claim(rows, replace(TERMS, owner=heir), [task_id])
    output = Output("a.webp", f"{claimed.output_prefix}/a.webp", 1234, "ab" * 32, "image/webp")
    await settlements.complete(rows, [Completion(claimed.lease, [output], {"done": True})])
    page = await (await person(ROLES["viewer"])).see(f"/jobs/{job_id}")
    ledger = page[page.index(">Ledger <") :].split("</table>")[0]
    lines = [re.sub(r"<[^>]*>", "|", line) for line in ledger.split("</tr>")]
    found = [[part for part in line.split("|") if part.strip()][2:] for line in lines if claimed.step in line]
    assert found == [
        ["claimed", "1", str(TERMS.owner)[-12:]],
        ["taken over", "2", str(heir)[-12:]],
        ["completed", "2", str(heir)[-12:], "a.webp (1.2 kB, abababab)"],
    ]
    await maker.fail(job_id)
    assert (await maker.client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    page_after_retry = await (await person(ROLES["viewer"])).see(f"/jobs/{job_id}")
    replayed = re.search(r"<td>replayed</td>.*", page_after_retry)
    assert replayed is not None
    assert "<button" not in replayed[0].split("</tr>")[0], "no worker wrote it"
    bars = re.findall(r'<rect class="(\w+)" x', page[page.index(f'aria-label="{claimed.step}: ') :].split("</svg>")[0])
    assert [shade for shade in bars if shade != "wait"] == ["lost", "ok"]


def ledger_of(page: str) -> list[tuple[str, str]]:
    """What each entry of the ledger says was written, and the end of the worker's id; empty: it names no worker."""
    ledger = page[page.index(">Ledger <") :].partition("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in ledger.split("</tr>")[1:-1]]
    return [(row[2], re.sub(r"<[^>]*>", "", row[4])) for row in rows]


async def test_the_ledger_names_no_worker_for_what_a_sweep_wrote(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """The worker was lost: it wrote nothing more. The last of its losses fails the step."""
    job_id = await maker.make("media")
    lost = await maker.claim(job_id)
    await rows.execute("UPDATE task SET lease_until = clock_timestamp() - interval '1 hour' WHERE job_id = $1", job_id)
    await sweeps.expire_leases(rows, [], max_losses=0)
    worker = str(TERMS.owner)[-12:]
    assert ledger_of(await (await person(ROLES["viewer"])).see(f"/jobs/{job_id}"))[:2] == [
        ("claimed", worker), ("failed", "")
    ]  # fmt: skip
    explained = (await maker.client.get(f"/v1/jobs/{job_id}/explain")).json()["ledger"]
    assert [(entry["kind"], entry.get("cause")) for entry in explained][:2] == [("claimed", None), ("failed", "loss")]
    assert explained[0]["worker"] == str(lost.lease.owner)


@pytest.mark.parametrize(
    ("kind", "cause", "is_by_worker"),
    [("media", "error", True), ("media", "timeout", True), ("run", "error", True), ("run", "timeout", False)],
)
async def test_the_ledger_names_the_worker_of_what_it_reported_itself(
    person: MakePerson, maker: Maker, rows: Connection, kind: str, cause: str, is_by_worker: bool
) -> None:
    """A sweep or the API ends a step of a run that an external worker has for too long."""
    job_id, worker = await maker.make(kind), str(TERMS.owner)[-12:]
    for retryable in (True, False):
        failure = Failure((await maker.claim(job_id)).lease, cause, "step_timeout", "m", retryable, 0.0)
        await settlements.fail(rows, [failure])
    shown = ledger_of(await (await person(ROLES["viewer"])).see(f"/jobs/{job_id}"))
    by = worker if is_by_worker else ""
    assert shown[:4] == [("claimed", worker), ("retried", by), ("claimed", worker), ("failed", by)]


async def test_the_command_to_copy_does_what_the_page_shows(
    person: MakePerson, maker: Maker, rows: Connection, running: Running
) -> None:
    """Of a run, another run with the same payload; of any other job, its JSON."""
    if shutil.which("curl") is None:
        not_here("curl")
    somebody = await person()
    payload = {"name": 'O\'Neill & "Söhne" $HOME'}
    for kind, more in (("run", {"payload": payload}), ("media", {})):
        job_id = await maker.make(kind, **more)
        found = re.search(r'data-copy="(curl [^"]+)"', await somebody.see(f"/jobs/{job_id}"))
        assert found is not None
        command = await asyncio.create_subprocess_shell(
            unescape(found[1]),
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "LEASEHOLD_API_KEY": somebody.key.text},
        )
        answer = json.loads((await command.communicate())[0])
        if kind == "run":
            assert await rows.fetchval("SELECT params FROM job WHERE id = $1", UUID(answer["id"])) == payload
            assert answer["id"] != str(job_id)
        else:
            assert answer["id"] == str(job_id)
