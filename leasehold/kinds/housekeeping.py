"""The types with which a kind of work declares its housekeeping (`Kind.housekeeping`). It consists of hooks, and of
duties (maintenance loops) that delete what the kind does not need any more. The leader runs the duties
(worker/maintenance/housekeeping.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.domain.kind import Kind
from leasehold.kinds.loading import load
from leasehold.limits import external_files
from leasehold.limits.uploads import Acquire, OnTooLarge
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

_Unit = TypeVar("_Unit")  # a unit of a Forgetting (see there)
#: A hook that is called with the ids of jobs before they are deleted, in the same transaction. Of these jobs, the
#: transaction deletes only the jobs that are past `expires_at`. So the hook must restrict each of its statements to the
#: jobs past `expires_at`, with `leasehold.transitions.sweeps.EXPIRED`.
BeforeJobsGo: TypeAlias = Callable[[Connection, Sequence[UUID]], Awaitable[None]]
#: A hook that is called with the ids of expired jobs, in the transaction that ends them. The jobs may be of any kind.
AfterExpiry: TypeAlias = Callable[[Connection, Sequence[UUID]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HousekeepingContext:
    """What the platform gives to a kind's duties. `connections`: lends a database connection for a block. A duty holds
    at most one connection, and none during a request to the store or to another service.
    """

    settings: Settings
    connections: Acquire
    store: ObjectStore


@dataclass(frozen=True, slots=True)
class Tidying:
    """A duty that runs one statement a minute. The statement must find its rows by an index, and delete at most a fixed
    number of them. If `statement` returns True, more rows may be due, and the duty soon runs the statement again.
    """

    duty: str
    statement: Callable[[Connection], Awaitable[bool | None]]


@dataclass(frozen=True, slots=True)
class Forgetting(Generic[_Unit]):
    """A duty that deletes objects before their rows. A unit is some objects with their rows. `find` returns the units
    that are due, `delete` deletes the objects of one unit, and `forget` then deletes the rows of units.

    If a unit fails by itself, for example because the store refuses to delete its objects, the duty quarantines the
    unit (sets it aside and tries it again later), and goes on with the other units. So `find` must leave out
    quarantined units, with `leasehold.transitions.quarantine.not_in(duty, ...)`. `key`: the unit's name in the
    quarantine. The duty holds no connection during `delete`, and calls it for several units at the same time.
    """

    duty: str
    find: Callable[[Connection], Awaitable[Sequence[_Unit]]]
    key: Callable[[_Unit], object]
    delete: Callable[[_Unit], Awaitable[None]]
    forget: Callable[[Connection, Sequence[_Unit]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A duty that is neither a Tidying nor a Forgetting. `turn` is called once a minute. But if a call of `turn`
    returns a number, the next call comes after this many seconds.
    """

    duty: str
    turn: Callable[[], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class KindHousekeeping:
    """The housekeeping of one kind. `duties`: each runs in a separate loop, and has a name that no other duty has.

    `before_jobs_go`: deletes or writes rows in the transaction that deletes their jobs, if `ON DELETE CASCADE` is not
    enough. `after_expiry`: writes the kind's own rows when the platform ends jobs whose deadline has passed. A step
    cannot write these rows, because perhaps no worker ever claimed a task of the job. `upload_too_large`: called for
    each upload whose object is too large, in a transaction, before the object is deleted. `prefixes`: the prefixes in
    the store under which this kind writes. Under these prefixes the platform ends multipart uploads whose writer has
    died.
    """

    duties: Sequence[Tidying | Forgetting[Any] | Turn] = ()
    before_jobs_go: BeforeJobsGo | None = None
    after_expiry: AfterExpiry | None = None
    upload_too_large: OnTooLarge | None = None
    prefixes: tuple[str, ...] = ()


def housekeeping_of(kinds: Iterable[Kind], context: HousekeepingContext) -> list[KindHousekeeping]:
    """The housekeeping of all `kinds`, in their order."""
    # `kind.housekeeping` is the path `module:function` of a function that makes the housekeeping of the kind.
    return [load(kind.housekeeping)(context) for kind in kinds if kind.housekeeping is not None]


def hooks_before_jobs_go(housekeeping_of_kinds: Iterable[KindHousekeeping]) -> list[BeforeJobsGo]:
    """The platform's own hook, `forget_with_jobs`, and then the hooks of the kinds. The platform's hook watches for
    files that external workers still send. It is always there, because any kind may have steps of external workers.
    """
    hooks_of_kinds = [hooks.before_jobs_go for hooks in housekeeping_of_kinds if hooks.before_jobs_go is not None]
    return [external_files.forget_with_jobs, *hooks_of_kinds]


def hooks_after_expiry(housekeeping_of_kinds: Iterable[KindHousekeeping]) -> list[AfterExpiry]:
    return [hooks.after_expiry for hooks in housekeeping_of_kinds if hooks.after_expiry is not None]
