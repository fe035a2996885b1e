"""The handlers; only workers import them."""

from __future__ import annotations

from leasehold.domain.attempt import Attempt
from leasehold.domain.verdicts import Done
from printing import printing


@printing.handles("print")
async def print_document(attempt: Attempt) -> Done:
    return Done(value={"pages": 2 * attempt.params.copies})
