"""Makes and checks the addresses that providers call when the state of a generation changes.

A call only makes a worker poll the provider immediately. The platform uses no content of the call. The address contains
a signature over the job's id, so that nobody can guess the address and cause polls. The signature grants nothing else.
"""

from __future__ import annotations

from uuid import UUID

from leasehold.security.sealing import Sealing
from leasehold.settings import Settings

#: All callback addresses begin with this path.
PATH = "/v1/generations/callbacks"
#: The purpose of the signature, which is valid for no other purpose.
_PURPOSE = "generation callback"


def callback_url(settings: Settings, sealing: Sealing, job_id: UUID) -> str | None:
    """The callback address of a job. Returns None if the installation has no public URL, or no key to sign with."""
    if not settings.public_url or not sealing.has_key:
        return None
    return f"{settings.public_url.rstrip('/')}{PATH}/{job_id}/{sealing.sign(_PURPOSE, job_id.bytes)}"


def is_genuine(sealing: Sealing, job_id: UUID, signature: str) -> bool:
    return sealing.has_key and sealing.verifies(_PURPOSE, job_id.bytes, signature)
