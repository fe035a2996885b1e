"""No loop of a client spins when each answer comes at once and is empty, and a request is not held for too long."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest

from leasehold.cli import remote
from leasehold.cli.api_client import ApiClient
from leasehold.client import calls, external, retrying, waiting
from leasehold.client.external import ExternalWorker
from leasehold.client.models import Run
from leasehold.client.retrying import Tries
from leasehold.client.waiting import HOLD_SECONDS, Waiting


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


def run_with(status: str) -> Run:
    return Run.model_validate(
        {
            "id": "0199d3f0-6c1e-7a52-9d1b-3f6a2b8c4d5e",
            "template": "t",
            "version": 1,
            "scope": "tenant",
            "scope_id": "",
            "status": status,
            "priority": "normal",
            "created_at": "2026-01-01T00:00:00Z",
            "updated_at": "2026-01-01T00:00:00Z",
        }
    )


def test_who_waits_for_a_run_pauses_only_after_an_answer_that_came_at_once_and_says_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a run that changes, or whose requests the API holds, is waited for without a pause."""
    now = [0.0]
    monkeypatch.setattr(waiting, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting, "pause_after", float)
    wait = Waiting("a-run", 30.5, client_timeout=60.0)

    def pause_after_answer(status: str, seconds: float) -> float | None:
        wait.next_request()
        now[0] += seconds
        return wait.after_answer(run_with(status))

    answers = [("queued", 0.1)] * 3 + [("running", 0.1)] * 2 + [("running", 20.0)] + [("running", 0.1)] * 2
    assert [pause_after_answer(*answer) for answer in answers] == [0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 1.0, 2.0]
    assert pause_after_answer("running", 0.4) == 3.0
    now[0] = 30.0  # the caller waits for half a second more
    assert pause_after_answer("running", 0.25) == 0.25
    assert pause_after_answer("succeeded", 20.0) is None


@pytest.mark.parametrize(
    ("client_timeout", "within", "passed", "held", "request_seconds"),
    [
        (60.0, 100.0, 0.0, 20.0, 60.0),
        (60.0, 100.0, 55.0, 10.0, 15.0),  # the API was away for most of the time
        (5.0, 100.0, 0.0, 10.0, 15.0),
        (0.0, 100.0, 0.0, 5.0, 10.0),
        (60.0, 5.0, 0.0, 5.0, 15.0),
        (60.0, 5.0, 4.0, 1.0, 11.0),
        (60.0, 5.0, 6.0, 0.0, 10.0),
        (0.0, None, 0.0, 20.0, 60.0),
    ],
)
def test_a_request_is_held_for_less_than_its_try_may_take(
    monkeypatch: pytest.MonkeyPatch,
    client_timeout: float,
    within: float | None,
    passed: float,
    held: float,
    request_seconds: float,
) -> None:
    now = [0.0]
    monkeypatch.setattr(retrying, "monotonic", lambda: now[0])
    tries = Tries(calls.get_run("a-run", wait=HOLD_SECONDS), "http://api.example", client_timeout, within=within)
    now[0] = passed
    assert tries.next_call().params == {"wait": held}
    assert tries.request_seconds(60.0) == request_seconds


def test_a_request_that_is_not_held_stays_as_it_is() -> None:
    call = calls.get_run("a-run")
    assert Tries(call, "http://api.example", 60.0, within=5.0).next_call() == call
