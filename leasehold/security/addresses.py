"""Decides whether an IP address belongs to the public Internet. Egress (the HTTP client for URLs from outside) connects
only to such addresses, and to networks that the settings allow.

The tables are written out, because Python's own tables differ between its versions. Source: IANA IPv4 and IPv6
Special-Purpose Address Registries (RFC 6890, 8190) and the IPv6 address space, as of 2025. A special-purpose range is
refused even if the registry calls it globally reachable. This excludes nothing useful: such a range has the anycast
addresses of a protocol (AS112, AMT, PCP, TURN), which receive no webhooks and serve no files.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_SPECIAL_V4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private use
        "100.64.0.0/10",  # shared address space (CGNAT); 100.100.100.200 is Alibaba Cloud's metadata service
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local; metadata services of most clouds
        "172.16.0.0/12",  # private use
        "192.0.0.0/24",  # IETF protocol assignments; 192.0.0.192 is Oracle Cloud's metadata service
        "192.0.2.0/24",  # TEST-NET-1
        "192.31.196.0/24",  # AS112-v4
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # 6to4 relay anycast, deprecated
        "192.168.0.0/16",  # private use
        "192.175.48.0/24",  # direct delegation AS112
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # TEST-NET-2
        "203.0.113.0/24",  # TEST-NET-3
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and limited broadcast
    )
)

#: The registries call these addresses public. But inside a cloud, they lead to services of the cloud itself.
_CLOUDS_V4 = tuple(
    IPv4Network(text)
    for text in (
        "168.63.129.16/32",  # Azure: the host's agent, DNS and health probes
        "161.26.0.0/16",  # IBM Cloud: services on the private network
        "166.8.0.0/14",  # IBM Cloud: service endpoints
    )
)

#: All IPv6 addresses assigned for unicast. Outside of this range are loopback, unique local (fd00:ec2::254 of AWS,
#: fd20:ce::254 of Google Cloud), link-local, site-local, multicast, mapped, discard-only, SRv6 and unassigned
#: addresses.
_UNICAST_V6 = IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # IETF protocol assignments: Teredo, benchmarking, AMT, AS112-v6, ORCHIDs, drone remote ids
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: it contains an IPv4 address, and no relay serves it any more (RFC 7526)
        "2620:4f:8000::/48",  # direct delegation AS112
        "3ffe::/16",  # 6bone, returned
        "3fff::/20",  # documentation
    )
)

_IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
#: Only the well-known prefix of NAT64. The prefix 64:ff9b:1::/48 is left out, because it is for local use, and each
#: network decides its meaning.
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Whether `address` is public. If it is IPv4-mapped or NAT64, the IPv4 address that it contains decides."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in (*_SPECIAL_V4, *_CLOUDS_V4))
    if address in _IPV4_MAPPED or address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _UNICAST_V6 and not any(address in network for network in _SPECIAL_V6)
