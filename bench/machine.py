"""Describes the machine on which the figures are measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LIBRARIES = ("asyncpg", "aio-pika", "aiormq", "uvloop", "pillow", "fastapi", "uvicorn")


def describe() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _field("/proc/cpuinfo", "model name"),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


def _field(file: str, name: str) -> str:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")
