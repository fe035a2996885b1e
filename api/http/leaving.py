"""Notices that a client has closed its connection while the API works on its request. The HTTP server does not stop the
work on such a request. So an endpoint that can return something only once (a task, a result) must check that the client
is still connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import Request
from starlette.types import Receive

from leasehold.runtime.gather import cancel_and_wait


async def until_gone(receive: Receive) -> None:
    """Wait until the client disconnects. Call this only after reading the request's body, because this function
    discards what is left of the body.
    """
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_present(request: Request, wait: Coroutine[Any, Any, bool]) -> bool:
    """Await `wait` (a long poll), and return its result. If the client disconnects first, cancel `wait` and return
    False. Call this only after reading the request's body, because of `until_gone`.
    """
    waiting, going = asyncio.create_task(wait), asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait((waiting, going), return_when=asyncio.FIRST_COMPLETED)
        return not going.done() and waiting.result()
    finally:
        await cancel_and_wait(waiting, going)
