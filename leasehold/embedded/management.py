"""RabbitMQ's management API: it makes virtual hosts, so that each test has a broker of its own within milliseconds."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote, urlsplit

TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Management:
    """One broker's management API.

    Args:
        url: of the API, without credentials
        amqp_url: of the broker, with the credentials of a user who may administer it
    """

    url: str
    amqp_url: str = field(repr=False)

    async def add_vhost(self, name: str) -> str:
        """Make a virtual host and let the user do everything in it; gives its AMQP URL."""
        await self.call("PUT", f"/api/vhosts/{quote(name, safe='')}", {})
        permissions = {"configure": ".*", "write": ".*", "read": ".*"}
        await self.call("PUT", f"/api/permissions/{quote(name, safe='')}/{quote(self._user, safe='')}", permissions)
        return f"{urlsplit(self.amqp_url)._replace(path='', query='').geturl()}/{quote(name, safe='')}"

    async def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with all its queues; its connections are closed by the broker."""
        await self.call("DELETE", f"/api/vhosts/{quote(name, safe='')}")

    async def is_ready(self) -> bool:
        try:
            await self.call("GET", "/api/whoami")
        except OSError:  # urllib's errors are
            return False
        return True

    async def has_alarm(self) -> bool:
        """Whether the broker is short of memory or disk, and reads nothing from those who publish.

        Raises:
            OSError: it did not answer.
        """
        try:
            await self.call("GET", "/api/health/checks/alarms")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return True
        return False

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call the API; gives what it answered.

        Raises:
            OSError: it did not answer, or with an error.
        """
        return await asyncio.to_thread(self._call, method, path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        password = unquote(urlsplit(self.amqp_url).password or "")
        token = base64.b64encode(f"{self._user}:{password}".encode()).decode()
        request = urllib.request.Request(  # noqa: S310 - http, to a server of our own
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {token}", "Content-Type": "application/json"},
        )
        # No proxy of the environment stands between us and a server on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            error.close()
            raise
        return json.loads(answer) if answer else None

    @property
    def _user(self) -> str:
        return unquote(urlsplit(self.amqp_url).username or "")
