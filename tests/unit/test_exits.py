"""How a process ended is said for each status that a process can have."""

from __future__ import annotations

import signal

import pytest

from leasehold.runtime.exits import describe_exit


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exit status 3"),
        (-signal.SIGKILL, "killed by SIGKILL"),
        (-(signal.SIGRTMIN + 1), f"killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_an_exit_is_described_also_by_a_signal_without_a_name(status: int, words: str) -> None:
    assert describe_exit(status) == words
