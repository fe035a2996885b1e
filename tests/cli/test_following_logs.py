"""`leasehold logs --follow` goes on through restarts of the API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from leasehold.cli import logs
from leasehold.cli.api_client import Interrupted


class Api:
    """An API that stops once after a stream, and once in a stream. The job ends before the last stream."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.paused: list[int] = []  # how much had been asked for at each pause

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
            raise Interrupted("the API does not answer")
        yield from ()


def test_a_quiet_job_is_followed_through_a_restart_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    api: Any = Api()
    monkeypatch.setattr(time, "sleep", lambda _seconds: api.paused.append(len(api.asked)))
    assert list(logs._follow(api, "id", 0, None, None)) == []
    assert api.asked == ["job", "stream", "job", "stream", "stream", "job", "stream", "job", "stream"]
    assert api.paused == [3, 4, 6]  # after each failure, and after a stream without a line whose job goes on
