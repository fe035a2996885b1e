"""The HTTP API: every operation of the OpenAPI document, with the scope that its route asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from docs.generate.tables import code, codes, table
from leasehold.api.app import make_app
from leasehold.api.http.openapi import document
from leasehold.settings import Settings

_INTRODUCTION = """# HTTP API

The API serves the exact contract at `GET /openapi.json` (OpenAPI 3.1): every field with its type and bounds. This page
lists the operations, the scope that a key needs for each, and how each can answer. Send `Authorization: Bearer <key>`
with every request. Every answer has an `X-Request-Id`.

An error is an RFC 9457 problem with a stable `code`: [all codes](errors.md). The statuses in the next table are left
out below, where an operation answers them with these codes.
"""
#: A status that so many operations answer with the same codes is written once.
_COMMON = 0.8


def page() -> str:
    operations = list(_operations(document(make_app(Settings(_env_file=None)))))
    common = _common(operations)
    parts = [_INTRODUCTION, table(["status", "codes"], [(_phrase(status), said) for status, said in sorted(common)])]
    heading = None
    for method, path, operation in operations:
        (tag,) = operation["tags"]
        if tag != heading:
            parts.append(f"## {tag[0].upper()}{tag[1:]}")
            heading = tag
        parts += _section(method, path, operation, common)
    return "\n\n".join(parts)


def _section(method: str, path: str, operation: Mapping[str, Any], common: set[tuple[str, str]]) -> Iterator[str]:
    yield f"### {operation['operationId']}"
    scopes = [scope for requirement in operation.get("security", []) for scope in requirement["ApiKey"]]
    yield f"`{method.upper()} {path}`" + (f", scope {codes(scopes)}" if scopes else ", no key")
    yield f"{operation['summary']}. {operation.get('description', '')}".strip()
    parameters = [
        (code(one["name"]), one["in"], "required" if one.get("required") else "", one.get("description", ""))
        for one in operation.get("parameters", [])
        if one["in"] != "path"
    ]
    if parameters:
        yield table(["parameter", "in", "", "meaning"], parameters)
    answers = [
        (_phrase(status), _meaning(status, answer["description"]))
        for status, answer in operation["responses"].items()
        if (status, answer["description"]) not in common
    ]
    yield table(["status", "codes"], answers)


def _meaning(status: str, text: str) -> str:
    return "done" if status.startswith("2") and text == "Successful Response" else text


def _phrase(status: str) -> str:
    return f"{status} {HTTPStatus(int(status)).phrase}"


def _operations(contract: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """In the order of their tags, each tag where it first stands."""
    found = [(method, path, one) for path, item in contract["paths"].items() for method, one in item.items()]
    tags = list(dict.fromkeys(tag for _, _, one in found for tag in one["tags"]))
    yield from sorted(found, key=lambda operation: tags.index(operation[2]["tags"][0]))


def _common(operations: list[tuple[str, str, dict[str, Any]]]) -> set[tuple[str, str]]:
    answers = [
        (status, answer["description"])
        for _, _, operation in operations
        for status, answer in operation["responses"].items()
        if not status.startswith("2")
    ]
    few = {one for one in answers if answers.count(one) >= _COMMON * len(operations)}
    with_body = {
        one for one in answers if one[0] in ("400", "408", "413") and answers.count(one) >= len(operations) / 4
    }
    return few | with_body
