"""The seed of random tests. Each commit has its own, and everybody who runs a commit gets the same."""

from __future__ import annotations

import os
import secrets
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@cache
def seed_of_this_commit() -> int:
    """LEASEHOLD_TEST_SEED if it is set, else a number from the commit. Outside of a checkout: a random number."""
    if configured := os.environ.get("LEASEHOLD_TEST_SEED"):
        return int(configured)
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return secrets.randbelow(2**32)
    return int(git.stdout[:8], 16) if git.returncode == 0 else secrets.randbelow(2**32)
