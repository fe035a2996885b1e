"""Where a request comes from: the peer, or who a proxy of ours says it is."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from fastapi import Request

from leasehold.api.process.services import services_of


@lru_cache(maxsize=8)
def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def source_address(request: Request) -> str | None:
    """The nearest address that is no proxy of LEASEHOLD_TRUSTED_PROXIES.

    Each proxy appends whom it heard from, so X-Forwarded-For is read from its end, and only as far as proxies wrote it.
    """
    if request.client is None:
        return None
    proxies = _networks(services_of(request).settings.trusted_proxies)
    said = [part.strip() for line in request.headers.getlist("x-forwarded-for") for part in line.split(",")]
    source = request.client.host
    while said and _is_in(source, proxies):
        before = said.pop()
        if _parsed(before) is None:
            break
        source = before
    return source


def _is_in(text: str, networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]) -> bool:
    address = _parsed(text)
    return address is not None and any(address in network for network in networks)


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
