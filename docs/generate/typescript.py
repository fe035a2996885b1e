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
    whole = document(make_app(Settings.model_construct()))
    paths = {
        path: {method: operation for method, operation in item.items() if operation["operationId"] in OPERATIONS}
        for path, item in whole["paths"].items()
    }
    # Without the release's number: a new release alone changes no type.
    info = whole["info"] | {"version": "1"}
    part = {"openapi": whole["openapi"], "info": info, "paths": {path: item for path, item in paths.items() if item}}
    return (
        f"{json.dumps(part | {'components': {'schemas': _needed(part, whole['components']['schemas'])}}, indent=1)}\n"
    )


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
