"""External workers: clients that claim, renew and settle over HTTP. Some die while they hold a lease, and some fail."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

from chaos.evidence import ExternalLease
from chaos.load.client import AGAIN_SECONDS, Client
from chaos.load.diary import Diary
from chaos.pipelines import ABROAD_QUEUE
from chaos.settings import EXTERNAL_LEASE_SECONDS

_WORK_SECONDS = 0.4
_DIES, _FAILS = 0.1, 0.2


class ExternalWorkers:
    """`serve` runs one worker of a tenant until it is cancelled."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    async def serve(self, tenant: str) -> None:
        self._diary.seed_random(f"external {tenant}")
        rng = self._diary.rng
        client = self._diary.client(tenant)
        worker, has_claimed = uuid4().hex, False
        while True:
            claimed = await client.request("POST", "/v1/external/claim", {
                "worker_id": worker, "queues": [ABROAD_QUEUE], "limit": 2, "wait": 1,
                "lease_seconds": EXTERNAL_LEASE_SECONDS,
            })  # fmt: skip
            for task in claimed.body.get("tasks", ()):
                luck = rng.random() if has_claimed else _DIES  # the tenant's first task fails
                has_claimed = True
                if luck < _DIES:  # the worker dies with its leases, and a worker with another id begins
                    self._note(tenant, worker, task, claimed.answered_at, "died")
                    worker = uuid4().hex
                    break
                await self._work(client, tenant, worker, task, claimed.answered_at, fails=luck < _DIES + _FAILS)
            else:
                if not claimed.body.get("tasks"):
                    await asyncio.sleep(AGAIN_SECONDS)

    async def _work(
        self, client: Client, tenant: str, worker: str, task: dict[str, Any], claimed_at: float, *, fails: bool
    ) -> None:
        path = f"/v1/external/tasks/{task['task_id']}"
        lease = {"worker_id": worker, "epoch": task["epoch"]}
        for percent in (30, 60):
            await asyncio.sleep(_WORK_SECONDS / 2)
            await client.request("POST", f"{path}/progress", lease | {"percent": percent}, patience=0.0)
            beat = await client.request(
                "POST", f"{path}/heartbeat", lease | {"lease_seconds": EXTERNAL_LEASE_SECONDS}, patience=3.0
            )
            if beat.code == "lease_lost":
                self._note(tenant, worker, task, claimed_at, "lost")
                return
            if beat.body.get("cancel_requested"):
                done = await client.request("POST", f"{path}/acknowledge-cancel", lease)
                self._note(tenant, worker, task, claimed_at, "stopped" if done.good else "lost")
                return
        if fails and task["attempt"] == 1:
            done = await client.request("POST", f"{path}/fail", lease | {"code": "not_yet", "retry_after": 0.5})
            verb = "failed"
        else:
            done = await client.request("POST", f"{path}/complete", lease | {"result": {"by": worker}})
            verb = "completed"
        # An earlier try may have settled the task and lost its answer: then the API answers `lease_lost` to the next
        # try.
        is_unknown = done.status == 0 or (done.tries > 1 and not done.good)
        self._note(tenant, worker, task, claimed_at, verb if done.good else "unknown" if is_unknown else "lost")

    def _note(self, tenant: str, worker: str, task: dict[str, Any], claimed_at: float, end: str) -> None:
        self._diary.leases.append(
            ExternalLease(tenant, worker, str(task["task_id"]), task["epoch"], claimed_at, time.time(), end)
        )
