"""The edges of each range that is refused: its first and its last address are, and their public neighbours are not."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network, summarize_address_range

import pytest

from leasehold.security import addresses
from leasehold.security.addresses import is_public

#: First and last address of a range; the addresses before and after it, where these are public.
RANGES: list[tuple[str, str, str | None, str | None]] = [
    ("0.0.0.0", "0.255.255.255", None, "1.0.0.0"),
    ("10.0.0.0", "10.255.255.255", "9.255.255.255", "11.0.0.0"),
    ("100.64.0.0", "100.127.255.255", "100.63.255.255", "100.128.0.0"),
    ("127.0.0.0", "127.255.255.255", "126.255.255.255", "128.0.0.0"),
    ("161.26.0.0", "161.26.255.255", "161.25.255.255", "161.27.0.0"),
    ("166.8.0.0", "166.11.255.255", "166.7.255.255", "166.12.0.0"),
    ("168.63.129.16", "168.63.129.16", "168.63.129.15", "168.63.129.17"),
    ("169.254.0.0", "169.254.255.255", "169.253.255.255", "169.255.0.0"),
    ("172.16.0.0", "172.31.255.255", "172.15.255.255", "172.32.0.0"),
    ("192.0.0.0", "192.0.0.255", "191.255.255.255", "192.0.1.0"),
    ("192.0.2.0", "192.0.2.255", "192.0.1.255", "192.0.3.0"),
    ("192.31.196.0", "192.31.196.255", "192.31.195.255", "192.31.197.0"),
    ("192.52.193.0", "192.52.193.255", "192.52.192.255", "192.52.194.0"),
    ("192.88.99.0", "192.88.99.255", "192.88.98.255", "192.88.100.0"),
    ("192.168.0.0", "192.168.255.255", "192.167.255.255", "192.169.0.0"),
    ("192.175.48.0", "192.175.48.255", "192.175.47.255", "192.175.49.0"),
    ("198.18.0.0", "198.19.255.255", "198.17.255.255", "198.20.0.0"),
    ("198.51.100.0", "198.51.100.255", "198.51.99.255", "198.51.101.0"),
    ("203.0.113.0", "203.0.113.255", "203.0.112.255", "203.0.114.0"),
    ("224.0.0.0", "239.255.255.255", "223.255.255.255", None),
    ("240.0.0.0", "255.255.255.255", None, None),
    ("2001::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", "2000:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2001:200::"),
    ("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "2001:db7:ffff:ffff:ffff:ffff:ffff:ffff", "2001:db9::"),
    ("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2003::"),
    ("2620:4f:8000::", "2620:4f:8000:ffff:ffff:ffff:ffff:ffff", "2620:4f:7fff:ffff:ffff:ffff:ffff:ffff",
     "2620:4f:8001::"),
    ("3ffe::", "3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "3ffd:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff", None, "3fff:1000::"),
    # What is not assigned for unicast, below 2000::/3 and above it. Unique local, link-local and multicast are there.
    ("::", "1fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, "2000::"),
    ("4000::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "3fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
]  # fmt: skip


@pytest.mark.parametrize(("first", "last", "before", "after"), RANGES)
def test_a_range_is_refused_from_its_first_to_its_last_address(
    first: str, last: str, before: str | None, after: str | None
) -> None:
    assert not is_public(ip_address(first))
    assert not is_public(ip_address(last))
    for neighbour, beside in ((before, int(ip_address(first)) - 1), (after, int(ip_address(last)) + 1)):
        if neighbour is not None:
            assert int(ip_address(neighbour)) == beside
            assert is_public(ip_address(neighbour))


def test_each_range_that_is_refused_has_its_edges_here() -> None:
    tables = {**vars(addresses)}
    coded = {network for name in ("_SPECIAL_V4", "_CLOUDS_V4", "_SPECIAL_V6") for network in tables[name]}
    tried: set[IPv4Network | IPv6Network] = set()
    for first, last, _, _ in RANGES:
        tried.update(summarize_address_range(ip_address(first), ip_address(last)))
    outside = {ip_network("::/3"), *summarize_address_range(ip_address("4000::"), ip_address("f" * 4 + ":ffff" * 7))}
    assert tried - outside == coded


@pytest.mark.parametrize("prefix", ["::ffff:", "64:ff9b::"])
@pytest.mark.parametrize(
    "inside", ["1.1.1.1", "10.0.0.1", "127.0.0.1", "169.254.169.254", "255.255.255.255", "0.0.0.0"]
)
def test_the_ipv4_address_inside_decides(prefix: str, inside: str) -> None:
    assert is_public(ip_address(prefix + inside)) is is_public(ip_address(inside))


@pytest.mark.parametrize(
    "address",
    [
        "::fffe:1.1.1.1",  # below the mapped prefix, and above it
        "::1:0:101:101",
        "::1.1.1.1",
        "64:ff9b:0:0:0:1:101:101",  # beside the well-known NAT64 prefix
        "64:ff9a:ffff:ffff:ffff:ffff:101:101",
        "64:ff9b:1::101:101",  # NAT64 for local use
        "fd00:ec2::254",
        "fd20:ce::254",
        "fe80::1",
        "fec0::1",
        "ff02::1",
        "::1",
    ],
)
def test_what_only_looks_like_such_a_prefix_and_what_lies_inside_is_refused(address: str) -> None:
    assert not is_public(ip_address(address))
