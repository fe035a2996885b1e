"""The part of the OpenAPI document that the TypeScript client uses: its types are generated from this part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from leasehold.api.app import make_app
from leasehold.api.http.openapi import document
from leasehold.settings import Settings

FOLDER = Path(__file__).parents[2] / "clients" / "typescript"
#: The operations that `clients/typescript` sends.
OPERATIONS = frozenset({
    *("createRun", "createRuns", "listRuns", "getRun", "rerunRun", "signalRun"),
    *("listJobs", "getJob", "explainJob", "cancelJob", "retryJob", "deleteJob"),
    *("streamJobEvents", "readJobLogs", "readJobStream"),
    *("claimExternal", "heartbeatExternal", "progressExternal", "completeExternal", "failExternal", "releaseExternal"),
    *("acknowledgeCancelExternal", "announceExternalFiles", "logExternal", "emitExternal"),
    *("listDeadLetters", "groupDeadLetters", "replayDeadLetters"),
})  # fmt: skip


def subset() -> str:
    """The text of an OpenAPI document that has only OPERATIONS and the schemas that they need."""
    whole = _without_sentences(document(make_app(Settings.model_construct())))
    paths = {
        path: {method: operation for method, operation in item.items() if operation["operationId"] in OPERATIONS}
        for path, item in whole["paths"].items()
    }
    info = {"title": "Leasehold", "version": "1"}  # a new release alone changes no type
    part: dict[str, Any] = {
        "openapi": whole["openapi"],
        "info": info,
        "paths": {path: item for path, item in paths.items() if item},
    }
    part["components"] = {"schemas": _needed(part, whole["components"]["schemas"])}
    return f"{json.dumps(part, indent=1)}\n"


#: The keys whose values are sentences. They are left out, so that a new sentence does not change the generated types.
_SENTENCES = frozenset({"description", "summary", "title", "examples", "example"})
#: Fields of the document whose keys are names of fields, schemas, statuses or headers. The value of such a key is no
#: sentence, even if the key is `title`.
_KEYED_BY_NAME = frozenset({"properties", "schemas", "responses", "headers"})


def _without_sentences(part: Any, field: str = "") -> Any:
    """The part without sentences and without error responses. `field`: the name of the field that has the part."""
    if isinstance(part, list):
        return [_without_sentences(item) for item in part]
    if not isinstance(part, dict):
        return part
    if field == "responses":
        answers = {status: answer for status, answer in part.items() if not _is_error(status)}
        return {status: {"description": ""} | _without_sentences(answer) for status, answer in answers.items()}
    return {
        name: _without_sentences(value, "" if field in _KEYED_BY_NAME else name)
        for name, value in part.items()
        if field in _KEYED_BY_NAME or name not in _SENTENCES
    }


def _is_error(status: str) -> bool:
    return status.startswith(("4", "5"))


def _needed(part: object, schemas: dict[str, Any]) -> dict[str, Any]:
    needed: dict[str, Any] = {}
    unread = _references(part)
    while unread:
        name = unread.pop()
        if name not in needed:
            needed[name] = schemas[name]
            unread |= _references(schemas[name])
    return {name: needed[name] for name in sorted(needed)}


def _references(part: object) -> set[str]:
    return set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(part)))
