"""A tenant's server, which receives webhooks about the ends of runs. It fails for a share of messages, by the seed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from leasehold.security.signing import signature

_BROKEN = 0.2  # the share of messages that it answers with 503
_LOST = 0.1  # the share of messages that it does not answer


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message that arrived. `message`: its webhook-id. `genuine`: whether the signature is right. `taken`:
    whether the receiver answered with a 2xx.
    """

    message: str
    tenant: str
    event: str
    run: str
    at: float
    genuine: bool
    taken: bool


class Receiver:
    """The server. `deliveries`: the messages that have arrived. `secrets`: the webhook's secret by tenant."""

    def __init__(self, seed: int, secrets: dict[str, bytes]) -> None:
        self.deliveries: list[Delivery] = []
        self.port = 0
        self._secrets = secrets
        self._rng = random.Random(f"receiver {seed}")  # noqa: S311 - to be repeated, not to be secret
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        application = web.Application()
        application.router.add_post("/{tenant}", self._take)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        tenant, luck = request.match_info["tenant"], self._rng.random()
        message: dict[str, Any] = await request.json()
        self.deliveries.append(
            Delivery(
                request.headers["webhook-id"], tenant, message["type"], message["data"]["id"], time.time(),
                genuine=self._is_genuine(request, tenant, body), taken=luck >= _BROKEN + _LOST,
            )
        )  # fmt: skip
        if luck < _LOST and request.transport is not None:
            request.transport.close()
        return web.Response(status=503 if luck < _BROKEN + _LOST else 204)

    def _is_genuine(self, request: web.Request, tenant: str, body: bytes) -> bool:
        headers = request.headers
        expected = signature([self._secrets[tenant]], headers["webhook-id"], int(headers["webhook-timestamp"]), body)
        return headers["webhook-signature"] == expected
