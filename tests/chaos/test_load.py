"""The clients of chaos runs: they repeat what was not answered, with its key, and ask for work of every kind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import httpx2
import pytest

from chaos import collect
from chaos.checks.accepted_jobs import i1
from chaos.history import History
from chaos.load import PAUSES, Load, client, direct, errands, runs, schedules
from chaos.load.client import Client, Outcome
from chaos.load.conversions import model
from chaos.load.diary import Diary, Sender
from chaos.load.runs import start, starter
from chaos.pipelines import KINDS, LARGE_BYTES, declared, gated, paced, short, wrong
from chaos.plan import Plan
from chaos.run import Report
from chaos.settings import SINGLE_PUT_BYTES
from chaos.stack import Installation
from leasehold.domain.pipeline import Pipeline
from leasehold.transitions.jobs import NewJob
from tests.generation.simulator.http import HangUp, HttpServer, Reply, Request

Answer = Reply | type[HangUp]
DONE = Reply(202, {"id": "run-1", "status": "pending"})
IN_FLIGHT = Reply(409, {"code": "idempotency_key_in_flight"})


class Api:
    """Gives its answers in turn, the last for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.requests: list[Request] = []
        self._answers = list(answers)

    async def answer(self, request: Request) -> Reply:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Reply):
            return answer
        raise answer

    @property
    def keys(self) -> list[str | None]:
        return [request.headers.get("idempotency-key") for request in self.requests]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_SECONDS", 0.0)


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=40) as client:
        yield client


async def test_a_request_is_repeated_with_its_key_until_it_is_answered(http: httpx2.AsyncClient) -> None:
    api = Api(HangUp, Reply(503, {}), IN_FLIGHT, Reply(429, {"code": "rate_limited"}), DONE)
    async with HttpServer(api.answer) as server:
        outcome = await Client(http, [server.url], "secret").request("POST", "/v1/runs", {"template": "short"}, key="k")
    assert (outcome.status, outcome.answer, outcome.tries) == (202, "accepted", 5)
    assert api.keys == ["k"] * 5
    assert {request.body for request in api.requests} == {api.requests[0].body}
    assert outcome.asked_at < outcome.answered_at


async def test_each_try_goes_to_the_other_api(http: httpx2.AsyncClient) -> None:
    one, other = Api(HangUp), Api(DONE)
    async with HttpServer(one.answer) as first, HttpServer(other.answer) as second:
        sender = Client(http, [second.url, first.url], "secret")
        assert (await sender.request("POST", "/v1/runs", {}, key="k")).good
    assert (one.keys, other.keys) == (["k"], ["k"])


async def test_a_refusal_is_final(http: httpx2.AsyncClient) -> None:
    api = Api(Reply(409, {"code": "resource_invalid_state"}))
    async with HttpServer(api.answer) as server:
        outcome = await Client(http, [server.url], "secret").request("POST", "/v1/runs/x/cancel")
    assert (outcome.answer, outcome.code, outcome.tries) == ("refused", "resource_invalid_state", 1)


async def test_what_is_never_answered_is_unknown(http: httpx2.AsyncClient) -> None:
    api = Api(HangUp)
    async with HttpServer(api.answer) as server:
        outcome = await Client(http, [server.url], "secret").request("POST", "/v1/runs", {}, patience=0.0)
    assert (outcome.answer, outcome.status, outcome.answered) == ("unknown", 0, ())


async def test_a_request_that_is_sent_once_more_keeps_both_answers(http: httpx2.AsyncClient) -> None:
    api = Api(DONE, HangUp, Reply(202, {"id": "run-2"}))
    async with HttpServer(api.answer) as server:
        sender = Client(http, [server.url], "secret")
        outcome = await sender.request("POST", "/v1/runs", {}, key="k", again=True)
        assert [said["id"] for said in outcome.answered] == ["run-1"]  # the second was not answered: the first counts
        outcome = await Client(http, [server.url], "secret").request("POST", "/v1/runs", {}, key="l", again=True)
    assert [said["id"] for said in outcome.answered] == ["run-2", "run-2"]


def _installation(*urls: str) -> Installation:
    """As much of one as a client needs."""
    ports = {f"api-{nth}": int(url.rpartition(":")[2]) for nth, url in enumerate(urls)}
    return cast("Installation", SimpleNamespace(ports=ports, keys={"red": "secret"}, mutate=""))


async def test_a_run_is_written_down_with_its_key_which_is_its_scope(http: httpx2.AsyncClient) -> None:
    api = Api(HangUp, DONE)
    async with HttpServer(api.answer) as server:
        diary = Diary(_installation(server.url), 1)
        diary.seed_random("test")
        job = await start(diary, diary.client("red"), "red", "mendable", {"text": "to"}, kind="broken")
        await diary.close()
    (request,) = diary.requests
    assert (job, request.job, request.endpoint, request.answer) == ("run-1", "run-1", "POST /v1/runs", "accepted")
    assert {sent.json["scope_id"] for sent in api.requests} == {request.key} == {*api.keys}


async def test_a_job_is_followed_until_it_has_ended_also_beyond_the_load() -> None:
    resumed, ended = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> Reply:
        if request.headers["last-event-id"] == "2":
            resumed.set()
            return Reply(204, body=b"") if ended.is_set() else Reply(200, body=b": beat\n\n")
        return Reply(200, body=b"id: 1\n\nid: 2\n\n")

    async with HttpServer(answer) as server:
        diary = Diary(_installation(server.url), 1)
        diary.seed_random("test")
        diary.follow(diary.client("red"), "job", "/v1/runs/job/events")
        assert diary.streams == {"job": []}  # who sees nothing is judged, too
        await resumed.wait()
        await diary.wait_for_followers(0.0)
        assert diary.streams["job"] == [(0, [1, 2])]
        ended.set()
        diary.follow(diary.client("red"), "job", "/v1/runs/job/events")
        await diary.wait_for_followers(60.0)
        await diary.close()


@pytest.mark.parametrize(("pipeline", "is_followed"), [(short, True), (wrong, False)])
async def test_a_run_that_ends_twice_is_not_followed(pipeline: Pipeline, is_followed: bool) -> None:
    asked: list[str] = []

    async def answer(request: Request) -> Reply:
        asked.append(request.method)
        return DONE if request.method == "POST" else Reply(204, body=b"")

    async with HttpServer(answer) as server:
        diary = Diary(_installation(server.url), 1)
        send = starter(diary, pipeline)
        for nth in range(30):
            diary.seed_random(f"test {nth}")
            await send("red")
        await diary.wait_for_followers(60.0)
        await diary.close()
    assert ("GET" in asked) is is_followed


def test_every_kind_of_work_is_asked_for() -> None:
    load = Load(_installation(), 1)
    assert load.senders.keys() == PAUSES.keys()
    retried = {"mendable"}  # asked for as `mend`
    assert {kind.name for kind in KINDS} - retried <= PAUSES.keys()
    assert {pipeline.name for pipeline in declared()} >= {kind.name for kind in KINDS}


async def test_what_a_request_is_depends_on_the_seed_and_its_number_alone() -> None:
    async def first(seed: int, *nths: int) -> dict[int, tuple[str, float]]:
        load, drawn = Load(_installation(), seed), {}

        def noting(nth: int) -> Sender:
            async def send(tenant: str) -> None:
                await asyncio.sleep(0)  # others draw meanwhile
                drawn[nth] = (tenant, load.diary.rng.random())

            return send

        await asyncio.gather(*(load.send_once("short", noting(nth), nth) for nth in nths))
        return drawn

    assert await first(1, 0, 1, 2) == await first(1, 2, 1, 0)
    assert await first(1, 0, 1, 2) != await first(2, 0, 1, 2)


@pytest.mark.parametrize("name", ["_limit", "_webhook", "_template", "_queue", "schedule"])
async def test_an_errand_that_an_api_refuses_makes_the_run_red(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Diary, "is_sent_twice", lambda _diary: False)
    refusal = Reply(403, {"code": "insufficient_scope"})
    makes_something = name in ("_webhook", "_template", "schedule")
    api = Api(*([Reply(201, {"id": "made", "type": "t"})] if makes_something else []), refusal)
    async with HttpServer(api.answer) as server:
        diary = Diary(_installation(server.url), 1)
        diary.installation.receiver = SimpleNamespace(port=1)  # type: ignore[assignment]  # where the webhook leads
        diary.seed_random("test")
        if name == "schedule":
            keeper = schedules.keeper(diary)
            await keeper("red")  # it is run now
            api._answers.insert(0, Reply(201, {"id": "made"}))
            diary.requests.clear()
            await keeper("red")  # the second is deleted
        else:
            await getattr(errands, name)(diary, "red")
        await diary.close()
    made = Report(Plan(7, 12.0), "", rested=True, answers=Counter(f"{one.kind} {one.answer}" for one in diary.requests))
    assert (made.refused, made.good) == (["errand"], False)
    assert not [*i1(History(collect.terms(), requests=diary.requests))]  # an errand makes no job


def test_limits_are_declared_for_kinds_that_there_are_and_large_objects_go_up_in_parts() -> None:
    assert {gated.name, paced.name} <= {kind.name for kind in KINDS}
    assert LARGE_BYTES > SINGLE_PUT_BYTES
    assert 0 < len(model()) < 4096


@pytest.mark.parametrize(
    ("status", "code", "tries", "answer"),
    [
        (404, "limit_not_found", 2, "accepted"),
        (404, "limit_not_found", 1, ""),
        (404, "not_found", 2, ""),  # a release without the endpoint
        (409, "", 2, ""),
        (204, "", 2, ""),
    ],
)
def test_a_deletion_whose_first_answer_was_lost_is_no_refusal(status: int, code: str, tries: int, answer: str) -> None:
    assert errands._of_deletion(Outcome(status, {"code": code}, 0.0, 0.0, tries)) == answer


@pytest.mark.parametrize(
    ("status", "code", "tries", "answer"),
    [
        (409, "not_failed", 2, "accepted"),
        (409, "not_failed", 1, ""),
        (404, "dead_letter_not_found", 2, "accepted"),
        (404, "not_found", 2, ""),  # a release without the endpoint: it has retried nothing
        (202, "", 2, ""),
    ],
)
def test_a_retry_whose_first_answer_was_lost_is_no_refusal(status: int, code: str, tries: int, answer: str) -> None:
    assert runs._of_retry(Outcome(status, {"code": code}, 0.0, 0.0, tries)) == answer


async def test_a_job_of_which_its_client_never_heard_is_recorded_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(_diary: Diary, _job: NewJob) -> str:
        return "unknown"

    monkeypatch.setattr(direct, "_try_submit", unknown)
    monkeypatch.setattr(direct, "PATIENCE_SECONDS", -1.0)
    diary = Diary(cast("Installation", SimpleNamespace()), 1)
    diary.seed_random("test")
    await direct.canceller(diary)("red")
    (request,) = diary.requests
    assert (request.answer, request.job) == ("unknown", "")
    assert request.key
    await diary.close()
