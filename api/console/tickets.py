"""Tickets: links by which `leasehold dev` signs its user in. `leasehold dev` imports this module, so this module must
import no web framework.
"""

from __future__ import annotations

import re
from time import time

from leasehold.domain.errors import Unauthenticated
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings

#: The purpose for which a ticket is signed. The signature is valid for no other purpose.
_ENTRY = "console ticket"
#: A ticket: the public prefix of an API key, the time at which the ticket expires (seconds since 1970), and the
#: signature.
_TICKET = re.compile(r"([a-z0-9]{12})\.(\d{1,12})\.([A-Za-z0-9_-]{43})")


def ticket(settings: Settings, key_prefix: str, seconds: int) -> str:
    """Make a ticket for the API key with this prefix. A browser that opens {console}/enter?ticket=... within `seconds`
    is signed in with this key. Only somebody who has the installation's sealing keys can make a ticket.
    """
    text = f"{key_prefix}.{int(time()) + seconds}"
    return f"{text}.{Sealing(settings).sign(_ENTRY, text.encode())}"


def prefix_of_ticket(settings: Settings, text: str) -> str:
    """The prefix of the key for which the ticket was made. Raises Unauthenticated for a forged or expired ticket."""
    match = _TICKET.fullmatch(text)
    signed = f"{match[1]}.{match[2]}".encode() if match is not None else b""
    if match is None or not Sealing(settings).verifies(_ENTRY, signed, match[3]) or int(match[2]) < time():
        raise Unauthenticated("invalid_ticket", "The link has expired. Sign in with an API key.")
    return match[1]
