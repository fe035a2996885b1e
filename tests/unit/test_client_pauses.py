"""No loop of a client spins when each answer comes at once and is empty."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest

from leasehold.cli import remote
from leasehold.cli.api_client import ApiClient
from leasehold.client import external
from leasehold.client.external import ExternalWorker


@pytest.mark.parametrize(("has_task", "seconds", "pauses"), [(False, 0.0, 3), (False, 2.5, 0), (True, 0.0, 0)])
async def test_an_external_worker_waits_after_an_empty_answer_that_came_at_once(
    monkeypatch: pytest.MonkeyPatch, *, has_task: bool, seconds: float, pauses: int
) -> None:
    """Not after one that came after the wait, nor after a task."""
    now, paused, claims = [0.0], list[float](), list[int]()
    ended = RuntimeError("the test has seen enough")

    async def work_once(_worker: Any, _handle: Any, **_options: Any) -> bool:
        if len(claims) == 3:
            raise ended
        claims.append(1)
        now[0] += seconds
        return has_task

    async def sleep(pause: float) -> None:
        paused.append(pause)

    monkeypatch.setattr(external, "monotonic", lambda: now[0])
    monkeypatch.setattr(ExternalWorker, "work_once", work_once)

    async def handle(_task: Any) -> None: ...

    async with ExternalWorker("http://127.0.0.1:1", "lh_key", queues=["q"]) as worker:
        monkeypatch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(RuntimeError, match="seen enough"):
            await worker.serve(handle)
        monkeypatch.undo()
    assert paused == [2.0] * pauses


def test_who_watches_a_run_as_json_waits_between_answers_that_come_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = ["running", "running", "succeeded"]
    paused: list[float] = []

    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"id": "a-run", "status": statuses.pop(0)})

    monkeypatch.setattr(time, "sleep", paused.append)
    client = ApiClient("http://api.example", "lh_x_y")
    client._http = httpx2.Client(base_url="http://api.example", transport=httpx2.MockTransport(answer))
    remote._watch(client, "a-run", {"status": "queued"}, as_json=True)
    assert paused == [remote._PAUSE_SECONDS] * 2
    assert json.loads(capsys.readouterr().out)["status"] == "succeeded"
