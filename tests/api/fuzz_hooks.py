"""What the fuzzer (tests/api/test_contract.py) is told about this API beside its document."""

from __future__ import annotations

import atexit
import json
import os
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID, uuid4

import schemathesis
from schemathesis.core.parameters import ParameterLocation

from tests.api.fuzz_things import Things, from_environment

#: How the steps of a template hang together (needs that are there, no cycle) is not a matter of a schema.
_HANGS_TOGETHER = {"createTemplate"}

#: What the calendar holds: `format: date-time` has no bounds.
_BEYOND = "Input should be greater than or equal to 1970-01-01", "Input should be less than or equal to 2999-12-31"

#: How many of the requests that may name something real do.
_REAL = 0.8
#: And of those that a link has led to something, that turn to another: with the first perhaps nothing can be done.
_ELSEWHERE = 0.5
#: Members of a body that name a thing; others are put right only where the request has them.
_NAMES = frozenset({"task_id", "worker_id", "epoch", "template", "url"})
_MAX_WAIT = 30
_SHORT_WAIT = 0.1
_MUCH = 100_000
_ID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_random = Random(int(os.environ.get("LEASEHOLD_FUZZ_SEED", "0")))
#: Operation -> status -> answers.
_answers: defaultdict[str, Counter[int]] = defaultdict(Counter)
#: Ids that the API has given out: a request that a link has led to names one of them.
_given_out: set[str] = set()


@cache
def _things() -> Things:
    return from_environment()


def _name_of(case: Any) -> str:
    return str(case.operation.definition.raw["operationId"])


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Most requests are about something that is there; a key that was used before, with another body, is refused
    rightly; and nobody wants to wait for nothing. What breaks the schema on purpose goes on doing so.
    """
    if case.meta is None:
        return
    judge_null_rightly(case)
    parts = (case.meta.generation, *case.meta.components.values())
    positive = all(part.mode.is_positive for part in parts)
    if positive and case.headers and case.headers.get("Idempotency-Key"):
        case.headers = case.headers.copy()
        case.headers["Idempotency-Key"] = str(uuid4())
    for part in ("query", "body"):
        said = getattr(case, part)
        if isinstance(said, dict) and _SHORT_WAIT < _seconds(said.get("wait")) <= _MAX_WAIT:
            change(case, part, {"wait": _SHORT_WAIT})
    name = _name_of(case)
    if name.startswith("stream") or not _is_led_here(case) or not _answers[name] or _random.random() < _ELSEWHERE:
        _name_something(name, case, positive=positive)
    if name == "setLimit" and isinstance(case.body, dict):
        change(case, "body", _holding_back_nobody(case.body))
    if positive and name == "promoteConversion" and isinstance(case.body, dict):
        change(case, "body", {"targets": [_apart(target) for target in case.body["targets"]]})


def judge_null_rightly(case: Any) -> None:
    """Schemathesis judges a body again that a link has set, and then takes null for a violation everywhere (version
    4.32, `Case._validate_component`). An operation that needs no body allows null: {} stands for it here.
    """
    body = case.operation.definition.raw.get("requestBody", {"required": True})
    judged = case.meta.components.get(ParameterLocation.BODY)
    if case.body is None and not body.get("required") and judged is not None and judged.mode.is_negative:
        case.body = {}


def _seconds(wait: object) -> float:
    """What a body holds as a number and a query as text; 0.0: no number."""
    try:
        return float(wait) if isinstance(wait, int | float | str) else 0.0
    except ValueError:
        return 0.0


def change(case: Any, part: str, changes: dict[str, Any]) -> None:
    """The fuzzer makes many cases of the same values: a copy is changed. None: the member is left out."""
    was = getattr(case, part) or {}
    left_out = {key for key, value in changes.items() if value is None}
    changed = {key: value for key, value in {**was, **changes}.items() if key not in left_out}
    if changed != was:
        setattr(case, part, changed if part != "path_parameters" else {k: _plain(v) for k, v in changed.items()})


def _plain(value: object) -> object:
    """Schemathesis (4.32) keeps the values of a path as they are sent, `a%3Ab`. It judges a changed path again by these
    texts, and takes the colon that a pattern allows for a violation. A path may hold a colon as it is.
    """
    return quote(unquote(value), safe=":") if isinstance(value, str) else value


def _is_led_here(case: Any) -> bool:
    named = {str(value) for value in [*(case.path_parameters or {}).values(), *(case.query or {}).values()]}
    return bool((named & _given_out) - _things().lasting)


def _name_something(name: str, case: Any, *, positive: bool) -> None:
    """A well-formed id becomes that of a real thing, whatever else is wrong with the request; a stream is asked for
    only of what has ended, or of nothing, for of the others it is endless.
    """
    ids = [key for key, value in (case.path_parameters or {}).items() if _is_id(value)]
    if name.startswith("stream") and (case.query or {}).get("task_id") in _given_out:
        change(case, "query", {"task_id": str(uuid4())})
    elsewhere = not any(str(value) in _things().lasting for value in (case.path_parameters or {}).values())
    if _answers[name] and elsewhere and _random.random() > _REAL:
        if name.startswith("stream"):
            change(case, "path_parameters", {key: str(uuid4()) for key in ids})
        return
    if not (positive or ids):
        return
    subject = _things().about(name)
    change(case, "path_parameters", {key: value for key, value in subject.path.items() if positive or key in ids})
    if not positive:
        return
    change(case, "query", subject.query)
    if isinstance(case.body, dict):
        known = {*case.body, *_NAMES}
        change(case, "body", {key: value for key, value in subject.body.items() if key in known})


def _apart(target: dict[str, Any]) -> dict[str, Any]:
    """The tests' store is a file system, which holds no `a/b` beside an object `a`; S3 does. Folders end in `.d`."""
    *folders, name = str(target.get("key") or "").split("/")
    return target | {"key": "/".join([*(f"{folder[:120]}.d" for folder in folders), name])} if folders else target


def _is_id(value: object) -> bool:
    try:
        UUID(str(value))
    except ValueError:
        return False
    return True


def _holding_back_nobody(body: dict[str, Any]) -> dict[str, Any]:
    """A limit for everybody would keep the things of the other requests from getting anywhere. JSON's integers may be
    written as 354.0; and a request that is wrong elsewhere, in a header that nobody reads, sets its limit.
    """
    bounds = ("at_most", "per_minute")
    return {bound: _MUCH for bound in bounds if _is_integer(body.get(bound)) and 0 <= body[bound] < _MUCH}


def _is_integer(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    _answers[_name_of(case)][response.status_code] += 1
    if response.status_code in (200, 201, 202):
        _given_out.update(found.decode() for found in _ID.findall(response.content))


@atexit.register
def _write_down() -> None:
    if path := os.environ.get("LEASEHOLD_FUZZ_ANSWERS"):
        Path(path).write_text(json.dumps(_answers))


@schemathesis.check
def what_the_schema_allows_is_not_invalid(_context: Any, response: Any, case: Any) -> None:
    """A 422 of another code than `invalid_request` is about what the words mean, which no schema can say: the template
    that there is, the zone, the address. What is well-formed by the schema must never be `invalid_request`.
    """
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive or response.status_code != 422:
        return
    said = response.json()
    if any(error["detail"].startswith(_BEYOND) for error in said.get("errors", [])):
        return
    if said.get("code") == "invalid_request" and _name_of(case) not in _HANGS_TOGETHER:
        raise AssertionError(f"schema-valid, and refused as invalid_request: {said}")
