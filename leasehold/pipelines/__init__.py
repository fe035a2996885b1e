"""The kinds of work that ship with the platform, each in a folder. A kind groups pipelines with their tables, endpoints
and housekeeping. The API and the workers get their list of pipelines from this module.
"""

from __future__ import annotations

from importlib.util import find_spec

from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.registry import Pipelines
from leasehold.pipelines.conversion.pipeline import CONVERSION
from leasehold.pipelines.demo.pipeline import demo_long_task, noop
from leasehold.pipelines.generation.pipeline import GENERATION
from leasehold.pipelines.media.pipeline import MEDIA
from leasehold.pipelines.operations.pipeline import OPERATION
from leasehold.pipelines.webhooks.pipeline import WEBHOOK

#: The shipped kinds with tables. Every database has these tables, so every process serves the kinds' endpoints and
#: deletes old rows from their tables, even if it lacks the libraries of CONVERSION (see `_with_installed`).
SHIPPED = (MEDIA, CONVERSION, GENERATION)


#: The names of the shipped kinds and of all shipped pipelines. No tenant's template may take one of these names, even
#: if this process does not have that pipeline, because another process may have it.
RESERVED_NAMES = frozenset(
    name
    for kind in (*SHIPPED, WEBHOOK, OPERATION)
    for name in (kind.name, *(pipeline.name for pipeline in kind.pipelines))
) | {noop.name, demo_long_task.name}

#: The queues of the shipped kinds. No step of a tenant's template may run in one of these queues, because it would take
#: slots that deliveries, bulk operations or conversions of all tenants need. Steps of external workers have separate
#: queues.
RESERVED_QUEUES = frozenset(
    step.queue for kind in (*SHIPPED, WEBHOOK, OPERATION) for pipeline in kind.pipelines for step in pipeline.steps
)


def with_bulk_operations(pipelines: Pipelines) -> Pipelines:
    """Add the kind OPERATION to `pipelines`, because every installation has bulk operations. Returns `pipelines`."""
    if OPERATION not in pipelines.kinds:
        pipelines.add(OPERATION)
    return pipelines


def shipped() -> Pipelines:
    """The pipelines that ship with the platform, and those of installed packages."""
    return _with_installed(Pipelines(MEDIA, WEBHOOK, GENERATION))


def _with_installed(pipelines: Pipelines) -> Pipelines:
    if find_spec("onnxruntime") is not None:  # without the extra `conversion` a worker cannot load the handlers
        pipelines.add(CONVERSION)
    pipelines.add_installed()
    return pipelines


def with_demonstrations() -> Pipelines:
    """The pipelines of `shipped`, and two pipelines that demonstrate or measure the platform. Only `leasehold dev`, the
    demo and benchmarks have these two, because a client could keep workers busy with them for hours. If the extra
    `media` is not installed, the kind MEDIA is left out, because a worker ends if it cannot load a handler.
    """
    pipelines = shipped() if has_extra_media() else _with_installed(Pipelines(WEBHOOK, GENERATION))
    pipelines.add(noop)
    pipelines.add(demo_long_task)
    return pipelines


def has_extra_media() -> bool:
    """Whether `leasehold[media]` is installed here. It has the libraries with which a worker processes pictures."""
    return find_spec("PIL") is not None and find_spec("pyvips") is not None


def with_deliveries(*declared: Pipeline | Kind) -> Pipelines:
    """The `declared` pipelines and kinds, and the pipeline that delivers webhooks. Use this for an installation without
    the shipped kinds.
    """
    return Pipelines(*declared, WEBHOOK)


def kinds_of(pipelines: Pipelines) -> tuple[Kind, ...]:
    """The kinds of a process with these pipelines: SHIPPED, WEBHOOK and OPERATION, then the other kinds in `pipelines`.

    Raises DeclarationError if another kind has the name of a shipped kind.
    """
    kinds = {kind.name: kind for kind in (*SHIPPED, WEBHOOK, OPERATION)}
    for kind in pipelines.kinds:
        if kinds.setdefault(kind.name, kind) is not kind:
            raise DeclarationError(f"{kind.name!r} is the name of a kind of work that ships with the platform")
    return tuple(kinds.values())
