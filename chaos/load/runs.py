"""Runs over HTTP: one at a time and in batches, cancelled while they wait and while they run, retried, and rerun."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from itertools import cycle

from chaos.load.client import AGAIN_SECONDS, PATIENCE, Client, Outcome
from chaos.load.diary import Ask, Diary
from chaos.pipelines import BROKEN, MENDED, STOPPABLE, mendable, short, wrong
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.states import JOB_TERMINAL

_DOOR = "POST /v1/runs"
SCOPE = "chaos"
_BATCH = 4
#: How long a client waits for a run to fail, which the faults may hold up.
_TO_FAIL_SECONDS = 60.0
#: How many runs are followed.
_FOLLOWED = 0.2
#: How many runs are sent without a key, and only once: nobody may repeat those.
_KEYLESS = 0.2


async def start(
    diary: Diary,
    client: Client,
    tenant: str,
    template: str,
    payload: dict[str, str],
    *,
    kind: str = "",
    tags: dict[str, str] | None = None,
) -> str:
    """Ask for a run, and write that down. Returns its id, or "" when it was never learnt."""
    key = diary.key()
    keyless = not kind and diary.rng.random() < _KEYLESS
    outcome = await client.ask(
        "POST", "/v1/runs",
        {"template": template, "payload": payload, "scope": SCOPE, "scope_id": key, "tags": tags or {}},
        key="" if keyless else key, again=not keyless and diary.asks_again(), patience=0.0 if keyless else PATIENCE,
    )  # fmt: skip
    jobs = tuple((str(body["id"]),) for body in outcome.answered)
    job = jobs[-1][0] if jobs else ""
    diary.note(kind or template, tenant, key, outcome, job=job, door=_DOOR, answers=jobs)
    return job


def starter(diary: Diary, pipeline: Pipeline) -> Ask:
    """Some of its runs are followed to their end, with cuts; not those that are replayed later, and so end twice."""

    async def ask(tenant: str) -> None:
        client = diary.client(tenant)
        followed = diary.rng.random() < _FOLLOWED and pipeline is not wrong
        job = await start(diary, client, tenant, pipeline.name, diary.words())
        if job and followed:
            diary.streams[job] = await client.follow(f"/v1/runs/{job}/events")

    return ask


def batcher(diary: Diary) -> Ask:
    async def ask(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        runs = [{"payload": diary.words(), "scope_id": key} for _ in range(_BATCH)]
        body = {"template": short.name, "scope": SCOPE, "runs": runs}
        outcome = await client.ask("POST", "/v1/runs/batch", body, key=key, again=diary.asks_again())
        jobs = tuple(tuple(map(str, body["ids"])) for body in outcome.answered)
        job = jobs[-1][0] if jobs else ""
        diary.note("batch", tenant, key, outcome, job=job, door="POST /v1/runs/batch", answers=jobs, made=_BATCH)

    return ask


def canceller(diary: Diary) -> Ask:
    """Half of the runs are cancelled at once, half while they run; as a run, or as a job of any kind."""
    surfaces = cycle(("runs", "jobs"))

    async def ask(tenant: str) -> None:
        client = diary.client(tenant)
        template, runs = diary.rng.choice(STOPPABLE), diary.rng.random() < 0.6  # noqa: PLR2004 - a little more
        job = await start(diary, client, tenant, template.name, diary.words())
        if not job:
            return
        if runs:
            await until(client, job, "running")
        surface = next(surfaces)
        outcome = await client.ask("POST", f"/v1/{surface}/{job}/cancel")
        diary.note(
            "cancel", tenant, f"cancel {job}", outcome,
            job=job, door=f"POST /v1/{surface}/cancel", answer=_of_cancel(outcome),
        )  # fmt: skip

    return ask


def _of_cancel(outcome: Outcome) -> str:
    """`accepted`: it is cancelled; `stopping`: it was asked to stop; `refused`: it ended before."""
    if outcome.good:
        return "accepted" if outcome.body["status"] == "cancelled" else "stopping"
    if outcome.tries > 1 and "is cancelled" in outcome.body.get("detail", ""):
        return "accepted"  # by an earlier try, whose answer was lost
    return outcome.answer


async def until(client: Client, job: str, *statuses: str, seconds: float = PATIENCE) -> str:
    """Wait until the run has one of `statuses` or has ended; returns the status, or "" when it was not learnt."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        looked = await client.ask("GET", f"/v1/runs/{job}", patience=0.0)
        status = str(looked.body.get("status", ""))
        if status in statuses or status in JOB_TERMINAL:
            return status
        await asyncio.sleep(AGAIN_SECONDS)
    return ""


def mender(diary: Diary) -> Ask:
    """A run that fails by its payload, and is retried with another: as a run, as a job, or by its dead letter."""
    surfaces = cycle(("dead-letters", "runs", "jobs"))

    async def ask(tenant: str) -> None:
        client, surface = diary.client(tenant), next(surfaces)
        job = await start(diary, client, tenant, mendable.name, {"text": BROKEN}, kind="broken")
        if not job or await until(client, job, "failed", seconds=_TO_FAIL_SECONDS) != "failed":
            return
        path = await _letter_of(client, job) if surface == "dead-letters" else f"/v1/{surface}/{job}/retry"
        if not path:
            return
        outcome = await client.ask("POST", path, {"payload": {"text": MENDED}})
        lost = outcome.tries > 1 and outcome.status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND)
        answer = "accepted" if lost else ""  # an earlier try mended it, whose answer was lost
        door = f"POST /v1/{surface} once more"
        diary.note("mended", tenant, f"mended {job}", outcome, job=job, door=door, answer=answer)

    return ask


async def _letter_of(client: Client, job: str) -> str:
    """Where the run's dead letter is replayed; "" when the list has it not."""
    letters = await client.ask("GET", f"/v1/dead-letters?template={mendable.name}&limit=100")
    mine = [one["task_id"] for one in letters.body.get("dead_letters", ()) if job in one.values()]
    return f"/v1/dead-letters/{mine[0]}/replay" if mine else ""


def replayer(diary: Diary) -> Ask:
    """All dead letters of a template at once, which fail again."""

    async def ask(tenant: str) -> None:
        body = {"template": wrong.name, "limit": 2}
        outcome = await diary.client(tenant).ask("POST", "/v1/dead-letters/replay", body)
        diary.note("replayed", tenant, f"replayed {diary.key()}", outcome, door="POST /v1/dead-letters/replay")

    return ask


def repeater(diary: Diary) -> Ask:
    """A run once more, by its own key."""

    async def ask(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        job = await start(diary, client, tenant, short.name, diary.words())
        if not job:
            return
        outcome = await client.ask("POST", f"/v1/runs/{job}/rerun", key=key, again=diary.asks_again())
        jobs = tuple((str(body["id"]),) for body in outcome.answered)
        made = jobs[-1][0] if jobs else ""
        diary.note("rerun", tenant, key, outcome, job=made, door="POST /v1/runs/rerun", answers=jobs)

    return ask
