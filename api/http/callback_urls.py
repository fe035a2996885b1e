"""The member `callback_url` of requests that submit jobs, and the check of this URL."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from leasehold.domain.errors import Invalid
from leasehold.security.egress import Egress, EgressRefused
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings

MAX_CHARACTERS = 2000
CallbackUrl: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)] | None,
    Field(
        description="Each time the job ends, the platform sends a `job.*` event to this URL, as to a webhook. The "
        "tenant's callback secret signs the event."
    ),
]
#: Codes of a refused URL, for the documentation of an endpoint.
REFUSED_URL = "`url_malformed`, `address_private`, `port_refused`"


def check_callback_url(settings: Settings, url: str | None) -> None:
    """Raises Invalid if no delivery could ever reach the URL. Raises Unavailable if the installation cannot sign
    events.

    This check does not resolve the host, because a submission must not wait for a name server. Each delivery resolves
    the host and checks its addresses.
    """
    if url is None:
        return
    try:
        Egress.from_settings(settings).check_form(url)
    except EgressRefused as error:
        raise Invalid(error.code, str(error)) from None
    Sealing(settings).require()
