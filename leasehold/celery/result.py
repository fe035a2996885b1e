"""`AsyncResult`: the handle of a run, with Celery's methods.

If a program reads an attribute that only Celery's class has, the base class `Lacking` raises an error. The error says
what to do instead. `OF_RESULT` has this advice for each such attribute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leasehold.celery.apps import CeleryApp, newest_app
from leasehold.celery.lacking import OF_RESULT, Lacking
from leasehold.domain.celery_ids import celery_id_of
from leasehold.domain.errors import NotFound, TaskFailed

if TYPE_CHECKING:
    from uuid import UUID

    from leasehold.app.run import Run

#: A run's status -> Celery's state. Any other status is PENDING.
_STATES = {
    "succeeded": "SUCCESS",
    "failed": "FAILURE",
    "cancelled": "REVOKED",
    "expired": "REVOKED",
    "running": "STARTED",
    "cancel_requested": "STARTED",
}
#: The error code of a run that failed because its attempt began after the time of Celery's option `expires`.
EXPIRED = "task_expired"


class AsyncResult(Lacking):
    """The handle of a run. `id`: the `task_id` that the program gave to the run, or the run's own id. If no run has the
    id, `state` is PENDING, as in Celery. An id is a UUID or a text of 1 to 64 characters. For any other id, raises
    Invalid `invalid_id`. `run`: the run, if the caller has it; None: the first use of the handle looks the run up.
    """

    # For `Lacking`. `_IN_CELERY`: Celery's name of this class. `_LACKS`: attribute that is missing here -> advice.
    _IN_CELERY, _LACKS = "AsyncResult", OF_RESULT

    def __init__(
        self,
        id: str | UUID,  # noqa: A002 - Celery's name
        app: CeleryApp | None = None,
        run: Run[Any] | None = None,
    ) -> None:
        self.id = celery_id_of(id)
        self._app = app or newest_app()
        self._known_run = run

    def __repr__(self) -> str:
        return f"<AsyncResult: {self.id}>"

    def __str__(self) -> str:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncResult) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def _run(self) -> Run[Any]:
        """The run, which is looked up only once. Raises NotFound if no run has the id, and the errors of
        `Celery.find`.
        """
        if self._known_run is None:
            self._known_run = self._app.find(self.id)
        if self._known_run is None:
            raise NotFound("run_not_found", "There is no such run.")
        return self._known_run

    @property
    def task_id(self) -> str:
        return self.id

    def get(self, timeout: float | None = None, propagate: bool = True, **_unused: Any) -> Any:  # noqa: FBT001, FBT002 - Celery's
        """Wait for the result. If the run does not succeed, raises TaskFailed, or returns it if `propagate` is False.
        Raises TimeoutError after `timeout` seconds.
        """
        try:
            return self._run.result(timeout)
        except TaskFailed as error:
            if propagate:
                raise
            return error

    wait = get

    @property
    def state(self) -> str:
        """PENDING, STARTED, SUCCESS, FAILURE or REVOKED. A run that will be tried again is STARTED."""
        try:
            status, code = self._run.status_and_code()
        except NotFound:
            return "PENDING"
        if status == "failed" and code == EXPIRED:
            return "REVOKED"
        return _STATES.get(status, "PENDING")

    status = state

    @property
    def result(self) -> Any:
        """The result of the run, the TaskFailed if the run did not succeed, or None while the run has not ended."""
        return self.get(propagate=False) if self.ready() else None

    @property
    def traceback(self) -> str | None:
        """The error's code and message if the run failed, else None. The traceback itself is in the run's logs."""
        return str(self.get(propagate=False)) if self.failed() else None

    def ready(self) -> bool:
        return self.state in ("SUCCESS", "FAILURE", "REVOKED")

    def successful(self) -> bool:
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        return self.state == "FAILURE"

    def revoke(self, **_unused: Any) -> None:
        """Request the cancel of the run."""
        self._run.cancel("revoked")

    def forget(self) -> None:
        """Does nothing, because retention deletes runs."""
