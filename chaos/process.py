"""`python -m chaos.process worker|api [--mutate NAME]`: the real process, with a witness, and a guard less if asked.

The witness writes down each failpoint before it acts. What is changed for a mutant is changed here, in the memory of
this process: the platform's code knows nothing of mutants.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import time_machine

from chaos import audit, journal
from chaos.mutations import MUTATIONS
from chaos.settings import IN_FLIGHT_SECONDS, SINGLE_PUT_BYTES
from leasehold.db import database, idempotency
from leasehold.runtime import failpoints
from leasehold.storage import multipart, store

#: How long a `sleep` failpoint blocks a chaos run's process: longer than its leases last.
SLEEP_SECONDS = 7.0
#: How much a process takes that is to run out of memory.
MOST_MEGABYTES = 256
_PIECE = 1 << 20


def witness_failpoints() -> None:
    act = failpoints._reach  # noqa: SLF001 - a failpoint that fired in silence proves nothing

    def witnessed(name: str) -> None:
        armed = failpoints._armed.get(name)  # noqa: SLF001 - as above
        if armed is not None and armed.countdown == 1:
            journal.note("failpoint", name=name, act=armed.act)
        act(name)

    failpoints._reach = witnessed  # noqa: SLF001 - as above
    failpoints._SLEEP_SECONDS = SLEEP_SECONDS  # noqa: SLF001 - a minute would be most of a run


def shorten_reservations() -> None:
    """A minute, for which the key of a request that died stays reserved, is longer than clients of a run ask."""
    idempotency.IN_FLIGHT = timedelta(seconds=IN_FLIGHT_SECONDS)


def put_in_parts() -> None:
    """An upload in parts costs a run less, so that it has many."""
    store.SINGLE_PUT_BYTES = multipart.PART_BYTES = SINGLE_PUT_BYTES


def let_the_clock_be_wrong() -> None:
    """SIGUSR1 turns this process's clock on by an hour, SIGUSR2 back. Its monotonic clock is never wrong (POSIX)."""
    clock: list[time_machine.Traveller] = []

    def turn(number: int, _frame: object) -> None:
        if not clock:  # before the first signal nothing stands between the process and the system's clock
            clock.append(time_machine.travel(datetime.now(UTC), tick=True).start())
        hours = 1 if number == signal.SIGUSR1 else -1
        clock[0].shift(timedelta(hours=hours))
        journal.note("clock", hours=hours)

    signal.signal(signal.SIGUSR1, turn)
    signal.signal(signal.SIGUSR2, turn)


def let_memory_run_out() -> None:
    """SIGRTMIN makes this process take memory until the kernel ends it, or until it has more than any limit allows."""

    def take(_number: int, _frame: object) -> None:
        taken = [b"x" * _PIECE for _ in range(MOST_MEGABYTES)]
        journal.note("memory", taken=len(taken))  # nobody stopped it

    signal.signal(signal.SIGRTMIN, take)


def name_sessions() -> None:
    """Each session of this process says whose it is, so that the audit's triggers can write that down."""
    settings = database._server_settings  # noqa: SLF001 - a URL takes no settings of the server
    own = {audit.PROCESS: os.environ[journal.PROCESS_VARIABLE]}
    database._server_settings = lambda name: settings(name) | own  # noqa: SLF001 - as above


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.process")
    parser.add_argument("module", choices=("worker", "api"))
    parser.add_argument("--mutate", choices=sorted(MUTATIONS))
    asked = parser.parse_args(arguments)
    witness_failpoints()
    shorten_reservations()
    put_in_parts()
    let_the_clock_be_wrong()
    let_memory_run_out()
    if asked.mutate:
        MUTATIONS[asked.mutate]()
    if asked.module == "worker":
        name_sessions()
        importlib.import_module("leasehold.worker.main").main()
    else:
        importlib.import_module("leasehold.api.__main__").main([])


if __name__ == "__main__":
    main()
