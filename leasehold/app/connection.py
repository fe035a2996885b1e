"""The connections of one app in one process. They open when the first run is submitted, with the settings of then."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from leasehold.app.dev_file import dev_variables
from leasehold.app.portal import Portal

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

    from leasehold.app.link import Link
    from leasehold.settings import Settings

T = TypeVar("T")


def settings_of_folder() -> Settings:
    """The settings of the environment, of the folder's `.env`, and of a `leasehold dev` that runs in the folder. The
    first of these that has a variable counts.
    """
    from pydantic_settings import EnvSettingsSource  # noqa: PLC0415 - declaring a task reads no settings

    from leasehold.settings import Settings  # noqa: PLC0415 - as above

    class FolderSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named_sources: Any
        ) -> tuple[Any, ...]:
            dev = EnvSettingsSource(settings_cls)
            dev.env_vars = {name.lower(): value for name, value in dev_variables().items()}
            return *sources, *named_sources.values(), dev

    return FolderSettings()


class Connections:
    """One app's way to its installation. A child process that was forked opens connections of its own."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._settings: Settings | None = None
        self._lock = threading.Lock()
        self._portal: Portal | None = None
        self._opening: asyncio.Task[Link] | None = None
        self._stack = AsyncExitStack()

    @property
    def settings(self) -> Settings:
        """Those of `use`; else those of the folder, read once."""
        if self._settings is None:
            self._settings = settings_of_folder()
        return self._settings

    @property
    def chosen(self) -> Settings | None:
        """The settings that `use` was given, or that were read. None: neither has happened."""
        return self._settings

    def use(self, settings: Settings | None) -> None:
        """Use these settings from now on; None: those of the folder. Connections that are open are closed."""
        self.close()
        self._settings = settings

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._open_portal().call(work)

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._open_portal().acall(work)

    def _open_portal(self) -> Portal:
        with self._lock:
            if self._portal is None or not self._portal.is_usable:
                self._portal = Portal(f"leasehold {self._app}")
                self._opening = None
                self._stack = AsyncExitStack()
                atexit.register(self.close)
            return self._portal

    async def link(self) -> Link:
        """The open link. Call it in the portal's loop."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Link:
        from leasehold.app.link import DatabaseLink  # noqa: PLC0415 - declaring a task loads no driver

        settings = self.settings
        return await self._stack.enter_async_context(DatabaseLink.opened(settings, settings.tenant))

    def close(self) -> None:
        """Close what is open, after its last hints are sent. The next use opens it again."""
        with self._lock:
            portal, self._portal = self._portal, None
            atexit.unregister(self.close)
            if portal is None or not portal.is_usable:
                return
            portal.call(self._stack.aclose())
            portal.close()
