"""A memory limit for one process: a control group. The kernel's OOM killer ends the process when the group is full.

Only a process with privileges can make a control group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Self

_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit:
    """`with MemoryLimit(megabytes) as limit`: a group without processes; `enter` moves a process into it. Only memory
    that the process allocates from then on counts.

    `__enter__` raises OSError if this process may not make groups.
    """

    def __init__(self, megabytes: int) -> None:
        self._bytes = megabytes << 20
        self._group = _parent() / f"chaos-{secrets.token_hex(4)}"

    def __enter__(self) -> Self:
        self._group.mkdir()
        try:
            for name in ("memory.limit_in_bytes", "memory.max"):  # version 1, version 2
                if (self._group / name).exists():
                    (self._group / name).write_text(str(self._bytes))
                    return self
            raise FileNotFoundError(self._group / "memory.max")
        except OSError:
            self._group.rmdir()
            raise

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a process is still in the group: the group stays
            self._group.rmdir()

    def enter(self, pid: int) -> None:
        (self._group / "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """The number of processes that the kernel has killed because the group had no memory left."""
        for name in ("memory.oom_control", "memory.events"):
            if (self._group / name).exists():
                lines = (self._group / name).read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0


def is_possible() -> bool:
    try:
        with MemoryLimit(1):
            return True
    except OSError:
        return False


def _parent() -> Path:
    """The memory group of this process: of cgroups version 1 if the machine has them, else of version 2."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _below(_ROOT / "memory", path)
    path = next((path for _, controllers, path in lines if not controllers), "/")
    return _below(_ROOT, path)


def _below(root: Path, path: str) -> Path:
    """The directory of the group `path`. In a container the path may exist only on the host: then the root."""
    own = Path(os.path.normpath(f"{root}/{path}"))
    return own if own.is_dir() else root
