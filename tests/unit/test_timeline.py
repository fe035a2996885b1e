from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.api.console.timeline import Bar, timeline

MADE_AT = datetime(2026, 1, 1, tzinfo=UTC)
STEP = {"id": "convert", "state": "succeeded"}


def after(seconds: int) -> datetime:
    return MADE_AT + timedelta(seconds=seconds)


def entry(kind: str, seconds: int, epoch: int) -> dict[str, Any]:
    return {"kind": kind, "step": "convert", "at": after(seconds), "epoch": epoch}


def bars_of(*ledger: dict[str, Any]) -> list[Bar]:
    job = {"created_at": MADE_AT, "finished_at": after(100)}
    (line,) = timeline(job, [STEP], ledger, [], after(100)).lines
    return line.bars


def test_between_a_lost_attempt_and_its_takeover_the_step_has_not_waited() -> None:
    bars = bars_of(entry("claimed", 10, 1), entry("taken_over", 60, 2), entry("completed", 100, 2))
    assert [(bar.shade, bar.x, bar.width) for bar in bars] == [("wait", 0, 100), ("lost", 100, 500), ("ok", 600, 400)]


def test_between_a_failed_attempt_and_the_next_the_step_waited() -> None:
    bars = bars_of(
        entry("claimed", 10, 1), entry("retried", 60, 1), entry("claimed", 80, 2), entry("completed", 100, 2)
    )
    assert [bar.shade for bar in bars] == ["wait", "no", "wait", "ok"]
