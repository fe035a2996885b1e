"""Bulk operations and workflows. An operation retries failed runs, or cancels running ones, that have a tag of its own.
A workflow gets its signal, or its cancel, while it runs or waits.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from itertools import cycle
from typing import Literal

from chaos.evidence import Operation
from chaos.load.client import Client, Outcome
from chaos.load.diary import Diary, Sender
from chaos.load.runs import SCOPE, of_cancel, start, until
from chaos.pipelines import BROKEN, TAKES_BACK, long, mendable

#: The tag by which an operation finds its runs.
TAG = "operation"
_ENDPOINT = "POST /v1/operations"
#: The runs of an operation, and how many of them it acts on in a second: at this rate each run is a batch of its own.
_TARGETS, _RATE = 3, 10
_TO_FAIL_SECONDS = 90.0
_TO_WAIT_SECONDS = 1.0
#: The share of workflows that are cancelled after they have begun.
_AFTER_ITS_BEGIN = 0.8


def operator(diary: Diary) -> Sender:
    actions: cycle[Literal["retry", "cancel"]] = cycle(("retry", "cancel"))

    async def send(tenant: str) -> None:
        client, key, action = diary.client(tenant), diary.key(), next(actions)
        targets = await asyncio.gather(*(_target(diary, client, tenant, key, action) for _ in range(_TARGETS)))
        known = tuple(target for target in targets if target)
        if not known:
            return
        diary.operations.append(Operation(tenant, action, key, known))
        body = {"action": action, "filter": f"tag.{TAG}:{key}", "rate": _RATE}
        outcome = await client.request("POST", "/v1/operations", body, key=key, again=diary.is_sent_twice())
        jobs = tuple((str(body["id"]),) for body in outcome.answered)
        job = jobs[-1][0] if jobs else ""
        diary.record(
            "operation", tenant, key, outcome, job=job, endpoint=_ENDPOINT, answers=jobs, answer=_of_old(outcome)
        )

    return send


async def _target(diary: Diary, client: Client, tenant: str, key: str, action: str) -> str:
    """Start a run for the operation. Returns its id; "" if the client did not learn the id, or the run did not fail in
    time.
    """
    tags = {TAG: key}
    if action == "cancel":
        return await start(diary, client, tenant, long.name, diary.words(), kind=long.name, tags=tags)
    job = await start(diary, client, tenant, mendable.name, {"text": BROKEN}, kind="broken", tags=tags)
    if job and await until(client, job, "failed", seconds=_TO_FAIL_SECONDS) == "failed":
        return job
    return ""


def _of_old(outcome: Outcome) -> str:
    """`unknown` if an API of the release answered, which lacks the endpoint: an earlier try may have met a new API."""
    return "unknown" if outcome.status == HTTPStatus.NOT_FOUND else ""


def conductor(diary: Diary) -> Sender:
    """Starts workflows, and sends each the signal that it waits for: before it waits, or while it waits."""

    async def send(tenant: str) -> None:
        client = diary.client(tenant)
        job = await _workflow(diary, client, tenant, "chaos.stages")
        if job:
            diary.follow(client, job, f"/v1/runs/{job}/events")
            await asyncio.sleep(diary.rng.uniform(0.0, _TO_WAIT_SECONDS))
            await client.request("POST", f"/v1/runs/{job}/signals/go", {"payload": None}, key=diary.key())

    return send


def takes_back(diary: Diary) -> Sender:
    """Starts workflows and cancels them: before they begin, while they run a step, or while they wait."""

    async def send(tenant: str) -> None:
        client = diary.client(tenant)
        job = await _workflow(diary, client, tenant, TAKES_BACK)
        if not job:
            return
        if diary.rng.random() < _AFTER_ITS_BEGIN:
            await until(client, job, "running")
        await asyncio.sleep(diary.rng.uniform(0.0, _TO_WAIT_SECONDS))
        outcome = await client.request("POST", f"/v1/runs/{job}/cancel")
        diary.record(
            "cancel", tenant, f"cancel {job}", outcome,
            job=job, endpoint="POST /v1/runs/cancel", answer=of_cancel(outcome),
        )  # fmt: skip

    return send


async def _workflow(diary: Diary, client: Client, tenant: str, template: str) -> str:
    """Start a run of the workflow. Returns its id; "" if the client did not learn it."""
    key = diary.key()
    body = {"template": template, "payload": diary.words(), "scope": SCOPE, "scope_id": key}
    outcome = await client.request("POST", "/v1/runs", body, key=key, again=diary.is_sent_twice())
    jobs = tuple((str(body["id"]),) for body in outcome.answered)
    job = jobs[-1][0] if jobs else ""
    diary.record(
        "workflow", tenant, key, outcome, job=job, endpoint="POST /v1/runs", answers=jobs, answer=_of_old(outcome)
    )
    return job
