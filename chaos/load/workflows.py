"""The clients of workflows: they start workflows, and send each its signal or its cancel."""

from __future__ import annotations

import asyncio

from chaos.load.client import Client
from chaos.load.diary import Diary, Sender
from chaos.load.runs import SCOPE, of_cancel, unknown_if_missing, wait_for_status
from chaos.pipelines import UNDOING_WORKFLOW

_TO_WAIT_SECONDS = 1.0
#: The share of workflows that are cancelled after they have begun.
_CANCELLED_AFTER_BEGIN = 0.8


def signaller(diary: Diary) -> Sender:
    """Starts workflows, and sends each the signal that it waits for: before it waits, or while it does."""

    async def send(tenant: str) -> None:
        client = diary.client(tenant)
        job = await _workflow(diary, client, tenant, "chaos.stages")
        if job:
            diary.follow(client, job, f"/v1/runs/{job}/events")
            await asyncio.sleep(diary.rng.uniform(0.0, _TO_WAIT_SECONDS))
            await client.request("POST", f"/v1/runs/{job}/signals/go", {"payload": None}, key=diary.key())

    return send


def canceller(diary: Diary) -> Sender:
    """Starts workflows and cancels them: before they begin, while they run a step, or while they wait."""

    async def send(tenant: str) -> None:
        client = diary.client(tenant)
        job = await _workflow(diary, client, tenant, UNDOING_WORKFLOW)
        if not job:
            return
        if diary.rng.random() < _CANCELLED_AFTER_BEGIN:
            await wait_for_status(client, job, "running")
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
        "workflow",
        tenant,
        key,
        outcome,
        job=job,
        endpoint="POST /v1/runs",
        answers=jobs,
        answer=unknown_if_missing(outcome),
    )
    return job
