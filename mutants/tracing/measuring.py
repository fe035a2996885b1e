"""Makes the measurement of coverage, which is the same in every process."""

from __future__ import annotations

from pathlib import Path

import coverage

ROOT = Path(__file__).parent.parent.parent
MEASURED = ("leasehold", "api", "worker")


def coverage_to(file: str, test: str | None = None) -> coverage.Coverage:
    """Measure only the platform's code, into `file` with a suffix of the process. `test`: it gets all lines."""
    include = [f"{ROOT}/{folder}/*" for folder in MEASURED]
    return coverage.Coverage(
        data_file=file, data_suffix=True, config_file=False, include=include, context=test, messages=False
    )
