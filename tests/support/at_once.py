"""Shows a failure when it happens: pytest itself reports failures at the end of the run."""

from __future__ import annotations

import pytest

LINES = 40


class FailuresAtOnce:
    """A pytest plugin that writes the end of each failure at once."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        self._terminal.ensure_newline()
        self._terminal.write_line(f"FAILED already, in its {report.when}: {report.nodeid}", red=True)
        for line in report.longreprtext.splitlines()[-LINES:]:
            self._terminal.write_line(f"    {line}")
