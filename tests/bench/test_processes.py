"""That what processes cost is counted once."""

from __future__ import annotations

import subprocess
import sys

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
