"""Completes the OpenAPI document for all operations: it adds statuses that no route declares, headers, and links. The
app's method `openapi` calls `complete_document` once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leasehold.api.http.problems import MEDIA_TYPE

#: The content, in OpenAPI's form, of an answer that is a problem.
_PROBLEM = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemAnswer"}}}}
# Statuses that many operations may answer, with the codes of their problems. The routes do not declare them.
_STATUSES_OF_PATHS_WITH_ID = {404: "`not_found`: there is no such object, or the id is malformed"}
_STATUSES_OF_BODIES = {
    400: "`malformed_json`, `bad_request`",
    408: "`body_too_slow`",
    413: "`body_too_large`",
    415: "`unsupported_media_type`: the response header `Accept` names the media type that the request body must have",
}
_STATUSES_OF_ALL = {431: "`head_too_large`"}

# The codes of every operation that takes an idempotency key. The routes need not declare these codes.
_CODES_OF_IDEMPOTENCY_KEYS = {
    409: ("idempotency_key_in_flight",),
    422: ("idempotency_key_reused", "idempotency_key_malformed"),
}
# The codes of every operation that takes values in a query or a body. The routes need not declare these codes either.
_CODES_OF_VALUES = {422: ("invalid_request",)}
#: The codes of every operation that needs an API key. The API sends them while a part of the platform does not answer,
#: or while the caller's tenant moves to another cell (another installation).
_CODES_OF_OUTAGES = {503: ("database_unavailable", "busy", "tenant_moving")}

#: Status -> the headers of every answer with this status.
_HEADERS = {
    "415": {"Accept": "The media type that the request body must have."},
    "429": {
        "Retry-After": "Seconds until another try may succeed.",
        "RateLimit": 'The limit, what is left of it, and the seconds until there is more: `"submissions";r=0;t=12`.',
        "RateLimit-Policy": 'The quota of the limit and, for a rate, its window in seconds: `"submissions";q=60;w=60`.',
    },
}

#: OpenAPI links from an operation that creates an object. Each value has four parts: the status of the answer, the
#: parameter that the link fills, the JSON pointer to the parameter's value in the answer, and the operations that have
#: this parameter.
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


def complete_document(document: dict[str, Any], scopes: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Complete the document in place. `scopes`: (path, method) -> the scopes that the operation needs."""
    operations_by_id = {}
    for path, method, operation in _operations(document):
        operations_by_id[operation["operationId"]] = operation
        for requirement in operation.get("security", []):
            for scheme in requirement:
                requirement[scheme] = list(scopes[path, method])
        _complete_responses(path, operation)
        for parameter in operation.get("parameters", []):
            _remove_null(parameter["schema"])
    _add_links(operations_by_id)


def _complete_responses(path: str, operation: dict[str, Any]) -> None:
    """Add to the operation the statuses that its route does not declare, and the headers. Sort the statuses."""
    responses = operation["responses"]
    for status, description in _common_statuses(path, operation).items():
        responses.setdefault(str(status), {"description": description} | _PROBLEM)
    for codes_of in _codes_of(operation):
        for status_code, codes in codes_of.items():
            answer = responses.setdefault(str(status_code), {"description": ""} | _PROBLEM)
            answer["description"] = _with_codes(answer["description"], codes)
    for code, headers in _HEADERS.items():
        if code in responses:
            responses[code]["headers"] = {
                name: {"description": description, "required": True, "schema": {"type": "string"}}
                for name, description in headers.items()
            }
    operation["responses"] = dict(sorted(responses.items()))


def _common_statuses(path: str, operation: dict[str, Any]) -> dict[int, str]:
    statuses = dict(_STATUSES_OF_ALL)
    if "{" in path:
        statuses |= _STATUSES_OF_PATHS_WITH_ID
    if "requestBody" in operation:
        statuses |= _STATUSES_OF_BODIES
    return statuses


def _codes_of(operation: dict[str, Any]) -> Iterator[Mapping[int, Sequence[str]]]:
    parameters = operation.get("parameters", [])
    if operation.get("security"):
        yield _CODES_OF_OUTAGES
    if "application/json" in operation.get("requestBody", {}).get("content", {}) or any(
        parameter["in"] == "query" for parameter in parameters
    ):
        yield _CODES_OF_VALUES
    if any(parameter["name"] == "Idempotency-Key" for parameter in parameters):
        yield _CODES_OF_IDEMPOTENCY_KEYS


def _with_codes(text: str, codes: Sequence[str]) -> str:
    """Add the missing codes at the end of `text`, the description of a status. Returns the new text."""
    missing_codes = ", ".join(f"`{code}`" for code in codes if f"`{code}`" not in text)
    # The text may end with an explanation (`code`: words). After a comma, the next code would read as a part of it.
    separator = "; " if ":" in text else ", "
    return separator.join(part for part in (text, missing_codes) if part)


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def _remove_null(schema: dict[str, Any]) -> None:
    """Remove null from the schema of a parameter. A URL or a header cannot contain null, so a client leaves the
    parameter out instead.
    """
    choices = [choice for choice in schema.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        del schema["anyOf"]
        schema.update(choices[0])
    elif choices:
        schema["anyOf"] = choices


def _add_links(operations_by_id: dict[str, dict[str, Any]]) -> None:
    for name, (status, parameter, pointer, targets) in _LINKS.items():
        answer = operations_by_id[name]["responses"][status]
        answer["links"] = {
            target: {"operationId": target, "parameters": {parameter: f"$response.body#/{pointer}"}}
            for target in targets
        }
        assert answer["links"].keys() <= operations_by_id.keys(), name
    # The links below do not fit into _LINKS. Most of them fill two parameters, or a part of the request's body (for
    # example the lease in the calls about a claimed task).
    created_template = operations_by_id["createTemplate"]["responses"]["201"]
    version_parameters = {"kind": "$response.body#/type", "version": "$response.body#/version"}
    created_template["links"] = {
        "getTemplate": {"operationId": "getTemplate", "parameters": version_parameters},
        "enableTemplate": {"operationId": "enableTemplate", "parameters": version_parameters},
        "deleteTemplate": {"operationId": "deleteTemplate", "parameters": version_parameters},
        "listTemplateVersions": {
            "operationId": "listTemplateVersions", "parameters": {"kind": "$response.body#/type"},
        },
        "createRun": {"operationId": "createRun", "requestBody": {"template": "$response.body#/type"}},
        "createSchedule": {"operationId": "createSchedule", "requestBody": {"template": "$response.body#/type"}},
    }  # fmt: skip
    lease = {"worker_id": "$request.body#/worker_id", "epoch": "$response.body#/tasks/0/epoch"}
    operations_by_id["claimExternal"]["responses"]["200"]["links"] = {
        name: {
            "operationId": name, "parameters": {"task_id": "$response.body#/tasks/0/task_id"}, "requestBody": lease,
        }
        for name in (
            "heartbeatExternal", "progressExternal", "completeExternal", "failExternal", "announceExternalFiles",
        )
    }  # fmt: skip
