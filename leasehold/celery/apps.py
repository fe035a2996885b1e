"""Keeps the apps (objects of `leasehold.celery.Celery`) that this process has made. The modules that app.py imports
cannot import app.py themselves, so they find an app here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from leasehold.domain.errors import DeclarationError

if TYPE_CHECKING:
    from leasehold.app.run import Run


class CeleryApp(Protocol):
    """The members of an app that those modules use. app.py describes the members."""

    main: str

    @property
    def tasks(self) -> Mapping[str, Any]: ...
    @property
    def default_queue(self) -> str: ...
    def settle(self) -> None: ...
    def find(self, celery_id: str) -> Run[Any] | None: ...
    def task(self, *function: Callable[..., Any], **options: Any) -> Any: ...
    def declare(self, task: Any) -> Any: ...
    def submit_canvas(self, plan: dict[str, Any], args: list[Any]) -> Any: ...


#: The apps, in the order in which they were made.
made_apps: list[CeleryApp] = []


def newest_app() -> CeleryApp:
    """The app that was made last. Raises DeclarationError if there is none yet."""
    if not made_apps:
        raise DeclarationError("there is no app yet: app = Celery('name')")
    return made_apps[-1]
