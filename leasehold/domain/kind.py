"""Declaring a whole kind of work: its pipelines, and what it has of its own beside them (rows, endpoints, metrics).

A kind of work that needs no more than steps is a `Pipeline` and nothing else. A declaration is light: every process
imports it. Each hook names a `module:attribute` that only the process that needs it imports, as with handlers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import Pipeline

#: A part of a table's name, and of a setting's.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Scopes:
    """The scopes of keys that may read the kind's jobs, and change them."""

    read: str
    write: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Hooks, each `module:attribute`; None: the kind has nothing of that sort.

    `settings`: a `pydantic_settings.BaseSettings` with an `env_prefix` of its own (`LEASEHOLD_{NAME}_`); checked when a
    process starts, and listed by `leasehold settings`. The kind's code makes its own object of it.
    `routers`: FastAPI routers of the kind's endpoints, mounted by every API process. A route needs a scope
    (`leasehold.api.auth.security.Require`), or its path is among `public`. A route with a body is `AuthenticatedFirst`.
    `opens`: given the settings, an async context manager of what these endpoints share; they find it as
    `services_of(request).opened[name]`.
    `migrations`: a package (no attribute) of Alembic revisions with one head. `leasehold migrate` runs them after the
    platform's, and the table `alembic_version_{name}` stores the database's current revision.
    `stored`: no hook but an SQL query of one number: the bytes that the kind keeps for the tenant `$1` beside the
    outputs of its jobs. They count for what a tenant may store.
    `housekeeping`: a callable that returns what the leading worker forgets and tidies (leasehold.kinds.housekeeping).
    `scopes`: the scopes that a key needs to see and to change the kind's jobs at /v1/jobs; None: no key may, there.
    `redacted`: the names of parameters that /v1/jobs never shows.
    `parents`: for each pipeline whose jobs are caused by other jobs, a JSON pointer into the parameters of its jobs.
    The pointer leads to the id of the job that caused them. `signed_links`: whether /v1/jobs links to outputs; False:
    the kind's own endpoints alone do, and count it. `operations`: a callable that returns what the kind adds to cancels
    and retries (leasehold.kinds.operations). `questions`: a callable that returns what the exporter asks the database
    for this kind (leasehold.kinds.metrics).
    """

    name: str
    pipelines: tuple[Pipeline, ...] = ()
    settings: str | None = None
    routers: tuple[str, ...] = ()
    public: frozenset[str] = frozenset()
    opens: str | None = None
    migrations: str | None = None
    stored: str | None = None
    housekeeping: str | None = None
    questions: str | None = None
    scopes: Scopes | None = None
    redacted: frozenset[str] = frozenset()
    parents: Mapping[str, str] = field(default_factory=dict)
    signed_links: bool = True
    operations: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise DeclarationError(f"kind name {self.name!r} must match {_NAME.pattern}")
