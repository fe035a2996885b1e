"""`HeldLease`: the state of a lease that this worker holds. The heartbeat's thread and the attempt share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import asyncpg

from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease

if TYPE_CHECKING:
    from leasehold.db.database import Connection

#: The most seconds of one `beyond_limit` block. If the worker's main loop hangs in such a block, the heartbeat renews
#: the lease for at most this many seconds beyond the attempt's limit.
MAX_BEYOND_LIMIT_SECONDS = 3600.0


@dataclass(slots=True)
class HeldLease:
    """One lease. The heartbeat's thread writes `trusted_until` and `overdue`. Both the heartbeat's thread and the main
    loop write `lost` and `cancelled`. The main loop reads all four, and runs the two callbacks of `subscribe`. The
    heartbeat renews the lease until the monotonic time `renew_until`, which the main loop writes.
    """

    lease: Lease
    renew_until: float
    #: Before this monotonic time the lease has not expired. Nevertheless another worker may have taken the task over,
    #: because if PostgreSQL has lost this worker's session, the other workers consider this worker dead.
    trusted_until: float = field(init=False)
    #: The attempt's context variables. The heartbeat logs with them, so its lines about this lease name the job.
    context: Context = field(default_factory=copy_context, init=False)
    lost: bool = field(default=False, init=False)
    #: The attempt has run far beyond its time limit, and must end while it still holds the lease.
    overdue: bool = field(default=False, init=False)
    #: The worker has sent the settlement (how the attempt ended). If PostgreSQL has committed the settlement, another
    #: worker may have the task by now.
    settlement_sent: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)
    #: Returns whether PostgreSQL has just confirmed that this worker owns the lease.
    confirmed: Callable[[], bool] = field(default=lambda: True)
    #: The connections of the pool that the attempt has now.
    _borrowed: set[Connection] = field(default_factory=set, init=False)
    #: The handler did not stop in time, and runs on without its attempt.
    _given_up: bool = field(default=False, init=False)
    _stop: Callable[[], object] | None = field(default=None, init=False)
    _on_cancel: Callable[[], object] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.trusted_until = self.lease.trusted_until

    def subscribe(self, stop: Callable[[], object], on_cancel: Callable[[], object]) -> None:
        """Register the attempt's callbacks. Call this in the main loop. `stop` runs when the lease is lost, or the
        attempt is overdue. `on_cancel` runs when a client cancels the job. If a callback's event has happened already,
        the callback runs immediately; if both events have happened, only `stop` runs.
        """
        self._stop, self._on_cancel = stop, on_cancel
        if self.lost or self.overdue:
            stop()
        elif self.cancelled:
            on_cancel()

    def notify_stop(self) -> None:
        if self._stop is not None:
            self._stop()

    def notify_cancelled(self) -> None:
        if self._on_cancel is not None:
            self._on_cancel()

    def trusted(self) -> bool:
        """Whether the lease has not expired, and is not known to be lost. Only then the attempt may write outputs."""
        return not self.lost and monotonic() < self.trusted_until

    @contextmanager
    def beyond_limit(self) -> Iterator[None]:
        """The time of the block, up to MAX_BEYOND_LIMIT_SECONDS, does not count for the time limit of the attempt. Use
        such a block for work of the platform that ends by itself, such as requests to the object store. A slow store
        must not cause a timeout of the step.
        """
        began, renew_until = monotonic(), self.renew_until
        self.renew_until = renew_until + MAX_BEYOND_LIMIT_SECONDS
        try:
            yield
        finally:
            self.renew_until = renew_until + monotonic() - began

    # --- connections of the pool; only the main loop calls these

    def check_may_borrow(self) -> None:
        """Raises LeaseLost if the attempt's handler was given up."""
        if self._given_up:
            raise LeaseLost

    def borrow(self, connection: Connection) -> None:
        """Record that the attempt has this connection. Raises LeaseLost as `check_may_borrow` does."""
        self.check_may_borrow()
        self._borrowed.add(connection)

    def give_back(self, connection: Connection) -> None:
        """The attempt returns this connection to the pool."""
        self._borrowed.discard(connection)

    def give_up(self) -> None:
        """Call this if the handler did not stop, and runs on without its attempt. Cuts the connections that the handler
        has, so that the pool opens new ones in their place. From now on the handler gets no connection.
        """
        self._given_up = True
        for connection in self._borrowed:
            # If the server has ended the session, the pool already has the connection back, and this raises.
            with suppress(asyncpg.InterfaceError):
                connection.terminate()
        self._borrowed.clear()
