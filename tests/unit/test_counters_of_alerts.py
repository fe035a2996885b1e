"""Counters that alerts read have the same labels from the start of a process on, whatever happens later."""

from __future__ import annotations

import signal

import pytest
from prometheus_client import REGISTRY

from leasehold.telemetry import dead_letters
from leasehold.telemetry.meters import Bounded
from leasehold.worker import metrics
from leasehold.worker.sandbox import frames
from leasehold.worker.sandbox.child_process import _cause_of


def dead(pipeline: str) -> float | None:
    return REGISTRY.get_sample_value("leasehold_pipeline_dead_letters_total", {"pipeline": pipeline})


def test_a_dead_letter_counts_for_its_pipeline_or_for_all_that_this_process_has_no_code_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_letters, "bounded_code", Bounded())
    dead_letters.declare(["declared_here"])
    assert dead("declared_here") == 0
    others = dead("other")
    assert others is not None
    for pipeline in ("declared_here", "a_template", "another_template"):
        dead_letters.count_dead_letter(pipeline, "step", "code")
    assert (dead("declared_here"), dead("other")) == (1, others + 2)
    assert dead("a_template") is None


def test_a_delivery_that_its_owner_stopped_is_no_dead_letter_for_the_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "bounded_code", Bounded())
    dead_letters.declare(["webhook"])
    counted = dead("webhook")
    assert counted is not None
    for code in ("webhook_disabled", "webhook_refused"):
        dead_letters.count_dead_letter("webhook", "deliver", code)
    assert dead("webhook") == counted + 1


@pytest.mark.parametrize("status", [*range(-64, 2), frames.OUT_OF_MEMORY])
def test_however_a_child_ends_its_counter_was_there_before(status: int) -> None:
    assert _cause_of(status) in metrics.HOW_CHILDREN_CRASH


def test_a_crash_is_named_by_what_children_usually_die_of() -> None:
    ends = (-signal.SIGKILL, -signal.SIGSYS, -signal.SIGUSR1, frames.OUT_OF_MEMORY, 1)
    assert [_cause_of(status) for status in ends] == ["SIGKILL", "SIGSYS", "other", "out_of_memory", "exit"]
