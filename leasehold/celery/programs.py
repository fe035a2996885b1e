"""Keeps the Celery apps of this program. task.py, canvas.py and result.py find them here: they cannot import app.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from leasehold.domain.errors import DeclarationError

if TYPE_CHECKING:
    from leasehold.app.run import Run


class Program(Protocol):
    """A leasehold.celery.Celery. `tasks`: its CeleryTasks by their names."""

    main: str

    @property
    def tasks(self) -> Mapping[str, Any]: ...
    def find(self, run_id: UUID) -> Run[Any]: ...
    def task(self, *function: Callable[..., Any], **options: Any) -> Any: ...
    def declare(self, task: Any) -> Any: ...
    def submit_canvas(self, plan: dict[str, Any], args: list[Any]) -> Any: ...


#: The apps, in the order in which the program made them.
programs: list[Program] = []


def current_program() -> Program:
    """The app that the program made last. Raises DeclarationError if there is none yet."""
    if not programs:
        raise DeclarationError("there is no app yet: app = Celery('name')")
    return programs[-1]
