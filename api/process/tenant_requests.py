"""Bounds how many requests of one tenant an API process answers at once, long polls and streams included. Each request
holds a client's connection, so without this bound one tenant could hold all connections of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from leasehold.domain.errors import Unavailable

#: Of each _ONE_FREE_OF connections, a tenant must leave one free for other tenants. It must leave at least one free in
#: any case.
_ONE_FREE_OF = 10
#: The Retry-After of a refused request.
_RETRY_SECONDS = 2.0
#: The key in a request's state under which `begin` stores the function that `end` calls.
_END = "end_tenant_request"


class TenantRequests:
    """The requests under way of each tenant. `connections`: how many connections the process accepts."""

    def __init__(self, connections: int) -> None:
        self._at_most = connections - max(1, connections // _ONE_FREE_OF)
        self._under_way: Counter[str] = Counter()

    def begin(self, state: dict[str, Any], tenant_id: str) -> None:
        """Count the request with this `state` for the tenant, until `end` is called with the same `state`. A second
        call for the same request does nothing.

        Raises Unavailable `busy` if too many requests of the tenant are under way. The API closes the connection after
        this answer. Otherwise the request would hold the connection until its body has arrived.
        """
        if _END in state:
            return
        if self._under_way[tenant_id] >= self._at_most:
            raise Unavailable(
                "busy",
                "Too many requests of this tenant wait for their answers. Try again soon.",
                retry_after=_RETRY_SECONDS,
                headers={"Connection": "close"},
            )
        self._under_way[tenant_id] += 1
        state[_END] = partial(self._leave, tenant_id)

    def _leave(self, tenant_id: str) -> None:
        self._under_way[tenant_id] -= 1
        if not self._under_way[tenant_id]:
            del self._under_way[tenant_id]


def end(state: dict[str, Any]) -> None:
    """Count the request as ended. Call this after its answer, or when its client has disconnected. For a request
    without a tenant, which was not counted, `end` does nothing.
    """
    leave: Callable[[], None] | None = state.pop(_END, None)
    if leave is not None:
        leave()
