"""A pipeline whose handler does what a decoder would do that a picture has taken over. See hostile_steps."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines


class Attack(BaseModel):
    """`attack`: the name of a function in hostile_steps; `args`: what it is told."""

    attack: str
    args: dict[str, Any] = {}


hostile = Pipeline(
    "hostile",
    params=Attack,
    module="tests.security.hostile_steps",
    steps=[Step("parse", isolated=True, max_attempts=1)],
)


def pipelines() -> Pipelines:
    return Pipelines(hostile)
