"""Sends HTTP requests to URLs that clients or providers name, and never connects to a private address.

Egress resolves the host once. Every address of the host must be public, or in a network that the setting `egress_allow`
names. The connection goes to one of these addresses, so an attacker gains nothing if the name resolves differently a
moment later (DNS rebinding). Egress follows redirects only if the caller allows them, and checks the URL of each
redirect like the first URL. It uses no proxy of the environment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from time import time
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2
import orjson

from leasehold.domain.errors import LeaseholdError
from leasehold.runtime.holding import check_nothing_held
from leasehold.security.addresses import Address, Network, is_public
from leasehold.settings import Settings

__all__ = [
    "Answer", "AnswerTooLarge", "Downloaded", "Egress", "EgressFailed", "EgressRefused", "Target", "is_public",
    "shown_host",
]  # fmt: skip

#: The allowed ports. Addresses that `egress_allow` names may be used at any port.
PORTS = frozenset({80, 443})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: A header's name and its value (RFC 9110, 5.1 and 5.5), in ASCII.
_HEADER_NAME, _HEADER_VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"([!-~]([ -~\t]*[!-~])?)?")
#: A host: a name, an IPv4 address, or an IPv6 address without its brackets. httpx2 also accepts other characters.
_HOST = re.compile(r"[0-9a-z._-]+|[0-9a-f:.]+", re.IGNORECASE)
_MAX_PORT = 65_535
_CONNECT_SECONDS = 5.0
_MAX_RETRY_AFTER_SECONDS = 86_400.0
_OK = 200
#: The number of bytes in `Downloaded.head`.
_HEAD_BYTES = 512
_PIECE_BYTES = 256 * 1024
#: An Egress keeps connections to at most this many hosts. Each request to a further host gets a new connection.
_MAX_HOSTS = 32

#: Threads for name resolution alone. If a name server does not answer, the resolution holds its thread for half a
#: minute. The event loop's default executor would have too few threads for this (six on a machine with two cores), and
#: all file reads and digests need them.
_resolvers = ThreadPoolExecutor(32, "egress-resolver")


class EgressRefused(LeaseholdError):
    """The request must not be sent, or must not be redirected further. `code`: url_malformed, host_unknown,
    address_private, port_refused, too_many_redirects or header_malformed.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EgressFailed(LeaseholdError):
    """The request got no whole answer: the connection was refused or cut, the time limit passed, or the answer is too
    large. `sent`: False if certainly no server got the request. After a redirect `sent` is True, because the server
    that redirected got the request.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class AnswerTooLarge(EgressFailed):
    """The answer has more bytes than the caller allows."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def retry_after(self) -> float | None:
        """The seconds that the header Retry-After names, at most a day. Returns None if there is no such header, or if
        it has another form than a number of seconds or an HTTP date (RFC 9110, 10.2.3).
        """
        text = self.headers.get("retry-after", "")
        try:
            seconds = float(text) if text.isdecimal() else parsedate_to_datetime(text).timestamp() - time()
        except (TypeError, ValueError, OverflowError):  # OverflowError is raised for a year that no clock can hold
            return None
        return min(max(seconds, 0.0), _MAX_RETRY_AFTER_SECONDS)

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; {} if the body is not an object."""
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A download's answer. `size`: the file's size in bytes. `head`: the file's first 512 bytes. If the status is not
    200, no file was written. Then `size` is 0 and `head` is empty.
    """

    status: int
    headers: Mapping[str, str]
    size: int
    head: bytes


@dataclass(frozen=True, slots=True)
class Target:
    """A checked URL, with the IP address to connect to."""

    url: httpx2.URL
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | AsyncIterable[bytes]

    def redirected(self, target: Target, location: str) -> _Request:
        """The request that follows a redirect of `target` to `location`. Raises EgressRefused.

        If `location` is on another server, the request has no headers, because they may hold credentials for the first
        server. Every method but HEAD becomes GET, so no body is sent twice. (Browsers repeat the method after 307 and
        308.)
        """
        next_url = _redirect_target(target.url, location)
        is_same_server = (next_url.scheme, next_url.netloc) == (target.url.scheme, target.url.netloc)
        headers = self.headers if is_same_server else {}
        method, content = (self.method, self.content) if self.method == "HEAD" else ("GET", b"")
        return _Request(method, str(next_url), headers, content)


def _keep_urls_out_of_logs() -> None:
    """Stop httpx2 from logging the whole URL of each request, in the program's log and in the log of the attempt's job.
    The path and the query may contain a secret of a webhook, of a callback, or of a provider's file.
    """
    if (logger := logging.getLogger("httpx2")).level < logging.WARNING:
        logger.setLevel(logging.WARNING)


class Egress:
    """An HTTP client for URLs from outside. Use it with `async with`.

    `allowed`: networks to which it may connect, at any port, although they are not public. `keepalive`: it keeps at
    most this many idle connections to one host. Set `keepalive` only when one host gets many requests.
    """

    def __init__(self, allowed: tuple[Network, ...] = (), *, keepalive: int = 0) -> None:
        _keep_urls_out_of_logs()
        self._allowed = allowed
        self._keepalive = keepalive
        #: Host -> the HTTP client that keeps connections to this host; "": the client that keeps no connections. A
        #: client finds a kept connection by its IP address, but the certificate was checked for one host name. So two
        #: hosts must not use the same client, even if they have the same address.
        self._clients: dict[str, httpx2.AsyncClient] = {}

    @classmethod
    def from_settings(cls, settings: Settings, *, keepalive: int = 0) -> Self:
        return cls(
            tuple(ipaddress.ip_network(text.strip()) for text in settings.egress_allow.split(",") if text.strip()),
            keepalive=keepalive,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for client in self._clients.values():
            await client.aclose()

    def check_form(self, url: str) -> None:
        """Check what can be checked without a name server: the URL's form, an IP address in the URL, and the port.
        Raises EgressRefused.

        With `egress_allow`, only `check` checks the port of a host name, because the name may resolve to a network in
        which every port is allowed.
        """
        parsed, port = _parse_url(url)
        try:
            addresses = [ipaddress.ip_address(_host_of(parsed))]
        except ValueError:
            addresses = []  # a name
        if addresses or not self._allowed:
            self._check_addresses(addresses, port)

    async def check(self, url: str, lookups: list[Future[Any]] | None = None) -> Target:
        """Resolve `url` and check its addresses and its port. `lookups`: see `request`. Raises EgressRefused."""
        check_nothing_held("an address")  # no database connection may wait for a slow server or a slow name server
        parsed, port = _parse_url(url)
        host = _host_of(parsed)
        addresses = await _resolve(host, port, lookups)
        self._check_addresses(addresses, port)
        return Target(parsed, host, str(addresses[0]))

    def _check_addresses(self, addresses: Sequence[Address], port: int) -> None:
        # `addresses`: the addresses of the host; empty: the host is a name that has not been resolved.
        if not all(self._may_connect(address) for address in addresses):
            raise EgressRefused("address_private", "The host has an address that is not public.")
        if port not in PORTS and not (addresses and all(self._is_allowed(address) for address in addresses)):
            raise EgressRefused("port_refused", "Only ports 80 and 443 are accepted.")

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterable[bytes] = b"",
        max_bytes: int = 64 * 1024,
        timeout: float = 15.0,
        redirects: int = 0,
        reads_body: bool = True,
        lookups: list[Future[Any]] | None = None,
    ) -> Answer:
        """Send a request and read its answer, of at most `max_bytes`, all within `timeout` seconds. `redirects`: how
        many redirects to follow; 0: an answer that redirects is returned like any other. `reads_body`: False if the
        caller needs only the status and the headers. In this case a body that is too large, or does not end, is no
        error. `lookups`: a list to which this method adds the future of each name resolution. The thread of a
        resolution may outlast the request. The future is done when this thread has ended.

        Raises EgressRefused (also after one redirect too many), EgressFailed or AnswerTooLarge.
        """
        async with self._open_answer(method, url, headers or {}, content, timeout, redirects, lookups) as answer:
            if not reads_body:
                return Answer(answer.status_code, answer.headers, b"")
            body = bytearray()
            async for piece in _pieces(answer, max_bytes):
                body += piece
            return Answer(answer.status_code, answer.headers, bytes(body))

    async def download(
        self,
        url: str,
        path: Path,
        *,
        max_bytes: int,
        timeout: float = 300.0,
        redirects: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> Downloaded:
        """GET `url` into the file `path`, at most `max_bytes`, all within `timeout` seconds.

        The file is written only when the status is 200. Raises EgressRefused, EgressFailed or AnswerTooLarge.
        """
        async with self._open_answer("GET", url, headers or {}, b"", timeout, redirects) as answer:
            if answer.status_code != _OK:
                return Downloaded(answer.status_code, answer.headers, 0, b"")
            size, head = 0, b""
            file = await asyncio.to_thread(path.open, "wb")
            try:
                async for piece in _pieces(answer, max_bytes):
                    size += len(piece)
                    head = head if len(head) >= _HEAD_BYTES else (head + piece)[:_HEAD_BYTES]
                    await asyncio.to_thread(file.write, piece)
            finally:
                await asyncio.to_thread(file.close)
            return Downloaded(answer.status_code, answer.headers, size, head)

    @asynccontextmanager
    async def _open_answer(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes],
        timeout: float,
        redirects: int,
        lookups: list[Future[Any]] | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """Send the request and follow at most `redirects` redirects. The caller reads the body of the answer inside the
        block. Requests and block together must end within `timeout` seconds.
        """
        _check_headers(headers)
        has_arrived = False  # whether a server has answered, maybe with a redirect, and so got the whole request
        was_begun = False  # whether a server may have got the request
        request = _Request(method, url, headers, content)
        try:
            async with asyncio.timeout(timeout):
                for _ in range(redirects + 1):
                    target = await self.check(request.url, lookups)
                    was_begun = True
                    answer = await self._send(target, request)
                    has_arrived = True
                    try:
                        if answer.status_code not in _REDIRECTS or redirects == 0:
                            yield answer
                            return
                        request = request.redirected(target, answer.headers.get("location", ""))
                    finally:
                        await answer.aclose()
        except TimeoutError:
            raise EgressFailed(f"no answer within {timeout:g} s", sent=was_begun) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise EgressFailed(f"no answer: {type(error).__name__}", sent=has_arrived) from error
        except httpx2.HTTPError as error:
            raise EgressFailed(f"no answer: {type(error).__name__}") from error
        # The loop has ended without an answer to yield, because every answer was a redirect.
        raise EgressRefused("too_many_redirects", "The URL redirects too often.")

    async def _send(self, target: Target, request: _Request) -> httpx2.Response:
        http = await self._client(target.host)
        http_request = http.build_request(
            request.method,
            # The checked address takes the place of the host, so the name is not resolved a second time.
            target.url.copy_with(host=target.address),
            headers={"Accept-Encoding": "identity", **request.headers, "Host": target.url.netloc.decode("ascii")},
            content=request.content,
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            # The certificate must be valid for the host's name. A name with a dot at the end is the same name, which no
            # certificate and no TLS extension contains (RFC 6066, 3).
            extensions={"sni_hostname": target.host.removesuffix(".")},
        )
        return await http.send(http_request, stream=True)

    async def _client(self, host: str) -> httpx2.AsyncClient:
        """The HTTP client for the host. The client is made only at the first request, because many processes never send
        a request.
        """
        keeps_connections = self._keepalive and (host in self._clients or len(self._clients) < _MAX_HOSTS)
        key = host if keeps_connections else ""
        if key in self._clients:
            return self._clients[key]
        authorities = await asyncio.to_thread(_authorities)
        if key not in self._clients:  # another first request may have made the client meanwhile
            self._clients[key] = httpx2.AsyncClient(
                verify=authorities,
                trust_env=False,
                follow_redirects=False,
                limits=httpx2.Limits(max_keepalive_connections=self._keepalive if keeps_connections else 0),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # accepts no cookies
            )
        return self._clients[key]

    def _may_connect(self, address: Address) -> bool:
        return self._is_allowed(address) or is_public(address)

    def _is_allowed(self, address: Address) -> bool:
        return any(address in network for network in self._allowed)


def _check_headers(headers: Mapping[str, str]) -> None:
    """Raises EgressRefused for a header that httpx2 would refuse after it has connected. A header may contain a
    client's text, such as a credential.
    """
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise EgressRefused("header_malformed", "A header of the request has a character that HTTP does not allow.")


def _parse_url(url: str) -> tuple[httpx2.URL, int]:
    """The URL, and its port. Raises EgressRefused."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        raise EgressRefused("url_malformed", "This is not a URL.") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
        raise EgressRefused("url_malformed", "Only http and https URLs without a user are accepted.")
    port = parsed.port if parsed.port is not None else 443 if parsed.scheme == "https" else 80
    if not _HOST.fullmatch(_host_of(parsed)) or not 0 <= port <= _MAX_PORT:
        raise EgressRefused("url_malformed", "The host or the port of the URL is malformed.")
    return parsed, port


def shown_host(url: str) -> str | None:
    """The host of a stored URL. Answers, the audit and metrics show only the host, because the rest of the URL may
    contain a secret. Returns None if the URL has no readable host. (Earlier releases accepted such URLs.)
    """
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _host_of(url: httpx2.URL) -> str:
    """The host in ASCII, as name servers, certificates and the header Host need it."""
    return url.raw_host.decode("ascii")


def _redirect_target(url: httpx2.URL, location: str) -> httpx2.URL:
    """The URL to which a redirect leads. Raises EgressRefused."""
    try:
        return url.join(location)
    except (httpx2.InvalidURL, ValueError):
        raise EgressRefused("url_malformed", "The URL redirects to something that is not a URL.") from None


@cache
def _authorities() -> ssl.SSLContext:
    """The certificate authorities that this process trusts. They are read only once, because to read them takes a tenth
    of a second.
    """
    return httpx2.create_ssl_context(trust_env=False)


async def _pieces(answer: httpx2.Response, max_bytes: int) -> AsyncIterator[bytes]:
    """The body's bytes as they were sent. They are not decompressed, because a few kilobytes could become gigabytes.

    Raises AnswerTooLarge.
    """
    size = 0
    async for piece in answer.aiter_raw(_PIECE_BYTES):
        size += len(piece)
        if size > max_bytes:
            raise AnswerTooLarge(f"an answer of more than {max_bytes} bytes")
        yield piece


async def _resolve(host: str, port: int, lookups: list[Future[Any]] | None) -> list[Address]:
    lookup = _resolvers.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    if lookups is not None:
        lookups.append(lookup)
    try:
        entries = await asyncio.wrap_future(lookup)
    except (OSError, UnicodeError):
        raise EgressRefused("host_unknown", "The host has no address.") from None
    # A `%` begins the zone of a link-local IPv6 address (`fe80::1%eth0`), which is no part of the address.
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
