"""The page of the HTTP API: every operation of the OpenAPI document, with the scope that its route requires."""

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
out below, where an operation answers them with these codes. Any JSON body may also get 422 `body_too_deep`,
`integer_too_large` or `text_not_storable`. An operation that may answer `evaluations_waiting` may also answer 503
`evaluator_busy`: the payload could not be checked in time.
"""
#: The page lists an answer only once if at least this share of the operations gives it.
_COMMON_SHARE = 0.8


def page() -> str:
    operations = list(_operations(document(make_app(Settings(_env_file=None)))))
    common = _common(operations)
    parts = [_INTRODUCTION, table(["status", "codes"], [(_phrase(status), text) for status, text in sorted(common)])]
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
        (
            code(parameter["name"]), parameter["in"], "required" if parameter.get("required") else "",
            parameter.get("description", ""),
        )
        for parameter in operation.get("parameters", [])
        if parameter["in"] != "path"
    ]  # fmt: skip
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
    """(method, path, operation), grouped by tag. The tags are in the order of their first operations."""
    operations = [
        (method, path, operation) for path, item in contract["paths"].items() for method, operation in item.items()
    ]
    tags = list(dict.fromkeys(tag for _, _, operation in operations for tag in operation["tags"]))
    yield from sorted(operations, key=lambda operation: tags.index(operation[2]["tags"][0]))


def _common(operations: list[tuple[str, str, dict[str, Any]]]) -> set[tuple[str, str]]:
    """The answers (status, description) that the page lists once, for all operations: those that nearly all operations
    give, and those about the request's body that at least a quarter of them give.
    """
    answers = [
        (status, answer["description"])
        for _, _, operation in operations
        for status, answer in operation["responses"].items()
        if not status.startswith("2")
    ]
    of_all = {answer for answer in answers if answers.count(answer) >= _COMMON_SHARE * len(operations)}
    of_bodies = {
        answer
        for answer in answers
        if answer[0] in ("400", "408", "413") and answers.count(answer) >= len(operations) / 4
    }
    return of_all | of_bodies
