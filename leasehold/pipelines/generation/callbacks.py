"""Where a provider calls when it has news. The call itself is believed nothing but this: it is time to ask.

The address holds a signature over the job's id, so that nobody else can make us ask; it is no key to anything more.
"""

from __future__ import annotations

from uuid import UUID

from leasehold.security.sealing import Sealing
from leasehold.settings import Settings

PATH = "/v1/generations/callbacks"
_PURPOSE = "generation callback"


def callback_url(settings: Settings, sealing: Sealing, job_id: UUID) -> str | None:
    """None where nobody outside could reach us, or nothing can be signed."""
    if not settings.public_url or not sealing.possible:
        return None
    return f"{settings.public_url.rstrip('/')}{PATH}/{job_id}/{sealing.sign(_PURPOSE, job_id.bytes)}"


def is_genuine(sealing: Sealing, job_id: UUID, signature: str) -> bool:
    return sealing.possible and sealing.verifies(_PURPOSE, job_id.bytes, signature)
