"""A kind of work from outside the platform's package: it prints documents. docs/guides/kinds.md explains it."""

from __future__ import annotations

from pydantic import BaseModel

from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline, RunTerms, Step
from leasehold.domain.registry import Pipelines


class PrintParams(BaseModel):
    title: str
    copies: int


printing = Pipeline(
    "printing",
    module="printing.steps",
    params=PrintParams,
    terms=RunTerms(offered=False),
    steps=[Step("print", queue="printing")],
)

KIND = Kind(
    "printing",
    pipelines=(printing,),
    settings="printing.settings:PrintingSettings",
    migrations="printing.migrations",
    routers=("printing.endpoints:router",),
    opens="printing.endpoints:open_press",
    housekeeping="printing.housekeeping:housekeeping",
    questions="printing.questions:questions",
)


def pipelines() -> Pipelines:
    return Pipelines(KIND)
