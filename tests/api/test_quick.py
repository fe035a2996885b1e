"""A quick route answers as FastAPI's own would, and refuses to be declared for what it would not find."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any
from uuid import UUID

import pytest
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.routing import APIRoute

from leasehold.api.auth.security import RUNS_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.idempotent import IdempotencyKey
from leasehold.api.http.quick import QuickRoute
from leasehold.api.process.keyring import Caller
from leasehold.api.runs.schemas import RunRequest
from leasehold.domain.errors import DeclarationError
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of, serving

Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]


def _router(path: str, kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(route_class=kind)

    @router.post(path)
    async def echo(
        request: Request, wanted: RunRequest, caller: Writer, idempotency_key: IdempotencyKey = None
    ) -> Response:
        said = f"{request.method} {caller.tenant_id} {idempotency_key} {wanted.model_dump_json()}"
        return Response(said, media_type="text/plain")

    return router


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Running]:
    async with serving(settings, _router("/plain", AuthenticatedFirst), _router("/quick", QuickRoute)) as running:
        yield running


_JSON = {"Content-Type": "application/json"}
_FINE = b'{"template": "noop", "payload": {"n": [1, null, "\xc3\xa9", 1234567890123456789]}}'


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (_FINE, _JSON, 200),
        (_FINE, {"Content-Type": "application/json; charset=utf-8"}, 200),
        (_FINE, {"Content-Type": "Application/Merge-Patch+JSON"}, 200),
        (_FINE, _JSON | {"Idempotency-Key": "k"}, 200),
        (b'{"template": "noop", "version": 2, "scheduled_at": "2026-01-01T00:00:00Z"}', _JSON, 200),
        (b'{"template": "noop", "template": "other"}', _JSON, 200),
        (_FINE, {}, 415),
        (_FINE, {"Content-Type": "text/plain"}, 415),
        (_FINE, {"Content-Type": "application/octet-stream"}, 415),
        (_FINE, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (_FINE, {"Content-Type": "application/a/b+json"}, 415),
        (_FINE, {"Content-Type": "json"}, 415),
        (b"{", {"Content-Type": "text/plain"}, 415),
        (b"", _JSON, 422),
        (b"[]", _JSON, 422),
        (b"null", _JSON, 422),
        (b"{}", _JSON, 422),
        (b'{"template": 3, "other": 1, "version": 0, "priority": "urgent", "scope": "A/B"}', _JSON, 422),
        (b'{"template": "noop", "payload": 3, "scheduled_at": "yesterday"}', _JSON, 422),
        (b'{"template": "noop"', _JSON, 400),
        (b'{"template": "noop"} 1', _JSON, 400),
        (b"noop", _JSON, 400),
    ],
)
async def test_it_answers_as_fastapi_would(
    api: Running, make_key: MakeKey, body: bytes, headers: dict[str, str], status: int
) -> None:
    key = await make_key(scopes=(RUNS_WRITE,))
    async with client_of(api.url, key.text) as client:
        plain, quick = [await client.post(path, content=body, headers=headers) for path in ("/plain", "/quick")]
    assert quick.status_code == status
    assert _said(quick) == _said(plain)


def _said(answer: Any) -> Any:
    """Without what differs between any two answers, and in one word for what JSON calls an object."""
    if answer.status_code == 200:
        return answer.text
    said = answer.json() | {"request_id": ""}
    for error in said.get("errors", ()):
        error["detail"] = re.sub("a valid dictionary( or object to extract fields from)?", "an object", error["detail"])
    return said


@pytest.mark.parametrize(("scopes", "status"), [((), 403), (None, 401)])
async def test_the_caller_is_looked_at_before_the_body(
    api: Running, make_key: MakeKey, scopes: tuple[str, ...] | None, status: int
) -> None:
    key = None if scopes is None else (await make_key(scopes=scopes)).text
    async with client_of(api.url, key) as client:
        assert (await client.post("/quick", content=b'{"a":', headers=_JSON)).status_code == status


async def _without_caller(request: Request, wanted: RunRequest) -> Response:
    raise AssertionError


async def _with_query(
    request: Request, wanted: RunRequest, caller: Writer, wait: Annotated[float, Query()] = 0
) -> Response:
    raise AssertionError


async def _with_response(request: Request, response: Response, wanted: RunRequest, caller: Writer) -> Response:
    raise AssertionError


async def _without_body(request: Request, caller: Writer) -> Response:
    raise AssertionError


async def _with_path(request: Request, run_id: UUID, wanted: RunRequest, caller: Writer) -> Response:
    raise AssertionError


async def _with_needed_header(
    request: Request, wanted: RunRequest, caller: Writer, x_a: Annotated[str, Header()]
) -> Response:
    raise AssertionError


async def _with_number_as_header(
    request: Request, wanted: RunRequest, caller: Writer, x_a: Annotated[int | None, Header()] = None
) -> Response:
    raise AssertionError


async def _with_default_of_header(
    request: Request, wanted: RunRequest, caller: Writer, x_a: Annotated[str | None, Header()] = "a"
) -> Response:
    raise AssertionError


async def _with_bounded_header(
    request: Request, wanted: RunRequest, caller: Writer, x_a: Annotated[str | None, Header(max_length=3)] = None
) -> Response:
    raise AssertionError


@pytest.mark.parametrize(
    "endpoint",
    [_with_needed_header, _with_number_as_header, _with_default_of_header, _with_bounded_header],
)
def test_it_refuses_a_header_that_it_would_not_check(endpoint: Any) -> None:
    with pytest.raises(DeclarationError, match="the header of a quick route is an optional text"):
        APIRouter(route_class=QuickRoute).add_api_route("/", endpoint, methods=["POST"])


@pytest.mark.parametrize("endpoint", [_without_caller, _with_query, _with_response, _without_body, _with_path])
def test_it_refuses_to_be_declared_for_an_endpoint_of_another_kind(endpoint: Any) -> None:
    with pytest.raises(DeclarationError, match="a quick route takes"):
        APIRouter(route_class=QuickRoute).add_api_route("/{run_id}", endpoint, methods=["POST"])
