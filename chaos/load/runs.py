"""The clients of runs over HTTP: they start runs singly and in batches, and cancel, retry and rerun them."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from itertools import cycle

from chaos.load.client import AGAIN_SECONDS, PATIENCE_SECONDS, Client, Outcome
from chaos.load.diary import Diary, Sender
from chaos.pipelines import BROKEN, MENDED, STOPPABLE, mendable, short, wrong
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.states import JOB_TERMINAL

_ENDPOINT = "POST /v1/runs"
SCOPE = "chaos"
_BATCH = 4
#: How long a client waits until a run fails. The faults may delay it.
_TO_FAIL_SECONDS = 60.0
#: The share of runs that are followed.
_FOLLOWED = 0.2
#: The share of runs that are sent without a key, and only once: a repetition could make a second run.
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
    """Start a run, and record the request. Returns the run's id; "" if the client did not learn it."""
    key = diary.key()
    keyless = not kind and diary.rng.random() < _KEYLESS
    outcome = await client.request(
        "POST", "/v1/runs",
        {"template": template, "payload": payload, "scope": SCOPE, "scope_id": key} | ({"tags": tags} if tags else {}),
        key="" if keyless else key, again=not keyless and diary.is_sent_twice(),
        patience=0.0 if keyless else PATIENCE_SECONDS,
    )  # fmt: skip
    jobs = tuple((str(body["id"]),) for body in outcome.answered)
    job = jobs[-1][0] if jobs else ""
    diary.record(kind or template, tenant, key, outcome, job=job, endpoint=_ENDPOINT, answers=jobs)
    return job


def starter(diary: Diary, pipeline: Pipeline) -> Sender:
    """Starts runs, and follows the events of some. It does not follow runs of `wrong`: they end twice, because the
    replayer replays them.
    """

    async def send(tenant: str) -> None:
        client = diary.client(tenant)
        followed = diary.rng.random() < _FOLLOWED and pipeline is not wrong
        job = await start(diary, client, tenant, pipeline.name, diary.words())
        if job and followed:
            diary.follow(client, job, f"/v1/runs/{job}/events")

    return send


def batcher(diary: Diary) -> Sender:
    async def send(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        runs = [{"payload": diary.words(), "scope_id": key} for _ in range(_BATCH)]
        body = {"template": short.name, "scope": SCOPE, "runs": runs}
        outcome = await client.request("POST", "/v1/runs/batch", body, key=key, again=diary.is_sent_twice())
        jobs = tuple(tuple(map(str, body["ids"])) for body in outcome.answered)
        job = jobs[-1][0] if jobs else ""
        diary.record(
            "batch", tenant, key, outcome, job=job, endpoint="POST /v1/runs/batch", answers=jobs, jobs_requested=_BATCH
        )

    return send


def canceller(diary: Diary) -> Sender:
    """Cancels runs, some immediately and some while they run. It uses the endpoints of runs and of jobs in turn."""
    surfaces = cycle(("runs", "jobs"))

    async def send(tenant: str) -> None:
        client = diary.client(tenant)
        template, while_running = diary.rng.choice(STOPPABLE), diary.rng.random() < 0.6  # noqa: PLR2004 - a little more
        job = await start(diary, client, tenant, template.name, diary.words())
        if not job:
            return
        if while_running:
            await wait_for_status(client, job, "running")
        surface = next(surfaces)
        outcome = await client.request("POST", f"/v1/{surface}/{job}/cancel")
        diary.record(
            "cancel", tenant, f"cancel {job}", outcome,
            job=job, endpoint=f"POST /v1/{surface}/cancel", answer=of_cancel(outcome),
        )  # fmt: skip

    return send


def unknown_if_missing(outcome: Outcome) -> str:
    """The value of `Request.answer`. `unknown`: an API process of the old release answered, which lacks the endpoint.
    An API process of this code may have carried out an earlier try.
    """
    return "unknown" if outcome.status == HTTPStatus.NOT_FOUND else ""


def of_cancel(outcome: Outcome) -> str:
    """The value of `Request.answer` for a cancel. `accepted`: the run is cancelled; `stopping`: it was asked to stop;
    `refused`: it had ended before.
    """
    if outcome.good:
        return "accepted" if outcome.body["status"] == "cancelled" else "stopping"
    if outcome.tries > 1 and "is cancelled" in outcome.body.get("detail", ""):
        return "accepted"  # an earlier try cancelled it, and its answer was lost
    return outcome.answer


async def wait_for_status(client: Client, job: str, *statuses: str, seconds: float = PATIENCE_SECONDS) -> str:
    """Wait until the run has one of `statuses` or has ended. Returns its status; "" if the client did not learn it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        outcome = await client.request("GET", f"/v1/runs/{job}", patience=0.0)
        status = str(outcome.body.get("status", ""))
        if status in statuses or status in JOB_TERMINAL:
            return status
        await asyncio.sleep(AGAIN_SECONDS)
    return ""


def mender(diary: Diary) -> Sender:
    """Starts runs that fail because of their payload, and retries each with another payload. It uses the endpoints of
    dead letters, runs and jobs in turn.
    """
    surfaces = cycle(("dead-letters", "runs", "jobs"))

    async def send(tenant: str) -> None:
        client, surface = diary.client(tenant), next(surfaces)
        job = await start(diary, client, tenant, mendable.name, {"text": BROKEN}, kind="broken")
        if not job or await wait_for_status(client, job, "failed", seconds=_TO_FAIL_SECONDS) != "failed":
            return
        path = await _replay_path(client, job) if surface == "dead-letters" else f"/v1/{surface}/{job}/retry"
        if not path:
            return
        outcome = await client.request("POST", path, {"payload": {"text": MENDED}})
        endpoint = f"POST /v1/{surface} once more"
        answer = _of_retry(outcome)
        diary.record("mended", tenant, f"mended {job}", outcome, job=job, endpoint=endpoint, answer=answer)

    return send


def _of_retry(outcome: Outcome) -> str:
    """The value of `Request.answer`. An earlier try may have retried the run and lost its answer."""
    is_done_earlier = outcome.status == HTTPStatus.CONFLICT or outcome.is_gone
    return "accepted" if is_done_earlier and outcome.tries > 1 else ""


async def _replay_path(client: Client, job: str) -> str:
    """The path that replays the run's dead letter; "" if the list lacks it."""
    letters = await client.request("GET", f"/v1/dead-letters?template={mendable.name}&limit=100")
    task_ids = [letter["task_id"] for letter in letters.body.get("dead_letters", ()) if job in letter.values()]
    return f"/v1/dead-letters/{task_ids[0]}/replay" if task_ids else ""


def replayer(diary: Diary) -> Sender:
    """Replays all dead letters of a template at once. They fail again."""

    async def send(tenant: str) -> None:
        client, key, body = diary.client(tenant), diary.key(), {"template": wrong.name, "limit": 2}
        path, again = "/v1/dead-letters/replay", diary.is_sent_twice()
        outcome = await client.request("POST", path, body, key=key, again=again)
        jobs = tuple(tuple(map(str, answer["replayed"])) for answer in outcome.answered)
        diary.record("replayed", tenant, f"replayed {key}", outcome, endpoint=f"POST {path}", answers=jobs)

    return send


def repeater(diary: Diary) -> Sender:
    """Starts runs, and reruns each with a key of its own."""

    async def send(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        job = await start(diary, client, tenant, short.name, diary.words())
        if not job:
            return
        outcome = await client.request("POST", f"/v1/runs/{job}/rerun", key=key, again=diary.is_sent_twice())
        jobs = tuple((str(body["id"]),) for body in outcome.answered)
        new_job = jobs[-1][0] if jobs else ""
        diary.record("rerun", tenant, key, outcome, job=new_job, endpoint="POST /v1/runs/rerun", answers=jobs)

    return send
