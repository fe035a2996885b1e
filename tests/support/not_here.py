"""Skips tests that this machine cannot run. Each gives its reason, and the end of the run lists them all."""

from __future__ import annotations

from typing import NoReturn

import pytest

MARK = "not on this machine: "


def not_here(reason: str) -> NoReturn:
    """Skip the test. `reason`: what this machine lacks."""
    pytest.skip(MARK + reason)


def only_where(able: bool, reason: str) -> pytest.MarkDecorator:
    """For `pytestmark`: skip the tests of a file if this machine is not `able` to run them."""
    return pytest.mark.skipif(not able, reason=MARK + reason)


def reasons(skipped: list[pytest.TestReport]) -> dict[str, list[str]]:
    """The skipped tests by reason."""
    tests_by_reason: dict[str, list[str]] = {}
    for report in skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix("Skipped: ").removeprefix(MARK)
        tests_by_reason.setdefault(reason, []).append(report.nodeid)
    return tests_by_reason
