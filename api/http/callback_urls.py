"""The member `callback_url` of requests that submit jobs."""

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
        description="Each end of the job is sent there, as `job.*` of a webhook, signed with the tenant's callback "
        "secret."
    ),
]
#: Codes of a refused URL, for the documentation of an endpoint.
REFUSED_URL = "`url_malformed`, `address_private`, `port_refused`"


def check_callback_url(settings: Settings, url: str | None) -> None:
    """Raises Invalid if no delivery could ever go to the URL; Unavailable if the installation cannot sign.

    A submission does not wait for a name server: each delivery resolves the host and checks its addresses.
    """
    if url is None:
        return
    try:
        Egress.from_settings(settings).check_form(url)
    except EgressRefused as error:
        raise Invalid(error.code, str(error)) from None
    Sealing(settings).require()
