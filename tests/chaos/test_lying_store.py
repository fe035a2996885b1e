"""A store that replaced what it was told to create only: the checker excuses what that can break, and nothing else."""

from __future__ import annotations

import pytest

from tests.chaos.histories import sound
from tests.chaos.test_checker import an_output_that_is_gone, an_output_with_other_bytes, found

KEY = "jobs/job/output/first.txt"


@pytest.mark.parametrize(
    ("pipeline", "overwritten", "excused"),
    [("unlike", {KEY}, True), ("unlike", set(), False), ("unlike", {"jobs/other"}, False), ("short", {KEY}, False)],
)
def test_only_bytes_that_differ_by_attempt_and_that_a_lie_replaced_are_excused(
    pipeline: str, overwritten: set[str], excused: bool
) -> None:
    history = sound()
    history.jobs[0]["pipeline"] = pipeline
    an_output_with_other_bytes(history)
    history.overwritten = overwritten
    assert ("I12" not in found(history)) is excused


def test_an_output_that_is_gone_is_not_excused() -> None:
    history = sound()
    history.jobs[0]["pipeline"] = "unlike"
    an_output_that_is_gone(history)
    history.overwritten = {KEY}
    assert "I12" in found(history)
