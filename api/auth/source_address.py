"""Finds the address from which a request comes, for the audit. This is the address of the peer (the other end of the
connection). But if the peer is a trusted proxy, it is the address that the proxy names.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from fastapi import Request

from leasehold.api.process.services import services_of


@lru_cache(maxsize=8)
def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def source_address(request: Request) -> str | None:
    """The first address, on the way from this server to the client, that is not in LEASEHOLD_TRUSTED_PROXIES. If all
    addresses belong to trusted proxies, it is the address that is nearest to the client. None: the server does not know
    the address of its peer.

    Each proxy appends the address of its own peer to X-Forwarded-For. So this function reads the header from its end.
    It reads only the entries that trusted proxies wrote, because a client may have invented the others.
    """
    if request.client is None:
        return None
    proxies = _networks(services_of(request).settings.trusted_proxies)
    header_lines = request.headers.getlist("x-forwarded-for")
    forwarded_addresses = [part.strip() for line in header_lines for part in line.split(",")]
    source = request.client.host
    while forwarded_addresses and _is_in(source, proxies):
        previous = forwarded_addresses.pop()
        if _parsed(previous) is None:  # the entry is no address, so the proxy is the last known source
            break
        source = previous
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
