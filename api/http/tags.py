"""Defines the member `tags` of requests that submit jobs. Also makes the JSON of a request (`json_of_request`). The API
stores a fingerprint (a hash) of this JSON, by which it recognises a repeated request.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, JsonValue

from leasehold.domain.errors import Invalid
from leasehold.domain.tags import MAX_TAG_CHARACTERS, MAX_TAGS, NAME_PATTERN, RESERVED, check_given_tags

#: A pattern for the value of a tag: the value contains no NUL. `check_given_tags` enforces this rule; the pattern is
#: for clients that check their requests by the OpenAPI document.
_WITHOUT_NUL: dict[str, JsonValue] = {"pattern": r"^[^\u0000]*$"}
#: Members of requests that were added after the first release.
_LATER_MEMBERS = ("tags", "callback_url", "dry_run", "delay_seconds")


def _check(tags: dict[str, str]) -> dict[str, str]:
    try:
        check_given_tags(tags)
    except Invalid as error:
        raise ValueError(error.message) from None
    return tags


Tags: TypeAlias = Annotated[
    dict[str, Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARACTERS, json_schema_extra=_WITHOUT_NUL)]],
    Field(
        max_length=MAX_TAGS,
        description="Your own words about the job; `GET /v1/jobs?q=tag.NAME:VALUE` finds it by them.",
        json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN, "not": {"const": RESERVED}}},
    ),
    AfterValidator(_check),
]


def json_of_request(body: BaseModel) -> bytes:
    """The request as JSON, for the fingerprint that is stored with its idempotency key. The JSON leaves out members of
    _LATER_MEMBERS that the request does not use. So the request has the same fingerprint as in earlier releases, and
    the API recognises a repetition even after an upgrade.
    """
    unused_members = {name for name in _LATER_MEMBERS if not getattr(body, name, None)}
    return body.model_dump_json(exclude=unused_members).encode()
