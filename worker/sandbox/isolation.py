"""Decides whether isolated steps may run on this machine. Isolated steps parse clients' bytes in child processes. They
may run if the kernel offers all fences, or if the setting LEASEHOLD_ISOLATION accepts that fences are missing. A fence
keeps a child process from something, such as the network.

A worker calls `may_serve` at its start, and `leasehold doctor` calls `check`.
"""

from __future__ import annotations

import structlog

from leasehold.domain.errors import DeclarationError
from leasehold.selfcheck import Finding
from leasehold.settings import Settings
from leasehold.worker.sandbox import landlock, seccomp

log = structlog.get_logger(__name__)

_REFUSED = "workers here refuse isolated queues, unless LEASEHOLD_ISOLATION=best_effort"
#: A fence -> what a child, which parses clients' bytes, could reach without this fence.
_RISKS = {
    "seccomp": "a child could reach other processes, because the kernel has no filter of system calls (seccomp)",
    "network": "a child could reach the network",
    "landlock": "a child could read the files of other tenants, because the kernel has no Landlock",
}


def missing(isolation: str) -> list[str]:
    """The missing fences among seccomp, network and landlock. `isolation`: the fences that hold, joined by `+`, as in
    Children.isolation.
    """
    fences = set(isolation.split("+"))
    if "seccomp" in fences or "netns" in fences:  # `netns`, a network namespace, also keeps a child from the network
        fences.add("network")
    return [fence for fence in _RISKS if fence not in fences]


def of_this_kernel() -> str:
    """The fences that this kernel offers for children. Network namespaces are left out, because a process must make
    such a namespace to find out whether the kernel allows it.
    """
    fences = [*(["seccomp"] if seccomp.supported_machine() else []), *(["landlock"] if landlock.version() else [])]
    return "+".join(fences) or "limits only"


def explained(fences: list[str]) -> str:
    """What a child could reach because of the missing fences, for error messages."""
    return "; ".join(_RISKS[fence] for fence in fences)


def check(settings: Settings) -> Finding:
    """The finding of `leasehold doctor`. It is not `ok` if a fence is missing, unless the settings accept this
    (LEASEHOLD_ISOLATION=best_effort).
    """
    offered_fences = of_this_kernel()
    if not (missing_fences := missing(offered_fences)):
        return Finding(
            "isolation", True, offered_fences, "clients' bytes are parsed in processes that reach nothing else"
        )
    is_accepted = settings.isolation == "best_effort"
    summary = f"missing: {', '.join(missing_fences)}" + (" (LEASEHOLD_ISOLATION=best_effort)" if is_accepted else "")
    consequence = explained(missing_fences) if is_accepted else f"{explained(missing_fences)}; {_REFUSED}"
    return Finding("isolation", is_accepted, summary, consequence)


def may_serve(
    isolation: str, queues: frozenset[str], isolated_queues: frozenset[str], settings: Settings
) -> frozenset[str]:
    """The queues among `queues` that this worker may serve. `isolation`: the fences around its children, in the form of
    Children.isolation. `isolated_queues`: the queues with isolated steps.

    If fences are missing, logs one line about them. Raises DeclarationError when no queue is left.
    """
    missing_fences = missing(isolation)
    if not missing_fences or not isolated_queues:
        return queues
    if settings.isolation == "best_effort":
        log.warning(
            "isolated steps run without all fences (LEASEHOLD_ISOLATION=best_effort)",
            missing=missing_fences,
            held=isolation,
        )
        return queues
    log.error(
        "isolated queues are refused",
        missing=missing_fences,
        queues=sorted(isolated_queues),
        why=f"{explained(missing_fences)}; {_REFUSED}",
    )
    if not queues - isolated_queues:
        raise DeclarationError(f"no queue is left to serve: {explained(missing_fences)}; {_REFUSED}")
    return queues - isolated_queues
