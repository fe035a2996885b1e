"""The seed of random tests. Each commit has its own, and everybody who runs a commit gets the same."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@cache
def seed_of_this_commit() -> int:
    """LEASEHOLD_TEST_SEED if it is set, else a number from the commit. Outside of a checkout: a random number."""
    seed = _configured_or_of_commit()
    return secrets.randbelow(2**32) if seed is None else seed


def sample_of_this_commit(names: Iterable[str], number: int) -> list[str]:
    """The parameters of a long test that run at this commit: `number` of them, in their order, others at the next
    commit. All with LEASEHOLD_TEST_SAMPLE=all, and outside of a checkout.
    """
    all_names = list(names)
    seed = _configured_or_of_commit()
    if seed is None or os.environ.get("LEASEHOLD_TEST_SAMPLE") == "all":
        return all_names
    chosen = set(random.Random(seed).sample(all_names, number))
    return [name for name in all_names if name in chosen]


def _configured_or_of_commit() -> int | None:
    if configured := os.environ.get("LEASEHOLD_TEST_SEED"):
        return int(configured)
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return int(git.stdout[:8], 16) if git.returncode == 0 else None
