"""The graph of a job's steps, and the ledger of what its workers wrote, on the job's page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from leasehold.api.console import job
from leasehold.api.console.graph import Graph, graph_of, needs_of
from leasehold.db import job_reads
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.transitions import settlements
from leasehold.transitions.settlements import Failure
from tests.console.conftest import ROLES, MakePerson
from tests.jobs.conftest import Maker


def tasks(needs: dict[str, str], **states: str) -> list[Any]:
    """The tasks of steps that need others; `name:parent` is a part of a fan-out."""
    ids = {name.partition(":")[0]: new_id() for name in needs}
    made = []
    for name in needs:
        step, _, parent = name.partition(":")
        following = [ids[other.partition(":")[0]] for other, needed in needs.items() if step in needed.split()]
        made.append({
            "id": ids[step], "step": step, "status": states.get(step, "succeeded"), "contained": False,
            "unblocks": [ids[parent]] if parent else following, "parent_id": ids[parent] if parent else None,
        })  # fmt: skip
    return made


def drawn(needs: dict[str, str], **states: str) -> Graph:
    graph = graph_of(tasks(needs, **states))
    assert graph is not None
    return graph


def test_a_chain_and_a_workflow_have_no_graph() -> None:
    assert graph_of(tasks({"a": "", "b": "a", "c": "b"})) is None
    workflow = tasks({"flow": "", "one:flow": "", "two:flow": ""})
    assert graph_of(workflow) is not None
    assert graph_of([task | {"contained": task["parent_id"] is not None} for task in workflow]) is None
    assert graph_of([]) is None


def test_steps_stand_to_the_right_of_what_they_need() -> None:
    graph = drawn({"d": "b c", "a": "", "b": "a", "c": "a", "e": "a d"}, c="failed")
    columns = {box.step: box.x for box in graph.boxes}
    assert columns["a"] < columns["b"] == columns["c"] < columns["d"] < columns["e"]
    assert len({(box.x, box.y) for box in graph.boxes}) == 5
    assert len(graph.paths) == 6
    assert {box.step for box in graph.boxes if box.state == "failed"} == {"c"}
    assert all(0 <= box.x < graph.width and 0 <= box.y < graph.height for box in graph.boxes)


def test_many_parts_are_one_box_in_the_worst_state() -> None:
    few = drawn({"split": "", **{f"part.{n}:split": "" for n in range(6)}, "join": "split"})
    assert len(few.boxes) == 8
    parts = {f"part.{n}:split": "" for n in range(7)}
    many = drawn({"split": "", **parts, "join": "split"}, **{"part.3": "running", "part.4": "failed"})
    (crowd,) = [box for box in many.boxes if not box.step]
    assert (crowd.name, crowd.state) == ("7 part", "failed")
    assert crowd.words == "7 part: 5 succeeded, 1 running, 1 failed"
    assert len(many.paths) == 2


def test_too_many_boxes_are_no_picture() -> None:
    assert graph_of(tasks({"a": "", **{f"b{n}": "a" for n in range(59)}})) is not None
    assert graph_of(tasks({"a": "", **{f"b{n}": "a" for n in range(60)}})) is None


def test_a_part_needs_the_step_that_fanned_out() -> None:
    needs = needs_of(tasks({"split": "", "part.0:split": "", "join": "split"}))
    assert needs == {"split": [], "part.0": ["split"], "join": ["split"]}


async def test_the_page_of_a_job_with_branches_draws_them(person: MakePerson, maker: Maker) -> None:
    somebody = await person(ROLES["viewer"])
    assert 'class="graph"' not in await somebody.see(f"/jobs/{await maker.make('media')}")
    steps: list[dict[str, Any]] = [{"id": "a"}, {"id": "b", "needs": ["a"]}, {"id": "c", "needs": ["a"]}]
    body = {"type": "branched", "steps": [step | {"queue": "q"} for step in steps]}
    assert (await maker.client.post("/v1/templates", json=body)).status_code == 201
    run = UUID((await maker.client.post("/v1/runs", json={"template": "branched"})).json()["id"])
    page = await somebody.see(f"/jobs/{run}")
    assert page.count('<path d="M') == 2
    assert "<title>b: blocked</title>" in page
    claimed = await maker.claim(run)
    page = await somebody.see(f"/jobs/{run}")
    assert "Ledger" in page
    assert f'data-copy="{claimed.lease.owner}"' in page
    await maker.succeed_from(claimed)
    page = await somebody.see(f"/jobs/{run}")
    assert "<title>a: succeeded</title>" in page
    assert page.count("<td>completed</td>") == 2 * 3  # of three steps, in the ledger and among the events


async def test_a_part_of_a_fan_out_waits_from_when_it_was_made(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """And not from the beginning of its job."""
    run = await maker.make("run")
    await rows.execute("UPDATE job SET created_at = created_at - interval '1 day' WHERE id = $1", run)
    parent, part = await rows.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = 'a'", run), new_id()
    await rows.execute(
        "INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, unblocks, max_attempts)"
        " VALUES ($1, $2, 'acme', 'a.0', 0, 'q', 1, 'pending', ARRAY[$3::uuid], 1)",
        part, run, parent,
    )  # fmt: skip
    await rows.execute("INSERT INTO item (task_id, parent_id, number, value) VALUES ($1, $2, 0, '1')", part, parent)
    page = await (await person()).see(f"/jobs/{run}")
    line = page[page.index('aria-label="a.0: ') :].split("</svg>")[0]
    assert 'class="wait" x="997"' in line, line


async def test_a_long_ledger_shows_its_end(
    person: MakePerson, maker: Maker, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await maker.make("run")
    for _ in range(3):
        claimed = await maker.claim(run)
        await settlements.fail(rows, [Failure(claimed.lease, "error", "flaky", "again", True, 0.0)])
    whole = (await maker.client.get(f"/v1/jobs/{run}/explain")).json()["ledger"]
    assert len(whole) == 6
    last = await job_reads.ledger(rows, "acme", run, 2)
    assert [row["seq"] for row in last] == [entry["seq"] for entry in whole[-2:]]
    somebody = await person(ROLES["viewer"])
    page = await somebody.see(f"/jobs/{run}")
    assert page.count('<rect class="no"') == 3 + 1  # and in the legend
    monkeypatch.setattr(job, "_DEPTH", replace(job._DEPTH, entries=2))
    page = await somebody.see(f"/jobs/{run}")
    assert "the last entries" in page
    assert page.count('<rect class="no"') == 1 + 1
    assert page.count('<rect class="wait"') == 1 + 1  # for the next attempt: the first wait is not known
