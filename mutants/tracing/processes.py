"""Measures a process that a test starts: its lines count for that test. Every process of the copy imports this module
first.
"""

from __future__ import annotations

import atexit
import os

#: The environment variables of the coverage's file and of the running test. They exist only during a measurement.
FILE = "LEASEHOLD_MUTANTS_COVERAGE"
TEST = "LEASEHOLD_MUTANTS_TEST"


def start(file: str, test: str) -> None:
    from mutants.tracing.measuring import coverage_to  # noqa: PLC0415 - every process of the copy loads this module

    measured = coverage_to(file, test)
    measured.start()
    atexit.register(_save, measured.stop, measured.save)


def _save(*functions: object) -> None:
    for function in functions:
        assert callable(function)
        function()


if FILE in os.environ and TEST in os.environ:
    start(os.environ[FILE], os.environ[TEST])
