"""Whoever reads the log of an outage finds one line at its beginning, one at its end, and one a minute between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from leasehold.telemetry.outages import Outage
from tests.support.clock import Clock
from tests.support.now import now


def test_a_hundred_errors_of_many_parts_are_one_line_and_the_end_is_another() -> None:
    clock = Clock()
    outage = Outage("database", clock=clock)
    with capture_logs() as lines:
        for number in range(100):
            outage.record_error(OSError("secret"), "heartbeat" if number % 2 else "claims")
            clock.now += 0.1
        clock.now += 1
        outage.record_answer()
        outage.record_answer()
    assert [line["event"] for line in lines] == [
        "the database is away; trying again until it is back",
        "the database is back",
    ]
    assert (lines[0]["log_level"], lines[0]["error"]) == ("warning", "OSError")
    assert lines[1]["errors"] == 100
    assert lines[1]["noticed_by"] == ["claims", "heartbeat"]
    assert "secret" not in str(lines)


def test_an_outage_that_goes_on_is_told_of_once_a_minute() -> None:
    clock = Clock()
    outage = Outage("broker", clock=clock)
    with capture_logs() as lines:
        for _ in range(1501):  # 150 seconds
            outage.record_error(OSError(), "publish")
            clock.now += 0.1
    assert [line["event"] for line in lines[1:]] == ["the broker is still away"] * 2


def test_parts_that_come_back_one_after_the_other_are_one_outage() -> None:
    clock = Clock()
    outage = Outage("database", clock=clock)
    with capture_logs() as lines:
        outage.record_error(OSError(), "heartbeat")
        clock.now += 0.5
        outage.record_answer()  # the heartbeat is back before the claims have noticed
        outage.record_error(OSError(), "claims")
        clock.now += 1.5
        outage.record_answer()
        clock.now += 5
        outage.record_error(OSError(), "heartbeat")  # and a second one is told of again
    assert len(lines) == 3
    assert not lines[1]["event"].endswith("until it is back")
    assert outage.lasts


class Loop:
    """The timers of an event loop, by the clock of the test."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = clock
        self._timers: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        self._timers.append((self._clock.now + seconds, callback))
        return self._timers[-1]

    def go_on_until(self, instant: float) -> None:
        while self._timers and min(self._timers, key=lambda timer: timer[0])[0] <= instant:
            timer = min(self._timers, key=lambda timer: timer[0])
            self._timers.remove(timer)
            self._clock.now = timer[0]
            timer[1]()
        self._clock.now = instant


def test_the_time_without_errors_begins_again_with_each_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer, an error, and an answer again, within one second: the timer of the first answer ends nothing."""
    clock = Clock()
    outage, loop = Outage("broker", clock=clock), Loop(clock, monkeypatch)
    begin = clock.now
    with capture_logs() as lines:
        outage.record_error(OSError(), "publish")
        for instant, is_error in [(0.125, False), (0.5, True), (1.0, False)]:
            loop.go_on_until(begin + instant)
            if is_error:
                outage.record_error(OSError(), "consume")
            else:
                outage.record_answer()
        loop.go_on_until(begin + 1.25)
        assert now(outage.lasts)
        outage.record_error(OSError(), "consume")  # the same outage
        loop.go_on_until(begin + 1.375)
        outage.record_answer()
        loop.go_on_until(begin + 2.125)
        assert now(outage.lasts)
        loop.go_on_until(begin + 2.5)
    assert not now(outage.lasts)
    assert [line["event"] for line in lines] == [
        "the broker is away; trying again until it is back",
        "the broker is back",
    ]
    assert lines[1]["errors"] == 3


def test_an_outage_ends_although_an_event_loop_with_its_timer_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may call `asyncio.run` several times. A broker's connection is an answer once, and not again."""
    clock = Clock()
    outage = Outage("broker", clock=clock)
    for _ in range(2):
        loop = Loop(clock, monkeypatch)  # the one before never runs again
        outage.record_error(OSError(), "publish")
        outage.record_answer()
    loop.go_on_until(clock.now + 1)
    assert not now(outage.lasts)
