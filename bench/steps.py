from __future__ import annotations

import time

from bench.pipelines import stamped
from leasehold.attempt import Attempt
from leasehold.verdicts import Done


@stamped.handles("only")
async def only(_attempt: Attempt) -> Done:
    """Everything runs on one machine, so its clock is the submitter's, too."""
    return Done(value={"handler_at": time.time()})
