"""Where random tests begin: at another place for each commit, and at the same one for all who run that commit."""

from __future__ import annotations

import os
import secrets
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@cache
def seed_of_this_commit() -> int:
    """LEASEHOLD_TEST_SEED, where it is set. Any number where this is no checkout."""
    if wanted := os.environ.get("LEASEHOLD_TEST_SEED"):
        return int(wanted)
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return secrets.randbelow(2**32)
    return int(git.stdout[:8], 16) if git.returncode == 0 else secrets.randbelow(2**32)
