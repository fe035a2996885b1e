"""The address that the audit names for a request, where the peer or its proxy is of an unusual kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from leasehold.api.auth.source_address import source_address


def request(peer: str | None, forwarded: str, proxies: str) -> Request:
    services: Any = SimpleNamespace(settings=SimpleNamespace(trusted_proxies=proxies))
    return Request({
        "type": "http",
        "headers": [(b"x-forwarded-for", forwarded.encode())] if forwarded else [],
        "client": None if peer is None else (peer, 1),
        "app": SimpleNamespace(state=SimpleNamespace(services=services)),
    })  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "forwarded", "proxies", "source"),
    [
        (None, "203.0.113.9", "10.0.0.0/8", None),
        ("a socket", "203.0.113.9", "10.0.0.0/8", "a socket"),  # no address is in no network
        ("::ffff:10.0.0.1", "203.0.113.9", "10.0.0.0/8", "203.0.113.9"),  # a listener of IPv6 sees IPv4 so
        ("::ffff:11.0.0.1", "203.0.113.9", "10.0.0.0/8", "::ffff:11.0.0.1"),
        ("2001:db8::1", "203.0.113.9", "2001:db8::/32", "203.0.113.9"),
        ("2001:db9::1", "203.0.113.9", "2001:db8::/32", "2001:db9::1"),
        ("10.0.0.1", "203.0.113.9, 10.0.0.2", "10.0.0.0/8", "203.0.113.9"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.0/8", "10.0.0.3"),  # all are proxies: the farthest
    ],
)
def test_only_a_trusted_proxy_names_another_source(
    peer: str | None, forwarded: str, proxies: str, source: str | None
) -> None:
    assert source_address(request(peer, forwarded, proxies)) == source
