"""Runs the tests once, in a copy of the checkout, and records which tests run which line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from leasehold.embedded.directories import RunDirectory
from mutants.choosing import LEFT_OUT
from mutants.copies import make_copy
from mutants.covering import Covering, collected
from mutants.tracing.processes import FILE

#: Tests that take long and are not about guards, or whose processes cannot be measured.
_NOT_MEASURED = (*LEFT_OUT, "tests/conversion", "tests/examples", "tests/embedded", "tests/plans", "tests/fixtures")


def measure(folders: Sequence[str], file: Path) -> None:
    """Measure the tests of the folders, and replace their part of `file`. Without folders, measure all tests but
    _NOT_MEASURED, and replace the file.
    """
    with RunDirectory() as directory:
        copy = directory.path / "checkout"
        python = make_copy(copy)
        data = directory.path / "coverage"
        left_out = [option for path in _NOT_MEASURED for option in ("--ignore", path)]
        options = ["-q", "--numprocesses", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *left_out]
        subprocess.run(
            [python, "-m", "pytest", *options, "-p", "mutants.tracing.plugin", *(folders or ["tests"])],
            cwd=copy,
            env=os.environ | {FILE: str(data)},
            check=False,  # tests may fail: a test that fails here judges no mutant
        )
        measured = collected(data, copy)
        renews = folders and file.exists()
        (Covering.load(file).renewed_by(measured) if renews else measured).save(file)
