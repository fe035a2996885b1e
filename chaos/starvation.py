"""Measures how long each process of a run waited for a processor. The kernel counts this time for each thread.

On an overloaded machine, handlers and jobs end late without a defect of the platform. So the checks allow for the time
for which a process waited for a processor. They do not allow for the time for which it slept, waited for an answer, or
computed.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

_SAMPLE_SECONDS = 0.25
_PROC = Path("/proc")
#: The name of the process that starts the others. Every link between them passes through it.
OURSELVES = "chaos"


class Starved(NamedTuple):
    """Between `since` and `until` (seconds since 1970) the process waited for a processor for `seconds`.

    The waits of its threads are added, up to the whole time. While the thread that holds the interpreter's lock waits
    for a processor, the other threads wait for the lock.
    """

    process: str
    since: float
    until: float
    seconds: float


class Sampler:
    """`with Sampler(processes) as sampler`: inside the block, a thread adds samples to `starved`.

    `processes`: returns the names and ids of the processes that run now.
    """

    def __init__(self, processes: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self.starved: list[Starved] = []
        self._processes = processes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="starvation", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        known: dict[tuple[str, int], dict[str, int]] = {}
        last = time.time()
        while not self._ended.wait(_SAMPLE_SECONDS):
            now = time.time()
            waits = {process: waits_of(process[1]) for process in (*self._processes(), (OURSELVES, os.getpid()))}
            for process, threads in waits.items():
                before = known.get(process)
                if before is None:
                    continue
                waited = sum(threads[thread] - before.get(thread, 0) for thread in threads) / 1e9
                if waited > 0.0:
                    self.starved.append(Starved(process[0], last, now, min(waited, now - last)))
            known, last = waits, now


def waits_of(pid: int) -> dict[str, int]:
    """Thread -> the nanoseconds that it has waited for a processor; {} if the process has ended."""
    waits = {}
    with suppress(OSError):  # the process has just ended
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # this thread has just ended
                waits[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return waits


class Starvation:
    """Adds up samples for any span of time. Of a sample that is partly outside, only the share inside counts."""

    def __init__(self, samples: Iterable[Starved]) -> None:
        of_process: defaultdict[str, list[Starved]] = defaultdict(list)
        worst: dict[float, Starved] = {}
        for sample in samples:
            of_process[sample.process].append(sample)
            if sample.since not in worst or worst[sample.since].seconds < sample.seconds:
                worst[sample.since] = sample
        self._of_process = of_process
        self._worst = [worst[since] for since in sorted(worst)]

    def wait_of(self, process: str, since: float, until: float) -> float:
        """Seconds for which the process waited between these moments."""
        return _share(self._of_process.get(process, ()), since, until)

    def longest_wait(self, since: float, until: float) -> float:
        """Like `wait_of`, for the process that waited longest at each moment: all others may depend on it."""
        return _share(self._worst, since, until)


def _share(samples: Sequence[Starved], since: float, until: float) -> float:
    first = max(0, bisect_right(samples, since, key=lambda sample: sample.since) - 1)
    total = 0.0
    for sample in samples[first:]:
        if sample.since >= until:
            break
        inside = min(sample.until, until) - max(sample.since, since)
        total += sample.seconds * max(0.0, inside) / (sample.until - sample.since)
    return total
