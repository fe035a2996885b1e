"""Opens and closes the connections of one app in one process.

The first call that needs a connection opens it, with the settings that the app has at that moment.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from leasehold.app.dev_file import dev_variables
from leasehold.app.portal import Portal, PortalClosed
from leasehold.runtime.gather import cancel_and_wait, has_failed

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

    from leasehold.app.http_link import ApiAccess
    from leasehold.app.link import Link
    from leasehold.app.writing import Written
    from leasehold.settings import Settings

T = TypeVar("T")  # what the work of `call` returns
_log = logging.getLogger(__name__)
#: When an app is closed, the announcements of commits (messages that tell workers of new runs) get this many seconds to
#: end.
_ANNOUNCE_SECONDS = 1.0


def settings_of_folder() -> Settings:
    """The settings for a program in the current folder. Each variable comes from the first of these that has it: the
    environment, the folder's `.env`, the installation that `leasehold dev` runs in the folder. Exception: if neither
    the environment nor `.env` has LEASEHOLD_DATABASE_URL, all three URLs of PostgreSQL (`servers_of_database`) come
    from the installation of `leasehold dev`. Otherwise the program could use that installation's primary, and a standby
    from `.env`.
    """
    from pydantic_settings import EnvSettingsSource  # noqa: PLC0415 - declaring a task reads no settings

    from leasehold.settings import Settings, servers_of_database  # noqa: PLC0415 - as above
    from leasehold.starting import wrong_variables_named  # noqa: PLC0415 - as above

    variables = dev_variables()

    class FolderSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named_sources: Any
        ) -> tuple[Any, ...]:
            dev_source = EnvSettingsSource(settings_cls)
            # A secret that the environment names by a file (LEASEHOLD_..._FILE) overrides a secret of `leasehold dev`.
            dev_source.env_vars = cls.without_files({name.lower(): value for name, value in variables.items()})
            return *super().settings_customise_sources(settings_cls, *sources, **named_sources), dev_source

    servers: dict[str, Any] = {}  # arguments of the constructor, which override all sources
    with wrong_variables_named():
        if "database_url" not in Settings().model_fields_set:
            servers = {
                name: variables[variable]
                for name in servers_of_database("")
                if (variable := f"LEASEHOLD_{name.upper()}") in variables
            }
        return FolderSettings(**servers)


@dataclass(slots=True)
class _Opened:
    """A portal (an event loop in a thread), and the link to the installation (its database, or its HTTP API).
    `link_task`: the asyncio task that opens the link, in the portal's loop. `stack` closes the link.
    """

    portal: Portal
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    link_task: asyncio.Task[Link] | None = None
    announce_tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def close(self) -> None:
        """Wait a moment for the announcements to end. Then close the link."""
        if self.announce_tasks:
            await asyncio.wait(self.announce_tasks, timeout=_ANNOUNCE_SECONDS)
        if self.announce_tasks:
            await cancel_and_wait(*self.announce_tasks)
        # Stop a link that is being opened. Otherwise it could open after `stack` is closed.
        if self.link_task is not None and not self.link_task.done():
            await cancel_and_wait(self.link_task)
        await self.stack.aclose()


class Connections:
    """Connects one app to its installation. After a fork, the child process opens new connections."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._settings: Settings | None = None
        self._api: ApiAccess | None = None
        self._opened: _Opened | None = None
        self._renew_lock()
        _all_connections.add(self)

    def _renew_lock(self) -> None:
        """Make a new lock. If another thread held the old lock at the fork, nothing in the child would release it."""
        self._lock = threading.Lock()

    @property
    def settings(self) -> Settings:
        """The settings given to `use`, or else the settings of the folder, which are read once."""
        if self._settings is None:
            self._settings = settings_of_folder()
        return self._settings

    @property
    def settings_in_use(self) -> Settings | None:
        """The settings given to `use`, or read by `settings`. Returns None if the app has no settings yet."""
        return self._settings

    def use(self, settings: Settings | None) -> None:
        """Use these settings from now on. If `settings` is None, use those of the folder. Connections that are open are
        closed.
        """
        self.close()
        self._settings = settings
        self._api = None

    def use_api(self, access: ApiAccess) -> None:
        """Submit and follow runs through the HTTP API from now on. Connections that are open are closed."""
        self.close()
        self._api = access

    @property
    def api_in_use(self) -> ApiAccess | None:
        """The argument of `use_api`, or None if the app connects to the database."""
        return self._api

    @property
    def is_over_http(self) -> bool:
        return self._api is not None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the portal's loop, and block the calling thread until it ends."""
        return self._open_portal().portal.call(work)

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the portal's loop, and wait in the caller's own loop."""
        return await self._open_portal().portal.acall(work)

    def announce_soon(self, written: Written) -> None:
        """Announce a commit of the user's own transaction in the background. The commit is done, so no error may reach
        the user's program. If the app cannot announce the commit, a worker's relay (the loop that sends the hints that
        nobody has sent) does it.
        """
        try:
            opened = self._open_portal()
            opened.portal.start(self._announce(opened, written))
        except Exception as error:  # noqa: BLE001 - no failure may reach the user's program
            _log.warning("the relay announces a commit, because the app could not: %r", error)

    async def _announce(self, opened: _Opened, written: Written) -> None:
        task = asyncio.current_task()
        assert task is not None
        opened.announce_tasks.add(task)
        task.add_done_callback(opened.announce_tasks.discard)
        try:
            link: Any = await self._link_of(opened)  # it is a DatabaseLink, because there is no `submit_in` over HTTP
            link.announce_soon(written)
        except Exception as error:  # noqa: BLE001 - no failure may reach the user's program, as in announce_soon
            _log.warning("the relay announces a commit, because the app could not: %r", error)

    def _open_portal(self) -> _Opened:
        with self._lock:
            if self._opened is None or not self._opened.portal.is_usable:
                self._opened = _Opened(Portal(f"leasehold {self._app}"))
                atexit.register(self.close)
            return self._opened

    async def link(self) -> Link:
        """The link to the installation, which the first call opens. Call this in the portal's loop. Raises
        PortalClosed.
        """
        opened = self._opened
        if opened is None:
            raise PortalClosed
        return await self._link_of(opened)

    async def _link_of(self, opened: _Opened) -> Link:
        task = opened.link_task
        # If the last try to open the link failed or was cancelled, try again.
        if task is None or has_failed(task):
            # The asyncio task gets an empty context, because the first caller may be an attempt. With the attempt's
            # context, all lines that the link ever logs would be stored with the attempt's run.
            task = asyncio.create_task(self._open_link(opened.stack), context=Context())
            opened.link_task = task
        return await asyncio.shield(task)

    async def _open_link(self, stack: AsyncExitStack) -> Link:
        if self._api is not None:
            from leasehold.app.http_link import HttpLink  # noqa: PLC0415 - declaring a task loads no client

            return await stack.enter_async_context(HttpLink.opened(self._api))
        from leasehold.app.link import DatabaseLink  # noqa: PLC0415 - declaring a task loads no driver

        settings = self.settings
        return await stack.enter_async_context(DatabaseLink.opened(settings, settings.tenant))

    def close(self) -> None:
        """Send the last announcements, then close the connections. The next use opens new ones."""
        with self._lock:
            opened, self._opened = self._opened, None
            atexit.unregister(self.close)
        if opened is None or not opened.portal.is_usable:
            return
        try:
            opened.portal.call(opened.close())
        finally:
            opened.portal.close()


#: All Connections of this process. Each of them gets a new lock after a fork.
_all_connections: WeakSet[Connections] = WeakSet()


def _renew_locks() -> None:
    for connections in _all_connections:
        connections._renew_lock()  # noqa: SLF001 - of the same module


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)
