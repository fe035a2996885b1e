"""The kinds of work that ship with the platform: one folder each, and this one list."""

from __future__ import annotations

from importlib.util import find_spec

from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind
from leasehold.domain.registry import Pipelines
from leasehold.pipelines.conversion.pipeline import CONVERSION
from leasehold.pipelines.demo.pipeline import demo_long_task, noop
from leasehold.pipelines.generation.pipeline import GENERATION
from leasehold.pipelines.media.pipeline import MEDIA
from leasehold.pipelines.webhooks.pipeline import WEBHOOK

#: Their tables are in every database, so every process serves and tidies them, whichever pipelines it was given.
SHIPPED = (MEDIA, CONVERSION, GENERATION)


def shipped() -> Pipelines:
    """Ours, and those of installed packages."""
    pipelines = Pipelines(MEDIA, WEBHOOK, GENERATION)
    if find_spec("onnxruntime") is not None:  # else a worker could not load the handlers: the extra `conversion`
        pipelines.add(CONVERSION)
    pipelines.add_installed()
    return pipelines


def with_demonstrations() -> Pipelines:
    """As `shipped`, and what only shows or measures the platform: for `leasehold dev`, the demo and benchmarks. Whoever
    may start runs could hold slots with them for hours.
    """
    pipelines = shipped()
    pipelines.add(noop)
    pipelines.add(demo_long_task)
    return pipelines


def kinds_of(pipelines: Pipelines) -> tuple[Kind, ...]:
    """The kinds of a process with these pipelines: the shipped ones, then those that `pipelines` brings.

    Raises DeclarationError for another kind with the name of a shipped one.
    """
    known = {kind.name: kind for kind in (*SHIPPED, WEBHOOK)}
    for kind in pipelines.kinds:
        if known.setdefault(kind.name, kind) is not kind:
            raise DeclarationError(f"{kind.name!r} is the name of a kind of work that ships with the platform")
    return tuple(known.values())
