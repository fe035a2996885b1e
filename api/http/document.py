"""Completes the OpenAPI document for all operations at once: statuses that no route declares, headers, and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leasehold.api.http.problems import MEDIA_TYPE

_PROBLEM = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemAnswer"}}}}
_WITH_PATH = {404: "`not_found`: no such thing, or an id that is none"}
_WITH_BODY = {
    400: "`malformed_json`, `bad_request`",
    408: "`body_too_slow`",
    413: "`body_too_large`",
    415: "`unsupported_media_type`: `Accept` names what the address takes",
}
_WITH_KEY = {409: "`idempotency_key_in_flight`"}
_EVERYWHERE = {431: "`head_too_large`"}

#: The headers of every answer with a status.
_HEADERS = {
    "415": {"Accept": "The media type to send."},
    "429": {
        "Retry-After": "Seconds until another try may succeed.",
        "RateLimit": 'The limit, what is left of it, and the seconds until more is left: `"submissions";r=0;t=12`.',
        "RateLimit-Policy": 'The quota of the limit and, for a rate, its window in seconds: `"submissions";q=60;w=60`.',
    },
}

#: What creates -> its status, the parameter that its answer fills, from where, and the operations that take it.
_LINKS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "createUploadUrl": ("201", "media_id", "media_id", ("getMedia", "streamMediaEvents")),
    "completeUpload": ("202", "media_id", "media_id", ("getMedia",)),
    "createRun": ("202", "run_id", "id", (
        "getRun", "explainRun", "cancelRun", "retryRun", "rerunRun", "streamRunEvents",
    )),
    "createRuns": ("202", "run_id", "ids/0", ("getRun", "cancelRun")),
    "rerunRun": ("202", "run_id", "id", ("getRun", "cancelRun")),
    "createSchedule": ("201", "schedule_id", "id", (
        "getSchedule", "changeSchedule", "runScheduleNow", "backfillSchedule", "deleteSchedule",
    )),
    "runScheduleNow": ("202", "run_id", "id", ("getRun",)),
    "createWebhook": ("201", "webhook_id", "id", (
        "changeWebhook", "rotateWebhookSecret", "listDeliveries", "deleteWebhook",
    )),
    "generateImages": ("202", "task_id", "data/task_id", ("queryImages",)),
    "generateVideo": ("202", "task_id", "data/task_id", ("queryVideo",)),
    "createConversion": ("201", "job_id", "job_id", ("getConversion", "promoteConversion", "getConversionResult")),
}  # fmt: skip


def complete(document: dict[str, Any], scopes: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Add what no route says by itself. `scopes`: (path, method) -> what a key must have there."""
    by_name = {}
    for path, method, operation in _operations(document):
        by_name[operation["operationId"]] = operation
        for requirement in operation.get("security", []):
            for scheme in requirement:
                requirement[scheme] = list(scopes[path, method])
        responses = operation["responses"]
        for status, description in _more(path, operation).items():
            responses.setdefault(str(status), {"description": description} | _PROBLEM)
        for code, headers in _HEADERS.items():
            if code in responses:
                responses[code]["headers"] = {
                    name: {"description": description, "required": True, "schema": {"type": "string"}}
                    for name, description in headers.items()
                }
        operation["responses"] = dict(sorted(responses.items()))
        for parameter in operation.get("parameters", []):
            _without_null(parameter["schema"])
    _link(by_name)


def _more(path: str, operation: dict[str, Any]) -> dict[int, str]:
    more = dict(_EVERYWHERE)
    if "{" in path:
        more |= _WITH_PATH
    if "requestBody" in operation:
        more |= _WITH_BODY
    if any(parameter["name"] == "Idempotency-Key" for parameter in operation.get("parameters", [])):
        more |= _WITH_KEY
    return more


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def _without_null(schema: dict[str, Any]) -> None:
    """Take null out of the schema: a parameter can be left out, and an address or a header cannot spell null."""
    choices = [choice for choice in schema.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        del schema["anyOf"]
        schema.update(choices[0])


def _link(by_name: dict[str, dict[str, Any]]) -> None:
    for name, (status, parameter, place, readers) in _LINKS.items():
        answer = by_name[name]["responses"][status]
        answer["links"] = {
            reader: {"operationId": reader, "parameters": {parameter: f"$response.body#/{place}"}} for reader in readers
        }
        assert answer["links"].keys() <= by_name.keys(), name
    created = by_name["createTemplate"]["responses"]["201"]
    version = {"kind": "$response.body#/type", "version": "$response.body#/version"}
    created["links"] = {
        "getTemplate": {"operationId": "getTemplate", "parameters": version},
        "enableTemplate": {"operationId": "enableTemplate", "parameters": version},
        "listTemplateVersions": {
            "operationId": "listTemplateVersions", "parameters": {"kind": "$response.body#/type"},
        },
        "createRun": {"operationId": "createRun", "requestBody": {"template": "$response.body#/type"}},
        "createSchedule": {"operationId": "createSchedule", "requestBody": {"template": "$response.body#/type"}},
    }  # fmt: skip
    lease = {"worker_id": "$request.body#/worker_id", "epoch": "$response.body#/tasks/0/epoch"}
    by_name["claimExternal"]["responses"]["200"]["links"] = {
        name: {
            "operationId": name, "parameters": {"task_id": "$response.body#/tasks/0/task_id"}, "requestBody": lease,
        }
        for name in (
            "heartbeatExternal", "progressExternal", "completeExternal", "failExternal", "announceExternalFiles",
        )
    }  # fmt: skip
