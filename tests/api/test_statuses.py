"""Statuses that any operation may answer: each is in the document, with what it carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from leasehold.api.app import make_app
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of
from tests.api.media_api import problem
from tests.crossings.stage import SCOPES

ID = "01a20296-efa1-77b5-9562-ef1771e31abb"


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, an address and what the document says of each."""
    document = make_app(Settings(_env_file=None)).openapi()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            names = {one["name"]: one["schema"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            values = {name: 1 if schema.get("type") == "integer" else ID for name, schema in names.items()}
            yield method.upper(), path.format(**values), operation


def takes(operation: dict[str, Any]) -> str | None:
    (kind,) = operation["requestBody"]["content"] if "requestBody" in operation else (None,)
    return kind


@pytest.mark.parametrize("wrong", ["text/plain", "application/x-www-form-urlencoded", "application/xml", None])
async def test_a_body_of_another_media_type_is_told_which_one_to_send(
    api: Running, make_key: MakeKey, wrong: str | None
) -> None:
    key = await make_key(scopes=SCOPES)
    asked = 0
    async with client_of(api.url, key.text) as client:
        for method, path, operation in operations():
            if (kind := takes(operation)) is None:
                continue
            headers = {} if wrong is None else {"Content-Type": wrong}
            answer = await client.request(method, path, content=b"{}", headers=headers)
            problem(answer, 415, "unsupported_media_type")
            assert answer.headers["accept"] == kind
            assert "415" in operation["responses"], operation["operationId"]
            asked += 1
    assert asked > 30


async def test_without_a_body_there_is_no_media_type(api: Running, make_key: MakeKey) -> None:
    key = await make_key(scopes=SCOPES)
    async with client_of(api.url, key.text) as client:
        answer = await client.post(f"/v1/runs/{ID}/cancel", headers={"Content-Type": "text/plain"})
        problem(answer, 404, "run_not_found")
        problem(await client.post("/v1/runs", headers={"Content-Type": "text/plain"}), 422, "invalid_request")


async def test_who_has_no_key_is_not_told_about_media_types(api: Running) -> None:
    async with client_of(api.url) as client:
        answer = await client.post("/v1/runs", content=b"x", headers={"Content-Type": "text/plain"})
    problem(answer, 401, "missing_api_key")


def test_the_document_says_what_a_429_carries_wherever_there_may_be_one() -> None:
    limited = [operation for _, _, operation in operations() if "429" in operation["responses"]]
    assert len(limited) > 20
    for operation in limited:
        headers = operation["responses"]["429"]["headers"]
        assert {name for name, header in headers.items() if header["required"]} == {
            "Retry-After", "RateLimit", "RateLimit-Policy",
        }, operation["operationId"]  # fmt: skip
