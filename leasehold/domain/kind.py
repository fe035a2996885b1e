"""Declaring a whole kind of work: its pipelines, and what it has of its own beside them (rows, endpoints, metrics).

A kind of work that needs no more than steps is a `Pipeline` and nothing else. A declaration is light: every process
imports it. Each hook names a `module:attribute` that only the process that needs it imports, as with handlers.
"""

from __future__ import annotations

from dataclasses import dataclass

from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import NAME, Pipeline


@dataclass(frozen=True, slots=True)
class Kind:
    """Hooks, each `module:attribute`; None: the kind has nothing of that sort.

    `routers`: FastAPI routers of the kind's endpoints, mounted by every API process. A route needs a scope
    (`leasehold.api.auth.security.Require`), or its path is among `public`, and a route with a body is `CallerFirst`.
    `opens`: given the settings, an async context manager of what these endpoints share; they find it as
    `services_of(request).opened[name]`.
    `housekeeping`: a callable that returns what the leading worker forgets and tidies (leasehold.kinds.housekeeping).
    `questions`: a callable that returns what the exporter asks the database for this kind (leasehold.kinds.metrics).
    """

    name: str
    pipelines: tuple[Pipeline, ...] = ()
    routers: tuple[str, ...] = ()
    public: frozenset[str] = frozenset()
    opens: str | None = None
    housekeeping: str | None = None
    questions: str | None = None

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise DeclarationError(f"kind name {self.name!r} must match {NAME.pattern}")
