"""The simulator: one server that is every provider, by path."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tests.generation.simulator import protocols
from tests.generation.simulator.http import HttpServer, Reply, Request
from tests.generation.simulator.work import Bought, Studio

_BY_PREFIX = {
    "/api/v3/": protocols.ark,
    "/v1/": protocols.replicate,
    "/fal/": protocols.fal,
    "/gateway/": protocols.gateway,
}


class Simulator:
    """`async with Simulator() as simulator`. `requests`: those that bought or asked for something, while `records`."""

    def __init__(self, port: int = 0, *, records: bool = True, endless: bool = False) -> None:
        self.studio = Studio(endless=endless)
        self.requests: list[Request] = []
        self._records = records
        self._server = HttpServer(self._answer, port)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        self.studio.url = self._server.url
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def bought(self) -> list[Bought]:
        return list(self.studio.bought.values())

    def purchases(self, prompt: str) -> int:
        """How often that was bought."""
        return sum(one.prompt == prompt for one in self.studio.bought.values())

    def settings(self) -> dict[str, Any]:
        """What Settings says, for everybody to find every provider here."""
        return {
            "egress_allow": "127.0.0.0/8",
            "generation_jimeng_url": self.url,
            "generation_ark_url": self.url,
            "generation_replicate_url": self.url,
            "generation_fal_url": f"{self.url}/fal",
            "generation_http_providers": protocols.gateway_declaration(self.url),
        }

    async def _answer(self, request: Request) -> Reply:
        if request.path.startswith("/files/"):
            return self.studio.file(request)
        if self._records:
            self.requests.append(request)
        if request.path == "/":
            return await protocols.jimeng(self.studio, request)
        for prefix, answer in _BY_PREFIX.items():
            if request.path.startswith(prefix):
                return await answer(self.studio, request)
        return Reply(404, {"error": "nobody"})
