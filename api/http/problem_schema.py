"""The models from which the OpenAPI document describes a problem (RFC 9457)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FieldError(BaseModel):
    pointer: str | None = Field(None, description="A JSON pointer into the body, if the error is in the body.")
    parameter: str | None = Field(None, description="The name of a parameter, if the error is in a parameter.")
    place: Literal["query", "header", "cookie"] | None = Field(
        None, alias="in", description="Where the parameter is, if the error is in a parameter."
    )
    position: int | None = Field(None, description="If a filter is wrong: where, in characters from 1.")
    detail: str


class ProblemAnswer(BaseModel):
    """A problem (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:leasehold:problem:upload_missing",
                    "title": "Conflict",
                    "status": 409,
                    "detail": "Nothing was uploaded for this media yet.",
                    "code": "upload_missing",
                    "request_id": "01975c1e-9f01-7b12-8d6c-0a4b1c2d3e4f",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    code: str = Field(description="Stable and machine-readable.")
    request_id: str
    errors: list[FieldError] | None = None
