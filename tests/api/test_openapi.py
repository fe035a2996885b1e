"""The contract as a document."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openapi_spec_validator import validate

from leasehold.api.app import PUBLIC, make_app
from leasehold.pipelines import SHIPPED
from leasehold.pipelines.media.variants import VARIANTS
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of


@pytest.fixture
def document() -> dict[str, Any]:
    return make_app(Settings(_env_file=None)).openapi()


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for path in document["paths"].values() for operation in path.values()]


def test_the_document_is_valid_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    validate(document)


def test_every_operation_has_a_name_of_its_own_a_key_and_its_problems(document: dict[str, Any]) -> None:
    found = operations(document)
    names = [operation["operationId"] for operation in found]
    assert len(set(names)) == len(names)
    assert {"completeUpload", "createUploadUrl", "getMedia", "streamMediaEvents", "createRun"} <= set(names)
    for operation in found:
        ((scheme, scopes),) = operation["security"][0].items()
        assert scheme == "ApiKey"
        assert scopes
        assert all(re.fullmatch("[a-z]+:[a-z]+", scope) for scope in scopes)
        assert operation["summary"]
        assert {"401", "403", "500", "503"} <= set(operation["responses"])
        outages = operation["responses"]["503"]["description"]
        assert all(f"`{code}`" in outages for code in ("database_unavailable", "busy", "tenant_moving")), outages
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == ["application/problem+json"], (operation["operationId"], status)
    assert document["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"


def test_requests_and_answers_have_examples(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("UploadRequest", "UploadTicket", "CompleteRequest", "Accepted", "MediaAnswer", "ProblemAnswer"):
        assert schemas[name]["examples"], name


def test_the_variants_are_those_that_the_pipeline_declares(document: dict[str, Any]) -> None:
    wanted = document["components"]["schemas"]["CompleteRequest"]["properties"]["variants"]["items"]["enum"]
    assert set(wanted) == set(VARIANTS)


def test_a_tag_that_cannot_be_stored_is_none_by_the_document(document: dict[str, Any]) -> None:
    """A client that checks its requests by the document must not learn of it by a 422."""
    schemas = document["components"]["schemas"]
    values = [schema["properties"]["tags"] for schema in schemas.values() if "tags" in schema.get("properties", {})]
    patterns = {one["additionalProperties"]["pattern"] for one in values if "maxProperties" in one}
    assert len(patterns) == 1
    (pattern,) = patterns
    assert [bool(re.search(pattern, text)) for text in ("two\nlines", "with\0nul")] == [True, False]


def test_what_only_machines_use_is_not_in_it(document: dict[str, Any]) -> None:
    assert not PUBLIC.union(*(kind.public for kind in SHIPPED)) & set(document["paths"])


async def test_anybody_may_read_it(api: Running) -> None:
    async with client_of(api.url) as client:
        answer = await client.get("/openapi.json")
    assert answer.json()["info"]["title"] == "Leasehold"
