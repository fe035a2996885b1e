"""The part of the API's document that the TypeScript client is made for: its types are generated from it."""

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
    *("listDeadLetters", "groupDeadLetters", "replayDeadLetters"),
})  # fmt: skip


def subset() -> str:
    """The document with these operations, and the schemas that they need."""
    whole = _plain(document(make_app(Settings.model_construct())))
    paths = {
        path: {method: operation for method, operation in item.items() if operation["operationId"] in OPERATIONS}
        for path, item in whole["paths"].items()
    }
    info = {"title": "Leasehold", "version": "1"}  # a new release alone changes no type
    part = {"openapi": whole["openapi"], "info": info, "paths": {path: item for path, item in paths.items() if item}}
    return (
        f"{json.dumps(part | {'components': {'schemas': _needed(part, whole['components']['schemas'])}}, indent=1)}\n"
    )


#: The keys of sentences. A sentence changes no type: without sentences, the types change only when a field does.
_SENTENCES = frozenset({"description", "summary", "title", "examples", "example"})
_REFUSALS = "45"


def _plain(part: Any, *, names: bool = False) -> Any:
    """The part without sentences and without the answers of errors. `names`: the keys are names of fields, and all
    stay.
    """
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {name: value for name, value in part.items() if names or name not in _SENTENCES}
    if "responses" in kept and not names:
        responses = kept["responses"].items()
        kept["responses"] = {
            status: answer | {"description": ""} for status, answer in responses if status[0] not in _REFUSALS
        }
    return {
        name: value if name == "responses" and not names else _plain(value, names=name in ("properties", "schemas"))
        for name, value in kept.items()
    }


def _needed(part: object, schemas: dict[str, Any]) -> dict[str, Any]:
    needed: dict[str, Any] = {}
    waiting = _references(part)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed[name] = schemas[name]
            waiting |= _references(schemas[name])
    return {name: needed[name] for name in sorted(needed)}


def _references(part: object) -> set[str]:
    return set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(part)))
