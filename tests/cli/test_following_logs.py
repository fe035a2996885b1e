"""`leasehold logs --follow` goes on through restarts of the API, and asks again when the API wants to be asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from leasehold.cli import logs
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
