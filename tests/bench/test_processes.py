"""That what processes cost is counted once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import processes
from bench.processes import Meter

#: Starts a process that works for a second, says so, and reaps it when told to.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import sys, time
while time.process_time() < 1.0:
    pass
print("worked", flush=True)
sys.stdin.readline()
'''], stdin=subprocess.PIPE)
sys.stdin.readline()
child.communicate(b"end")
print("reaped", flush=True)
sys.stdin.readline()
"""


def test_what_a_process_did_before_is_not_counted_again_when_its_parent_reaps_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "worked\n"
        with Meter() as meter:
            parent.stdin.write("end\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "reaped\n"
        parent.communicate("end\n")
    assert meter.by_role["other"] < 0.5


def test_what_a_process_did_is_counted_although_its_parent_reaps_it_while_both_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        seconds_of = processes.cpu_seconds
        orders = ["end\n"]

        def reaps_after_it_is_read(pid: int) -> float:
            seconds = seconds_of(pid)
            if pid == parent.pid and orders:
                assert parent.stdin is not None
                assert parent.stdout is not None
                parent.stdin.write(orders.pop())
                parent.stdin.flush()
                assert parent.stdout.readline() == "reaped\n"
            return seconds

        with Meter() as meter:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "worked\n"
            monkeypatch.setattr(processes, "cpu_seconds", reaps_after_it_is_read)
        assert not orders
        parent.communicate("end\n")
    assert meter.by_role["other"] > 0.5
