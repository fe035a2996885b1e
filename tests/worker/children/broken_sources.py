"""Registries that are none."""

from __future__ import annotations

import os
import threading
import time

from leasehold.domain.registry import Pipelines
from tests import scripted


def nothing() -> None:
    return None


def dies() -> None:
    os._exit(9)


def threaded() -> Pipelines:
    """One that leaves a thread behind."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return scripted.pipelines()
