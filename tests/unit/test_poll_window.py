from __future__ import annotations

import pytest

from leasehold.runtime.poll_window import (
    SLACK_SECONDS,
    WHOLE_EVERY_SECONDS,
    WHOLE_MAX_PAUSE_SECONDS,
    WHOLE_SHARE,
    PollWindow,
)
from tests.support.clock import Clock


@pytest.fixture
def poll_window(clock: Clock) -> PollWindow:
    return PollWindow(clock)


def test_the_first_look_sees_everything(poll_window: PollWindow) -> None:
    assert poll_window.seconds_back() is None


def test_after_a_look_that_found_nothing_the_next_sees_what_has_become_due_since(
    poll_window: PollWindow, clock: Clock
) -> None:
    poll_window.polled(clock.now, whole=True, oldest=None, min_overdue=0.0)
    clock.now += 0.5
    assert poll_window.seconds_back() == 0.5 + SLACK_SECONDS


def test_what_a_look_saw_and_could_not_take_is_seen_by_the_next(poll_window: PollWindow, clock: Clock) -> None:
    poll_window.polled(clock.now, whole=True, oldest=600.0, min_overdue=0.0)
    clock.now += 0.5
    assert poll_window.seconds_back() == 600.5 + SLACK_SECONDS


def test_what_was_left_to_a_hint_is_seen_by_the_next_look(poll_window: PollWindow, clock: Clock) -> None:
    poll_window.polled(clock.now, whole=True, oldest=None, min_overdue=5.0)
    clock.now += 0.5
    assert poll_window.seconds_back() == 5.5 + SLACK_SECONDS


def test_now_and_then_a_look_sees_everything(poll_window: PollWindow, clock: Clock) -> None:
    poll_window.polled(clock.now, whole=True, oldest=None, min_overdue=0.0)
    clock.now += WHOLE_EVERY_SECONDS / 2
    back = poll_window.seconds_back()
    assert back is not None
    poll_window.polled(clock.now, whole=False, oldest=None, min_overdue=0.0)
    clock.now += WHOLE_EVERY_SECONDS / 2
    assert poll_window.seconds_back() is None


@pytest.mark.parametrize(
    ("took", "pause"),
    [
        (WHOLE_EVERY_SECONDS * WHOLE_SHARE / 2, WHOLE_EVERY_SECONDS),
        (WHOLE_EVERY_SECONDS * WHOLE_SHARE * 2, WHOLE_EVERY_SECONDS * 2),
        (3600, WHOLE_MAX_PAUSE_SECONDS),
    ],
)
def test_seeing_everything_takes_a_small_share_of_the_time_however_long_it_takes(
    poll_window: PollWindow, clock: Clock, took: float, pause: float
) -> None:
    for _ in range(2):  # the first alone may have waited for a processor
        asked_at = clock.now
        clock.now += took
        poll_window.polled(asked_at, whole=True, oldest=None, min_overdue=0.0)
    clock.now += pause * 0.99
    assert poll_window.seconds_back() is not None
    clock.now += pause * 0.01
    assert poll_window.seconds_back() is None
