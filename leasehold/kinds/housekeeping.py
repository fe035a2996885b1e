"""What the leading worker does for a kind of work beside its jobs: forget rows and objects that nobody needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.domain.kind import Kind
from leasehold.kinds.loading import load
from leasehold.limits.uploads import Acquire, OnTooLarge
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

_U = TypeVar("_U")
#: Called in the transaction that deletes jobs, before it does, with their ids. Of these only jobs past `expires_at` are
#: deleted: restrict each statement with `leasehold.transitions.sweeps.EXPIRED`.
BeforeJobsGo: TypeAlias = Callable[[Connection, Sequence[UUID]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HousekeepingContext:
    """`connections`: take one at a time, and none while the store or anybody else outside is asked."""

    settings: Settings
    connections: Acquire
    store: ObjectStore


@dataclass(frozen=True, slots=True)
class Tidying:
    """One statement a minute. It takes a bounded batch, found by an index."""

    duty: str
    statement: Callable[[Connection], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Forgetting(Generic[_U]):
    """Objects go before their rows: `find` the units, `delete` the objects of each, then `forget` their rows.

    A unit whose objects the store will not delete, or that fails by itself, is set aside under the name `duty`, and the
    others go on: let `find` pass over those with `leasehold.transitions.quarantine.not_in(duty, ...)`. `key` is what a
    unit is called there. No connection is held during `delete`.
    """

    duty: str
    find: Callable[[Connection], Awaitable[Sequence[_U]]]
    key: Callable[[_U], object]
    delete: Callable[[_U], Awaitable[None]]
    forget: Callable[[Connection, Sequence[_U]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Turn:
    """Anything else, once a minute; returns the seconds until the next turn where that is another time."""

    duty: str
    turn: Callable[[], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class KindHousekeeping:
    """`duties`: each in a loop of its own, by a name that no other has.

    `before_jobs_go`: for rows that must go, or be written, with their job where `ON DELETE CASCADE` is not enough.
    `upload_too_large`: called with every upload whose object is too large, before the object goes; in a transaction.
    `prefixes`: where in the store this kind writes, so that parts of dead writers are ended there.
    """

    duties: Sequence[Tidying | Forgetting[Any] | Turn] = ()
    before_jobs_go: BeforeJobsGo | None = None
    upload_too_large: OnTooLarge | None = None
    prefixes: tuple[str, ...] = ()


def housekeeping_of(kinds: Iterable[Kind], context: HousekeepingContext) -> list[KindHousekeeping]:
    """That of all `kinds`, in their order."""
    return [load(kind.housekeeping)(context) for kind in kinds if kind.housekeeping is not None]


def hooks_before_jobs_go(of_kinds: Iterable[KindHousekeeping]) -> list[BeforeJobsGo]:
    return [kind.before_jobs_go for kind in of_kinds if kind.before_jobs_go is not None]
