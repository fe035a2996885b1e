"""What the fuzzer (tests/api/test_contract.py) is told about this API beside its document."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import schemathesis

#: How the steps of a template hang together (needs that are there, no cycle) is no matter of a schema.
_HANGS_TOGETHER = {"createTemplate"}

#: What the calendar holds: `format: date-time` has no bounds.
_BEYOND = "Input should be greater than or equal to 1970-01-01", "Input should be less than or equal to 2999-12-31"


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """A key that was used before, with another body, is refused rightly; and nobody wants to wait for nothing."""
    if case.headers and case.headers.get("Idempotency-Key"):
        case.headers["Idempotency-Key"] = str(uuid4())
    for part in (case.query, case.body):
        if isinstance(part, dict) and isinstance(part.get("wait"), int | float) and part["wait"] > 1:
            part["wait"] = 0.1


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
    if said.get("code") == "invalid_request" and case.operation.definition.raw["operationId"] not in _HANGS_TOGETHER:
        raise AssertionError(f"schema-valid, and refused as invalid_request: {said}")
