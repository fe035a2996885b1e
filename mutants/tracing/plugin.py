"""`-p mutants.tracing.plugin`: records which test runs each line, and how many seconds each test takes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutants.tracing.measuring import coverage_to
from mutants.tracing.processes import FILE, TEST

_measured = coverage_to(os.environ[FILE])
_measured.start()
_seconds: dict[str, float] = {}
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _measured.switch_context(item.nodeid)
    os.environ[TEST] = item.nodeid
    try:
        return (yield)
    finally:
        del os.environ[TEST]
        _measured.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _seconds[report.nodeid] = report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _measured.stop()
    _measured.save()
    if not hasattr(session.config, "option") or getattr(session.config.option, "numprocesses", None) is None:
        results = {"seconds": _seconds, "failed": sorted(_failed)}
        Path(f"{os.environ[FILE]}.tests.{os.getpid()}.json").write_text(json.dumps(results))
