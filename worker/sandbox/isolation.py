"""Whether isolated steps may run here: which fences the kernel has, and what LEASEHOLD_ISOLATION makes of it."""

from __future__ import annotations

import structlog

from leasehold.domain.errors import DeclarationError
from leasehold.selfcheck import Finding
from leasehold.settings import Settings
from leasehold.worker.sandbox import landlock, seccomp

log = structlog.get_logger(__name__)

_REFUSED = "workers here refuse isolated queues, unless LEASEHOLD_ISOLATION=best_effort"
_ABSENT = {
    "seccomp": "no filter of system calls (seccomp) keeps what parses clients' bytes from other processes",
    "network": "nothing keeps it off the network",
    "landlock": "no Landlock keeps it from other tenants' files",
}


def missing(isolation: str) -> list[str]:
    """The fences that are not among `isolation`, as Children name what holds: of seccomp, network, landlock."""
    held = set(isolation.split("+"))
    if "seccomp" in held or "netns" in held:
        held.add("network")
    return [fence for fence in _ABSENT if fence not in held]


def of_this_kernel() -> str:
    """What children here would be fenced in with, but for a network namespace, which only trying tells."""
    held = [*(["seccomp"] if seccomp.machine_here() else []), *(["landlock"] if landlock.version() else [])]
    return "+".join(held) or "limits only"


def explained(fences: list[str]) -> str:
    """What it means that these are missing."""
    return "; ".join(_ABSENT[fence] for fence in fences)


def check(settings: Settings) -> Finding:
    """For `leasehold doctor`: a fence that is missing is wrong unless somebody has written down to do without."""
    held = of_this_kernel()
    if not (absent := missing(held)):
        return Finding("isolation", True, held, "clients' bytes are parsed in processes that reach nothing else")
    agreed = settings.isolation == "best_effort"
    found = f"missing: {', '.join(absent)}" + (" (LEASEHOLD_ISOLATION=best_effort)" if agreed else "")
    return Finding("isolation", agreed, found, explained(absent) if agreed else f"{explained(absent)}; {_REFUSED}")


def may_serve(isolation: str, queues: frozenset[str], isolated: frozenset[str], settings: Settings) -> frozenset[str]:
    """Of `queues` those that this worker may serve, when children are fenced in by `isolation`: `isolated` are those
    with isolated steps.

    Says in one line what is missing. Raises DeclarationError when nothing is left.
    """
    absent = missing(isolation)
    if not absent or not isolated:
        return queues
    if settings.isolation == "best_effort":
        log.warning("isolated steps run with less than all fences, as was decided", missing=absent, held=isolation)
        return queues
    log.error(
        "isolated queues are refused", missing=absent, queues=sorted(isolated), why=f"{explained(absent)}; {_REFUSED}"
    )
    if not queues - isolated:
        raise DeclarationError(f"no queue is left to serve: {explained(absent)}; {_REFUSED}")
    return queues - isolated
