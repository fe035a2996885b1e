"""`python -m chaos.process worker|api [--mutate NAME]`: a worker or an API of a chaos run, with a few changes.

The process writes a journal line before a failpoint acts. Signals move its clock or fill its memory. Some waits are
shorter. `--mutate` removes one guard of the platform. All changes are made in the memory of this process: the
platform's code knows nothing of them.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import time_machine

from chaos import journal, row_changes
from chaos.mutations import MUTATIONS
from chaos.settings import IN_FLIGHT_SECONDS, SINGLE_PUT_BYTES
from leasehold.db import database, idempotency
from leasehold.runtime import failpoints
from leasehold.storage import multipart, store

#: How long a `sleep` failpoint blocks a process of a chaos run: longer than a lease lasts.
SLEEP_SECONDS = 7.0
#: The memory that a process allocates when a fault makes it run out of memory.
MOST_MEGABYTES = 256
_MEGABYTE = 1 << 20


def journal_failpoints() -> None:
    """Write a journal line before a failpoint acts: a run counts only the faults that it can prove."""
    reach = failpoints._reach  # noqa: SLF001 - no public function is called before a failpoint acts

    def journaled(name: str) -> None:
        armed = failpoints._armed.get(name)  # noqa: SLF001 - as above
        if armed is not None and armed.countdown == 1:
            journal.note("failpoint", name=name, act=armed.act)
        reach(name)

    failpoints._reach = journaled  # noqa: SLF001 - as above
    failpoints._SLEEP_SECONDS = SLEEP_SECONDS  # noqa: SLF001 - the platform's minute would be most of a run


def shorten_reservations() -> None:
    """Shorten the time for which a key stays reserved after its request died. The platform's minute is longer than the
    time for which a client of a chaos run repeats a request.
    """
    idempotency.IN_FLIGHT = timedelta(seconds=IN_FLIGHT_SECONDS)


def shrink_parts() -> None:
    """Use multipart uploads for smaller objects, too, so that a run has many of them."""
    store.SINGLE_PUT_BYTES = multipart.PART_BYTES = SINGLE_PUT_BYTES


def move_clock_on_signals() -> None:
    """SIGUSR1 puts the clock of this process forward by an hour, SIGUSR2 back by an hour. The monotonic clock stays
    right, as POSIX demands.
    """
    clock: list[time_machine.Traveller] = []

    def move(number: int, _frame: object) -> None:
        if not clock:  # until the first signal the process reads the system's own clock
            clock.append(time_machine.travel(datetime.now(UTC), tick=True).start())
        hours = 1 if number == signal.SIGUSR1 else -1
        clock[0].shift(timedelta(hours=hours))
        journal.note("clock", hours=hours)

    signal.signal(signal.SIGUSR1, move)
    signal.signal(signal.SIGUSR2, move)


def fill_memory_on_signal() -> None:
    """SIGRTMIN makes this process allocate MOST_MEGABYTES. The kernel ends it earlier if its memory is limited."""

    def fill(_number: int, _frame: object) -> None:
        pieces = [b"x" * _MEGABYTE for _ in range(MOST_MEGABYTES)]
        journal.note("memory", taken=len(pieces))  # so no limit has ended the process

    signal.signal(signal.SIGRTMIN, fill)


def name_sessions() -> None:
    """Give each PostgreSQL session of this process its name, which the triggers record with each change of a row."""
    settings = database._server_settings  # noqa: SLF001 - a URL takes no settings of the server
    own = {row_changes.PROCESS: os.environ[journal.PROCESS_VARIABLE]}
    database._server_settings = lambda name: settings(name) | own  # noqa: SLF001 - as above


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.process")
    parser.add_argument("module", choices=("worker", "api"))
    parser.add_argument("--mutate", choices=sorted(MUTATIONS))
    options = parser.parse_args(arguments)
    gc.disable()  # as `python -m leasehold.worker` does: the platform's `main` switches it on again
    journal_failpoints()
    shorten_reservations()
    shrink_parts()
    move_clock_on_signals()
    fill_memory_on_signal()
    if options.mutate:
        MUTATIONS[options.mutate]()
    if options.module == "worker":
        name_sessions()
        importlib.import_module("leasehold.worker.main").main()
    else:
        importlib.import_module("leasehold.api.main").main([])


if __name__ == "__main__":
    main()
