"""The page of errors: the codes of problems, the codes with which a job or a run fails, and the tree of exceptions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from itertools import groupby
from typing import Any

from docs.generate.raised import WRITTEN_TO_JOB, WRITTEN_TO_TASK, Raised, raised
from docs.generate.tables import code, table
from leasehold.api.app import make_app
from leasehold.api.http.openapi import document
from leasehold.api.http.problems import CODE_AND_DETAIL, STATUS_OF
from leasehold.domain import errors
from leasehold.settings import Settings

_INTRODUCTION = """# Errors

A code is stable: programs compare it. A sentence is for people and may change; `{name}` stands for a value.
"""
_PROBLEMS = """## Codes of the HTTP API

An error is `application/problem+json` (RFC 9457) with `code`, `detail`, `status`, `request_id` and, for a value that is
not acceptable, `errors`. An answer with 429, and a 503 for something that is down, has `Retry-After`. Which operation
answers which code: [HTTP API](http.md).
"""
_STEPS = """## Codes of a job or a run that failed

`error.code` of a run, a picture, a conversion or a generation. A handler of your own adds its own codes. *Tried again*
means: along the retry ladder of the step, until its attempts are used up.
"""
_TREE = """## Exceptions

The tree, from the root. A handler raises `Retryable` or `Permanent`; `from leasehold import Retryable` has each that a
program of yours needs.
"""
_STATUSES = {kind.__name__: status for kind, status in STATUS_OF.items()}
_STATUSES["_unavailable"] = HTTPStatus.SERVICE_UNAVAILABLE
_STEP_ERRORS = {
    kind.__name__: kind.retryable
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.StepError)
}
#: The errors of a step's outbound requests, and of what a workflow awaits -> whether another try may succeed.
_STEP_ERRORS |= {
    "Rejected": False,
    "NoAccess": False,
    "UnusableFile": False,
    "EgressRefused": False,
    "OutcomeUnknown": False,
    "TaskFailed": False,
    "TryLater": True,
}
_STEP_ERRORS |= {WRITTEN_TO_TASK: True, WRITTEN_TO_JOB: False}
#: Files whose errors only the command line shows.
_COMMAND_LINE_FILES = ("leasehold/cli/", "leasehold/db/roles.py", "leasehold/security/credentials.py")
_CODE = re.compile(r"`([a-z][a-z0-9_]+)`")


def page() -> str:
    tree = (errors.__doc__ or "").partition("\n\n")[2].strip()
    return "\n\n".join(
        [_INTRODUCTION, _PROBLEMS, _problems_table(), _STEPS, _steps_table(), _TREE, f"```text\n{tree}\n```"]
    )


def _problems_table() -> str:
    sentences: dict[str, list[str]] = defaultdict(list)
    statuses: dict[str, set[int]] = defaultdict(set)
    for error in raised():
        status: int | None = _STATUSES.get(error.kind) or HTTPStatus.__members__.get(error.kind)
        if status is not None and not error.file.startswith(_COMMAND_LINE_FILES):
            statuses[error.code].add(int(status))
            sentences[error.code].append(error.sentence)
    for http_status, (name, sentence) in CODE_AND_DETAIL.items():
        statuses[name].add(int(http_status))
        sentences[name].append(sentence)
    contract = document(make_app(Settings(_env_file=None)))
    fields = {name for schema in contract["components"]["schemas"].values() for name in schema.get("properties", ())}
    for name, status_code in _documented(contract):
        if name in statuses or name not in fields:
            statuses[name].add(status_code)
    rows = [
        (code(name), ", ".join(str(status) for status in sorted(statuses[name])), _common_sentence(sentences[name]))
        for name in sorted(statuses)
    ]
    return table(["code", "status", "sentence"], rows)


def _documented(contract: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """(name, status) for each name in backticks in the descriptions of errors in the OpenAPI document. Most are codes,
    and a few are names of fields.
    """
    for item in contract["paths"].values():
        for operation in item.values():
            for status, answer in operation["responses"].items():
                if int(status) >= HTTPStatus.BAD_REQUEST:
                    yield from ((name, int(status)) for name in _CODE.findall(answer["description"]))


def _steps_table() -> str:
    def by_code(error: Raised) -> str:
        return error.code

    step_errors = sorted((error for error in raised() if error.kind in _STEP_ERRORS), key=by_code)
    rows = []
    for name, group in groupby(step_errors, by_code):
        errors_with_code = list(group)
        retryable = {_STEP_ERRORS[error.kind] for error in errors_with_code}
        rows.append(
            (code(name), _tried_again(retryable), _common_sentence(error.sentence for error in errors_with_code))
        )
    return table(["code", "tried again", "sentence"], rows)


def _tried_again(retryable: set[bool]) -> str:
    return {frozenset({True}): "yes", frozenset({False}): "no"}.get(frozenset(retryable), "it depends")


def _common_sentence(sentences: Iterable[str]) -> str:
    """The sentence, if all are the same; "" if they differ."""
    different = {sentence for sentence in sentences if sentence}
    return different.pop() if len(different) == 1 else ""
