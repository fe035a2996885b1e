"""What outlives the process that started it is found: else no run could ever be red for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from chaos import collect
from chaos.orphans import adopting

NAME = "chaos_orphan"
#: Starts a child of that name in a session of its own, and ends.
LEAVES_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{NAME}"],
                         start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
"""


@pytest.mark.parametrize("adopts", [True, False])
def test_an_orphan_is_found_below_the_process_that_adopts_it(adopts: bool) -> None:
    if adopts:
        with adopting():
            orphan = _orphan()
    else:
        orphan = _orphan()
    try:
        assert [pid for pid, _ in collect._running_processes(NAME)] == ([orphan] if adopts else [])
    finally:
        os.kill(orphan, signal.SIGKILL)
        if adopts:
            os.waitpid(orphan, 0)


def _orphan() -> int:
    parent = subprocess.run([sys.executable, "-c", LEAVES_A_CHILD], capture_output=True, check=True)
    return int(parent.stdout)
