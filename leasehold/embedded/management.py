"""A client of RabbitMQ's management API, for the embedded RabbitMQ and for tests."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, unquote, urlsplit

TIMEOUT_SECONDS = 10.0  # how long one call waits for the broker


@dataclass(frozen=True)
class Management:
    """The management API of one broker.

    Args:
        url: the address of the API, without credentials
        amqp_url: the address of the broker, with the credentials of an administrator
    """

    url: str
    amqp_url: str = field(repr=False)

    async def add_vhost(self, name: str) -> str:
        """Make a virtual host and give the administrator all permissions in it. Returns its AMQP URL."""
        await self.call("PUT", f"/api/vhosts/{quote(name, safe='')}", {})
        permissions = {"configure": ".*", "write": ".*", "read": ".*"}
        await self.call("PUT", f"/api/permissions/{quote(name, safe='')}/{quote(self._user, safe='')}", permissions)
        return f"{urlsplit(self.amqp_url)._replace(path='', query='').geturl()}/{quote(name, safe='')}"

    async def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with all its queues. The broker closes the connections to this virtual host."""
        await self.call("DELETE", f"/api/vhosts/{quote(name, safe='')}")

    async def is_ready(self) -> bool:
        try:
            await self.call("GET", "/api/whoami")
        except OSError:  # the base of urllib's errors
            return False
        return True

    async def has_alarm(self) -> bool:
        """Whether the broker has an alarm. An alarm means that the broker lacks memory or disk, and reads nothing from
        publishers.

        Raises:
            OSError: the broker did not answer.
        """
        try:
            await self.call("GET", "/api/health/checks/alarms")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return True
        return False

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call the API. Returns the JSON of the answer.

        Raises:
            OSError: the broker did not answer, or answered with an error.
        """
        return await asyncio.to_thread(self._call_blocking, method, path, body)

    def _call_blocking(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        password = unquote(urlsplit(self.amqp_url).password or "")
        token = base64.b64encode(f"{self._user}:{password}".encode()).decode()
        request = urllib.request.Request(  # noqa: S310 - HTTP to a private server
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {token}", "Content-Type": "application/json"},
        )
        # Ignore proxies of the environment, because the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            error.close()
            raise
        except HTTPException as error:  # for example, the connection ended in the middle of the answer
            raise ConnectionError(f"RabbitMQ's management API gave no readable answer: {error!r}") from error
        return json.loads(answer) if answer else None

    @property
    def _user(self) -> str:
        return unquote(urlsplit(self.amqp_url).username or "")
