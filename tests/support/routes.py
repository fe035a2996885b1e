"""What the tests read of the API's routes."""

from __future__ import annotations

from fastapi.routing import APIRoute


def methods_of(route: APIRoute) -> set[str]:
    """Its methods, which it always has: Starlette's type is that of every route."""
    assert route.methods is not None, route.path
    return route.methods
