"""Whoever reads the log of an outage finds one line at its beginning, one at its end, and one a minute between."""

from __future__ import annotations

from structlog.testing import capture_logs

from leasehold.telemetry.outages import Outage
from tests.support.clock import Clock


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
