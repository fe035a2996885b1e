"""The fences stand inside a container too, whose runtime has filtered system calls before."""

from __future__ import annotations

import ctypes.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from leasehold.worker.sandbox import landlock, seccomp
from tests.security.hostile_steps import REACHED
from tests.support.not_here import not_here, only_where

pytestmark = [
    only_where(
        seccomp.supported_machine() is not None and landlock.version() > 0, "a kernel with seccomp and Landlock"
    ),
    only_where(ctypes.util.find_library("seccomp") is not None, "libseccomp (Debian: libseccomp2)"),
]
#: Podman's, made after Docker's.
PROFILE = Path("/usr/share/containers/seccomp.json")


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["docker", "podman"])
def test_a_filter_of_the_runtime_takes_no_fence_away(profile: Path | None) -> None:
    if profile is not None and not profile.exists():
        not_here("a runtime's profile (Debian: golang-github-containers-common)")
    command = [sys.executable, "-m", "tests.security.runtime_filter", *([] if profile is None else [str(profile)])]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=250).stdout
    found = json.loads(printed)
    assert found.pop("filters") == 1
    assert found.pop("isolation") == "seccomp+landlock"
    assert found.pop("copies") == {"names": ["a", "c", "made"]}  # the honest case
    assert found.keys() == {"shared", "files"}
    assert [name for attack in found.values() for name, how in attack.items() if how == REACHED] == []
