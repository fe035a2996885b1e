"""The client of bulk operations. Each operation retries failed runs, or cancels running runs, by a tag of its own."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Literal

from chaos.evidence import Operation
from chaos.load.client import Client
from chaos.load.diary import Diary, Sender
from chaos.load.runs import start, unknown_if_missing, wait_for_status
from chaos.pipelines import BROKEN, long, mendable

#: The tag by which an operation finds its runs.
TAG = "operation"
_ENDPOINT = "POST /v1/operations"
#: The runs of an operation, and how many of them it acts on in a second: at this rate each run is a batch of its own.
_TARGETS, _RATE = 3, 10
_TO_FAIL_SECONDS = 90.0


def sender(diary: Diary) -> Sender:
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
            "operation",
            tenant,
            key,
            outcome,
            job=job,
            endpoint=_ENDPOINT,
            answers=jobs,
            answer=unknown_if_missing(outcome),
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
    if job and await wait_for_status(client, job, "failed", seconds=_TO_FAIL_SECONDS) == "failed":
        return job
    return ""
