"""A 404 of an address that has other methods becomes a 405, and no other 404 does."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from leasehold.api.http.methods import Methods
from leasehold.api.http.problems import Problem


@pytest.mark.parametrize(
    ("method", "path", "code", "status"),
    [
        ("POST", "/literal", "not_found", HTTPStatus.METHOD_NOT_ALLOWED),
        ("GET", "/literal", "not_found", HTTPStatus.NOT_FOUND),  # the endpoint itself found nothing
        ("POST", "/literal", "run_not_found", HTTPStatus.NOT_FOUND),
        ("POST", "/elsewhere", "not_found", HTTPStatus.NOT_FOUND),
    ],
)
def test_a_404_is_a_405_where_only_other_methods_are(method: str, path: str, code: str, status: HTTPStatus) -> None:
    router = APIRouter()

    @router.get("/literal")
    async def literal() -> None: ...

    methods = Methods(route for route in router.routes if isinstance(route, APIRoute))
    answer = methods.corrected(Problem(HTTPStatus.NOT_FOUND, code, "Nothing."), method, path)
    assert answer.status is status
