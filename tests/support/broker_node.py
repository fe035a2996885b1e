"""A RabbitMQ node that a test may stop and kill."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from leasehold.embedded.rabbitmq import RabbitMQ


class BrokerNode:
    """A node with a new virtual host. The node keeps its address and its data when it is started again."""

    def __init__(self, node: RabbitMQ) -> None:
        self._node = node
        self._vhost = f"test-{secrets.token_hex(6)}"
        self.url = ""

    async def stop(self) -> None:
        await self._node.stop()

    async def kill(self) -> None:
        await self._node.kill()

    async def start(self) -> None:
        """Start the node if it does not run, and wait until clients can connect."""
        await self._node.start()

    async def run_tool(self, name: str, *arguments: str) -> str:
        return await self._node.run_tool(name, *arguments)

    async def flush_definitions(self) -> None:
        """Write the declared queues to disk, so that they survive a kill. The node itself does so up to 2 s later."""
        await self._node.flush_definitions()

    @asynccontextmanager
    async def alarm(self) -> AsyncIterator[None]:
        """The node has too little disk, and blocks publishers."""
        await self._node.need_free_disk("999999GB")
        try:
            yield
        finally:
            await self._node.need_free_disk()

    async def open(self) -> None:
        await self._node.start()
        self.url = await self._node.add_vhost(self._vhost)
        await self._node.flush_definitions()

    async def close(self) -> None:
        await self._node.start()
        await self._node.delete_vhost(self._vhost)
