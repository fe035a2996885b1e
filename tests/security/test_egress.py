"""No address that a client names leads into our own network, a cloud's, or nowhere."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from typing import Any

import pytest

from leasehold.security.egress import Egress, EgressRefused, is_public


def words(text: str) -> list[str]:
    return text.split()


# IANA's registries of special-purpose addresses, whole: https://www.iana.org/assignments/iana-ipv4-special-registry
# and .../iana-ipv6-special-registry. Then what the IPv6 address space sets apart besides.
REGISTRY = words("""
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29 192.0.0.8/32
192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24
192.88.99.2/32 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4
255.255.255.255/32
::1/128 ::/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128 2001:1::3/128
2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2002::/16
2620:4f:8000::/48 3fff::/20 5f00::/16 fc00::/7 fe80::/10
224.0.0.0/4 ff00::/8 fec0::/10 3ffe::/16 ::/96 ::ffff:0:0:0/96 4000::/3 6000::/3 8000::/3 a000::/3 c000::/3 e000::/4
""")
SERVICES = words("""
169.254.169.254 169.254.170.2 168.63.129.16 100.100.100.200 192.0.0.192 161.26.0.10 166.9.1.1
fd00:ec2::254 fd20:ce::254 fd00:42::42 fe80::a9fe:a9fe
""")
PUBLIC = words("""
1.1.1.1 8.8.8.8 93.184.216.34 100.63.255.255 100.128.0.0 168.63.129.15 168.63.129.17 172.15.255.255 172.32.0.0
192.0.1.0 192.88.98.255 198.17.255.255 198.20.0.0 223.255.255.255
2001:200::1 2001:4860:4860::8888 2001:db9::1 2003::1 2606:4700::1111 2620:4f:8001::1 3fff:1000::1 2a00:1450::1
""")


def edges(text: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The first address of a network, its last, and one in the middle."""
    network = ipaddress.ip_network(text)
    return [network[at] for at in {0, network.num_addresses // 2, network.num_addresses - 1}]


def hidden(address: ipaddress.IPv4Address) -> list[str]:
    """All the ways to write an IPv4 address as an IPv6 one that some network translates back."""
    number = int(address)
    high, low = number >> 16, number & 0xFFFF
    return [
        f"::ffff:{address}",
        f"64:ff9b::{high:x}:{low:x}",
        f"64:ff9b:1::{high:x}:{low:x}",
        f"2002:{high:x}:{low:x}::1",
        f"2001:0:102:304:0:0:{high ^ 0xFFFF:x}:{low ^ 0xFFFF:x}",  # Teredo: the client, inverted
        f"2001:0:{high:x}:{low:x}::1",  # Teredo: the server
        f"::{address}",
        f"::ffff:0:{high:x}:{low:x}",
    ]


@pytest.mark.parametrize("network", REGISTRY)
def test_no_address_of_a_special_purpose_range_is_public(network: str) -> None:
    assert [str(address) for address in edges(network) if is_public(address)] == []


@pytest.mark.parametrize("network", [text for text in REGISTRY if ":" not in text])
def test_no_ipv6_address_hides_a_special_purpose_ipv4_address(network: str) -> None:
    every = [text for address in edges(network) for text in hidden(ipaddress.IPv4Address(str(address)))]
    assert [text for text in every if is_public(ipaddress.ip_address(text))] == []


@pytest.mark.parametrize("address", SERVICES)
def test_no_service_address_of_a_cloud_is_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", [*PUBLIC, "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_the_neighbours_of_special_purpose_ranges_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_whatever_this_python_calls_private_is_not_public() -> None:
    """Its tables are another reading of the registries: what either refuses is refused."""
    first = [ipaddress.IPv4Address(number << 16) for number in range(1 << 16)]
    second = [ipaddress.IPv6Address(number << 112) for number in range(1 << 16)]
    every: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [*first, *second]
    wrong = [one for one in every if is_public(one) and not one.is_global]
    assert [str(one) for one in wrong] == []


@pytest.mark.parametrize("address", ["10.0.0.1", "fec0::1", "3fff::1", "64:ff9b:1::a00:1", "168.63.129.16"])
async def test_a_name_that_leads_there_is_refused_even_beside_a_public_address(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(_host: str, port: int, *_family: Any, **_more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in ("1.1.1.1", address)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with Egress() as egress:
        with pytest.raises(EgressRefused) as refused:
            await egress.check("https://hook.example/")
    assert refused.value.code == "address_private"


async def test_a_name_server_that_does_not_answer_holds_up_nobody_elses_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio resolves in the threads that files and digests need, too; six of them on two cores."""

    answer = threading.Event()

    def getaddrinfo(_host: str, port: int, *_family: Any, **_more: Any) -> list[Any]:
        answer.wait(120)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with Egress() as egress:
        asked = [asyncio.create_task(egress.check("https://silent.example/")) for _ in range(20)]
        try:
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(lambda: "a file") == "a file"
        finally:
            answer.set()
            await asyncio.gather(*asked)
