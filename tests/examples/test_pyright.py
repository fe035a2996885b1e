"""pyright, strict, sees the types of the examples. mypy checks them with all other code.

pyright is a package of npm, and clients/typescript asks for it: pip's `pyright` loads a Node.js when it is first run.
Django ships no types, so its example is left to mypy.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.not_here import only_where

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "clients/typescript/node_modules/.bin/pyright"
PYRIGHT = str(LOCAL) if LOCAL.exists() else shutil.which("pyright")
pytestmark = only_where(PYRIGHT is not None, "there is no pyright: `npm ci` in clients/typescript")


def test_the_examples_are_strict() -> None:
    assert PYRIGHT is not None
    command = [PYRIGHT, "--project", str(ROOT / "examples/pyrightconfig.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors" in done.stdout
