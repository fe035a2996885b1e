"""`leasehold logs --follow` goes on through restarts of the API, and asks again when the API wants to be asked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from leasehold.cli import logs, remote
from leasehold.cli.api_client import ApiClient, Interrupted
from tests.client.front import fronting


class Api:
    """An API that stops once after a stream, and once in a stream. The job ends before the last stream."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.paused: list[tuple[int, float]] = []  # how much had been asked for at each pause, and its seconds

    def get(self, _path: str) -> dict[str, Any]:
        self.asked.append("job")
        if len(self.asked) == 3:  # the API has ended the stream in good order, and has stopped
            raise Interrupted("the API does not answer")
        if len(self.asked) > 6:
            return {"status": "succeeded", "finished_at": "2026-11-27T00:00:00Z"}
        return {"status": "running"}  # the API leaves out members without a value

    def stream(self, _path: str, **_options: Any) -> Iterator[Any]:
        self.asked.append("stream")
        if len(self.asked) == 4:
            raise Interrupted("the API has too much to do", retry_after=7)
        yield from ()

    def pause_for(self, error: Interrupted) -> None:
        time.sleep(error.pause_seconds)


def test_a_quiet_job_is_followed_through_a_restart_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    api: Any = Api()
    monkeypatch.setattr(time, "sleep", lambda seconds: api.paused.append((len(api.asked), seconds)))
    assert list(logs._follow(api, "id", 0, None, None)) == []
    assert api.asked == ["job", "stream", "job", "stream", "stream", "job", "stream", "job", "stream"]
    assert api.paused == [
        (3, 1),
        (4, 7),
        (6, 1),
    ]  # after each failure, and after a stream without a line whose job goes on


@pytest.mark.parametrize(
    ("answer", "pause_seconds", "may_be_done"),
    [("503", 0.5, True), ("502", 0.5, True), ("429", 1, False), ("break", 0.5, True), ("nobody", 0.5, False)],
)
async def test_the_pause_is_as_long_as_the_api_asks(
    answer: str, pause_seconds: float, may_be_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.cli.api_client._PAUSE_SECONDS", 0.5)
    async with fronting("http://127.0.0.1:9") as front:
        front.failures = [answer]
        url = "http://127.0.0.1:9" if answer == "nobody" else front.url
        with ApiClient(url, "lh_x_y") as client, pytest.raises(Interrupted) as caught:
            await asyncio.to_thread(client.get, "/v1/runs")
    assert (caught.value.pause_seconds, caught.value.may_be_done) == (pause_seconds, may_be_done)


class Answers:
    """A server whose answers are given: an error of the connection, or a status and a body."""

    def __init__(self, *answers: tuple[int, str] | httpx2.TransportError) -> None:
        self.left = list(answers)

    def __call__(self, _request: httpx2.Request) -> httpx2.Response:
        answer = self.left.pop(0)
        if isinstance(answer, httpx2.TransportError):
            raise answer
        return httpx2.Response(answer[0], text=answer[1])

    def client(self) -> ApiClient:
        client = ApiClient("http://api.example", "lh_x_y")
        client._http = httpx2.Client(base_url="http://api.example", transport=httpx2.MockTransport(self))
        return client


NOBODY = httpx2.ConnectError("nobody listens")
AWAY = (503, '{"code":"database_unavailable","detail":"away"}')
GOES_ON, HAS_ENDED = (200, '{"status":"running"}'), (200, '{"status":"succeeded"}')
ENTRY = {
    "n": 7,
    "at": "2026-11-27T00:00:00Z",
    "step": "a",
    "attempt": 1,
    "level": "info",
    "logger": "x",
    "message": "y",
}
LINE = f"id: 7\ndata: {json.dumps(ENTRY)}\n\n"


def said_of(*sentences: str) -> str:
    return "".join(f"leasehold: {sentence}\n" for sentence in sentences)


LOST = "http://api.example does not answer: nobody listens. Trying again until the API answers."
BACK = "The API answers again."


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)


@pytest.mark.usefixtures("no_pauses")
def test_who_follows_a_log_learns_once_that_the_api_is_away_and_once_that_it_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Answers(GOES_ON, (200, LINE), NOBODY, NOBODY, AWAY, (200, ""), AWAY, (200, ""), HAS_ENDED, (200, ""))
    for line in logs._follow(server.client(), "id", 0, None, None):
        logs._print(line, as_json=True)
    assert server.left == []
    out, err = capsys.readouterr()
    assert [json.loads(line)["n"] for line in out.splitlines()] == [7]
    again = "database_unavailable: away. Trying again until the API answers."
    assert err == said_of(LOST, BACK, again, BACK)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("as_json", [False, True])
def test_who_watches_a_run_learns_once_that_the_api_is_away_and_once_that_it_is_back(
    capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    run = {"id": "a-run", "status": "running", "progress": {"steps": []}}
    ended = run | {"status": "succeeded"}
    server = Answers((200, json.dumps(run)), NOBODY, AWAY, NOBODY, (200, json.dumps(run)), (200, json.dumps(ended)))
    client = server.client()
    remote._watch(client, "a-run", client.get("/v1/runs/a-run"), as_json)
    assert server.left == []
    out, err = capsys.readouterr()
    assert err == said_of(LOST, BACK)
    assert not as_json or json.loads(out) == ended


def test_a_command_that_does_not_wait_says_nothing_but_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answers(NOBODY, HAS_ENDED).client()
    with pytest.raises(Interrupted):
        client.get("/v1/runs")
    client.get("/v1/runs")
    assert capsys.readouterr() == ("", "")
