"""Tests that this machine cannot run: each says why, and the end of the run lists them all."""

from __future__ import annotations

from typing import NoReturn

import pytest

MARK = "not on this machine: "


def not_here(reason: str) -> NoReturn:
    """End the test as one that this machine cannot run; `reason` says what the machine lacks."""
    pytest.skip(MARK + reason)


def only_where(able: bool, reason: str) -> pytest.MarkDecorator:
    """For `pytestmark`: the tests of a file that this machine can run only where it is `able`."""
    return pytest.mark.skipif(not able, reason=MARK + reason)


def reasons(skipped: list[pytest.TestReport]) -> dict[str, list[str]]:
    """Which tests did not run, by reason."""
    found: dict[str, list[str]] = {}
    for report in skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix("Skipped: ").removeprefix(MARK)
        found.setdefault(reason, []).append(report.nodeid)
    return found
