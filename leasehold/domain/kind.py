"""Declares a kind of work: its pipelines, and its own rows, endpoints, metrics and so on (`Kind`).

A kind of work that has only steps needs no Kind, because a `Pipeline` is enough. A hook is an object of the kind's code
that a process of the platform loads. The declaration names each hook as `module:attribute`, and only a process that
needs the hook imports that module. Every process imports the declaration, so the declaration itself must not import the
code of its hooks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import Pipeline

#: The name of a kind. Tables (`alembic_version_{name}`) and settings (`LEASEHOLD_{NAME}_`) contain it.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
#: The name of the kind to which the jobs of templates belong, and the jobs of pipelines without a Kind. No other kind
#: may have this name.
RUN = "run"


@dataclass(frozen=True, slots=True)
class Scopes:
    """The scopes of keys that may read the kind's jobs, and change them."""

    read: str
    write: str


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects that a kind stores beside the outputs of its jobs. `leasehold doctor --reconcile` compares the store
    with the database by these fields.

    `prefix`: the keys of the objects are `{prefix}ID/...`. ID is the UUIDv7 of a row. The time in this UUID gives the
    object's age. `owners`: an SQL query that returns, as `id`, the ids of the array `$1` for which a row exists.
    `keys`: an SQL query that returns `id, key` of objects that must exist. It returns at most `$2` rows, ordered by
    `id`, from the first id above `$1`.
    """

    prefix: str
    owners: str
    keys: str


@dataclass(frozen=True, slots=True)
class NamedObjects:
    """Like `Objects`, but for objects whose whole key is in a row. The key need not have an id with a time, so the age
    of such an object counts from its last change in the store.

    `pattern`: a regular expression of the keys that the kind makes below `prefix`; other keys belong to other programs.
    `owners`: an SQL query that gets keys in the text array `$1`, and returns, as `id`, those that are in a row. `keys`:
    an SQL query for the keys of objects that must exist. It returns at most `$2` rows, in the order of the keys, from
    the first key above `$1`. Each row has the key twice, as `id` and as `key`.
    """

    prefix: str
    pattern: str
    owners: str
    keys: str


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of work. Each hook is named as `module:attribute`; None: the kind has no such hook.

    `settings`: a `pydantic_settings.BaseSettings` with an `env_prefix` of its own (`LEASEHOLD_{NAME}_`). Each process
    checks it at start, and `leasehold settings` lists it. The kind's code makes an instance of the class where it needs
    the settings.
    `routers`: FastAPI routers of the kind's endpoints, mounted by every API process. A route needs a scope
    (`leasehold.api.auth.security.Require`), or its path is in `public`. Routes with a body need the `route_class`
    `leasehold.api.http.authenticated_first.AuthenticatedFirst`, which reads a body only if the caller is authenticated.
    `opens`: a callable that takes the settings and returns an async context manager. It opens the object that the
    kind's endpoints share. The endpoints read it as `services_of(request).opened[name]`.
    `migrations`: a package (not an attribute) of Alembic revisions with one head. `leasehold migrate` runs them after
    the platform's, and the table `alembic_version_{name}` stores the database's current revision.
    `stored`: an SQL query, not a hook. Its answer is one number: the bytes that the kind stores for the tenant `$1`
    beside the outputs of its jobs. The tenant's quota counts these bytes, too.
    `objects`: what the kind stores beside the outputs of its jobs; None: it stores no such objects.
    `housekeeping`: a callable that returns the kind's duties (maintenance loops). The leader, the one that is
    elected for duties, runs them (leasehold.kinds.housekeeping).
    `scopes`: the scopes that a key needs to see and to change the kind's jobs at /v1/jobs; None: no key sees these jobs
    there.
    `redacted`: the names of parameters that /v1/jobs never shows.
    `parents`: {pipeline: JSON pointer}. In the parameters of a job of the pipeline, the pointer leads to the id of the
    job that caused this job.
    `signed_links`: whether /v1/jobs links to outputs. If it is False, only the kind's own endpoints link to outputs,
    for example because these endpoints count downloads.
    `operations`: a callable that returns the kind's part in cancels and retries (leasehold.kinds.job_kinds).
    `questions`: a callable that returns the kind's queries for the exporter (leasehold.kinds.metrics).
    """

    name: str
    pipelines: tuple[Pipeline, ...] = ()
    settings: str | None = None
    routers: tuple[str, ...] = ()
    public: frozenset[str] = frozenset()
    opens: str | None = None
    migrations: str | None = None
    stored: str | None = None
    objects: Objects | NamedObjects | None = None
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
        if self.name == RUN:
            raise DeclarationError(f"{RUN!r} is the name of the kind of all runs")
