"""What the kernel counts of threads that wait for a processor, and what it says of any time."""

from __future__ import annotations

import os
import threading

import pytest

from chaos.starvation import OURSELVES, Sampler, Starvation, Starved, waits_of


def test_the_kernel_counts_the_waits_of_each_thread() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        waits = waits_of(os.getpid())
        assert {str(os.getpid()), str(thread.native_id)} <= waits.keys()
        assert all(nanoseconds >= 0 for nanoseconds in waits.values())
    finally:
        ended.set()
        thread.join()


def test_a_process_that_has_ended_waits_for_nothing() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert waits_of(child) == {}


def test_a_sample_is_never_longer_than_its_time_and_names_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)
    nanoseconds = iter(range(0, 10**15, 10**12))

    def waits(_pid: int) -> dict[str, int]:
        asked.release()
        return {"1": next(nanoseconds), "2": 0}

    monkeypatch.setattr("chaos.starvation.waits_of", waits)
    with Sampler(lambda: [("worker-0.0", 1)]) as sampler:
        for _ in range(5):  # of two processes each, and the third look has begun
            assert asked.acquire(timeout=60)
    assert {sample.process for sample in sampler.starved} == {"worker-0.0", OURSELVES}
    assert all(sample.seconds == sample.until - sample.since > 0 for sample in sampler.starved)


def test_the_share_of_a_sample_counts_that_lies_in_the_time() -> None:
    waited = Starvation([Starved("a", 0.0, 1.0, 0.5), Starved("a", 1.0, 2.0, 1.0), Starved("b", 1.0, 2.0, 0.2)])
    assert waited.wait_of("a", 0.5, 1.5) == pytest.approx(0.75)
    assert waited.wait_of("a", 0.0, 9.0) == pytest.approx(1.5)
    assert waited.wait_of("b", 0.0, 1.5) == pytest.approx(0.1)
    assert waited.wait_of("a", 2.0, 9.0) == waited.wait_of("nobody", 0.0, 9.0) == 0.0


def test_of_several_processes_the_one_that_waited_longest_counts() -> None:
    samples = [Starved(*one) for one in (("a", 0.0, 1.0, 0.1), ("b", 0.0, 1.0, 0.6), ("a", 1.0, 2.0, 0.3))]
    assert Starvation(samples).longest_wait(0.0, 2.0) == pytest.approx(0.9)
