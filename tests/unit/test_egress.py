"""No address that a client names leads into our own network."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from leasehold.security.egress import AnswerTooLarge, Egress, EgressFailed, EgressRefused, is_public
from tests.support.not_here import not_here

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1"],
)  # fmt: skip
def test_what_is_not_the_internets_is_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_what_is_the_internets_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://127.0.0.1/", "address_private"),
        ("http://localhost/", "address_private"),
        ("http://2130706433/", "address_private"),  # 127.0.0.1 as one number
        ("http://[::ffff:127.0.0.1]/", "address_private"),
        ("http://1.1.1.1:22/", "port_refused"),
        ("ftp://1.1.1.1/", "url_malformed"),
        ("file:///etc/passwd", "url_malformed"),
        ("http://user:secret@1.1.1.1/", "url_malformed"),
        ("http://", "url_malformed"),
        ("http://no-such-host.invalid/", "host_unknown"),
    ],
)
async def test_an_address_that_must_not_be_asked_is_refused(url: str, code: str) -> None:
    async with Egress() as egress:
        with pytest.raises(EgressRefused) as refused:
            await egress.check(url)
    assert refused.value.code == code


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """The resolver answers these in turn; returns the names it was asked."""
    asked: list[str] = []
    left = list(answers)

    def getaddrinfo(host: str, port: int, *_family: Any, **_more: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in left.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_with_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ["1.1.1.1", "10.0.0.1"])
    async with Egress() as egress:
        with pytest.raises(EgressRefused):
            await egress.check("http://example.com/")


@asynccontextmanager
async def answering(handle: Callable[[str], bytes]) -> AsyncIterator[tuple[int, list[str]]]:
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.append(said)
        writer.write(handle(said))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look at the name would lead elsewhere (DNS rebinding); there is none."""
    async with answering(lambda _said: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok") as (port, heard):
        asked = resolving(monkeypatch, ["127.0.0.1"])
        async with Egress(LOOPBACK) as egress:
            answer = await egress.request("POST", f"http://hook.example:{port}/x", content=b"{}")
    assert (answer.status, answer.body, asked) == (200, b"ok", ["hook.example"])
    assert f"host: hook.example:{port}" in heard[0].lower()


async def test_a_redirect_is_not_followed_unless_asked_and_then_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = b"HTTP/1.1 302 Found\r\nlocation: http://inside.example/\r\ncontent-length: 0\r\n\r\n"
    async with answering(lambda _said: moved) as (port, _heard), Egress(LOOPBACK) as egress:
        resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.1"], ["10.0.0.1"])
        assert (await egress.request("GET", f"http://hook.example:{port}/")).status == 302
        with pytest.raises(EgressRefused) as refused:
            await egress.request("GET", f"http://hook.example:{port}/", redirects=2)
    assert refused.value.code == "address_private"


async def test_an_answer_without_end_is_cut_off() -> None:
    endless = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000
    async with answering(lambda _said: endless) as (port, _heard), Egress(LOOPBACK) as egress:
        with pytest.raises(EgressFailed):
            await egress.request("GET", f"http://127.0.0.1:{port}/", max_bytes=1000)


async def test_a_download_lies_in_its_file_and_is_not_larger_than_allowed(tmp_path: Path) -> None:
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 700000\r\n\r\n" + b"x" * 700_000
    async with answering(lambda _said: said) as (port, _heard), Egress(LOOPBACK) as egress:
        got = await egress.download(f"http://127.0.0.1:{port}/a", tmp_path / "a", max_bytes=700_000)
        assert (got.status, got.size, got.head) == (200, 700_000, b"x" * 512)
        assert (tmp_path / "a").stat().st_size == 700_000
        with pytest.raises(AnswerTooLarge):
            await egress.download(f"http://127.0.0.1:{port}/b", tmp_path / "b", max_bytes=699_999)


async def test_a_download_that_is_no_200_writes_nothing(tmp_path: Path) -> None:
    gone = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno"
    async with answering(lambda _said: gone) as (port, _heard), Egress(LOOPBACK) as egress:
        assert (await egress.download(f"http://127.0.0.1:{port}/", tmp_path / "a", max_bytes=10)).status == 403
    assert not (tmp_path / "a").exists()


async def test_what_proves_who_asks_does_not_follow_a_redirect_to_another_address() -> None:
    async with answering(lambda _said: b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as (other, heard):
        moved = f"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:{other}/\r\ncontent-length: 0\r\n\r\n".encode()
        async with answering(lambda _said: moved) as (port, first), Egress(LOOPBACK) as egress:
            url = f"http://127.0.0.1:{port}/"
            await egress.request("GET", url, headers={"Authorization": "Bearer secret"}, redirects=1)
    assert "Bearer secret" in first[0]
    assert "Bearer secret" not in heard[0]


async def test_it_is_known_whether_a_request_can_have_arrived() -> None:
    async with answering(lambda _said: b"") as (port, heard), Egress(LOOPBACK) as egress:
        with pytest.raises(EgressFailed) as cut:
            await egress.request("POST", f"http://127.0.0.1:{port}/", content=b"{}")
    assert heard
    assert cut.value.sent
    with socket.socket() as nobody:  # else another program may listen there
        nobody.bind(("127.0.0.1", 0))
        async with Egress(LOOPBACK) as egress:
            with pytest.raises(EgressFailed) as refused:
                await egress.request("POST", f"http://127.0.0.1:{nobody.getsockname()[1]}/", content=b"{}")
    assert not refused.value.sent


async def test_a_request_that_a_redirect_answered_has_arrived_whatever_becomes_of_the_redirect() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{nobody.getsockname()[1]}/"
        moved = f"HTTP/1.1 302 Found\r\nlocation: {place}\r\ncontent-length: 0\r\n\r\n".encode()
        async with answering(lambda _said: moved) as (port, heard), Egress(LOOPBACK) as egress:
            with pytest.raises(EgressFailed) as failed:
                await egress.request("POST", f"http://127.0.0.1:{port}/", content=b"{}", redirects=1)
    assert heard
    assert failed.value.sent


async def test_port_0_is_no_default_port() -> None:
    async with Egress() as egress:
        with pytest.raises(EgressRefused) as refused:
            await egress.check("http://93.184.215.14:0/")
    assert refused.value.code == "port_refused"


async def test_an_answer_is_not_decompressed() -> None:
    """64 MB of zeros are 64 KB on the way: a receiver could fill the memory of every process that calls it."""
    bomb = gzip.compress(bytes(64 * 1024 * 1024))
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(bomb)}\r\n\r\n".encode()
    async with answering(lambda _said: head + bomb) as (port, heard), Egress(LOOPBACK) as egress:
        answer = await egress.request("GET", f"http://127.0.0.1:{port}/", max_bytes=len(bomb))
    assert answer.body == bomb
    assert "accept-encoding: identity\r\n" in heard[0].lower()


async def test_no_host_learns_the_cookies_of_another_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = b"HTTP/1.1 200 OK\r\nset-cookie: session=of-tenant-a; path=/\r\ncontent-length: 0\r\n\r\n"
    async with answering(lambda _said: sets) as (port, heard), Egress(LOOPBACK) as egress:
        resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.1"], ["127.0.0.1"])
        for host in ("a.example", "b.example", "a.example"):
            await egress.request("POST", f"http://{host}:{port}/")
    assert len(heard) == 3
    assert not [said for said in heard if "cookie" in said.lower()]


@pytest.mark.parametrize("written", ["m\u00fcnchen.example", "xn--mnchen-3ya.example"])
async def test_a_name_in_any_script_is_resolved_and_sent_in_ascii(
    monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    async with answering(lambda _said: b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as (port, heard):
        names = resolving(monkeypatch, ["127.0.0.1"])
        async with Egress(LOOPBACK) as egress:
            assert (await egress.request("GET", f"http://{written}:{port}/")).status == 200
    assert names == ["xn--mnchen-3ya.example"]
    assert f"host: xn--mnchen-3ya.example:{port}\r\n" in heard[0].lower()


async def test_an_address_of_ipv6_is_sent_in_brackets() -> None:
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        not_here("IPv6 on the loopback interface")
    port = server.sockets[0].getsockname()[1]
    async with server, Egress((ipaddress.ip_network("::1/128"),)) as egress:
        await egress.request("GET", f"http://[::1]:{port}/")
    assert f"host: [::1]:{port}\r\n" in heard[0]


@pytest.mark.parametrize("location", ["http://x:ab/", "http://[::1/"])
async def test_a_redirect_to_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, location: str) -> None:
    moved = f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()
    async with answering(lambda _said: moved) as (port, _heard), Egress(LOOPBACK) as egress:
        resolving(monkeypatch, ["127.0.0.1"])
        with pytest.raises(EgressRefused) as refused:
            await egress.request("GET", f"http://hook.example:{port}/", redirects=2)
    assert refused.value.code == "url_malformed"


async def test_a_kept_connection_is_used_for_one_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate was checked for one name, and another host may lie at the same address."""
    connections: list[list[str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hosts: list[str] = []
        connections.append(hosts)
        while said := await reader.readuntil(b"\r\n\r\n"):
            hosts.append(said.decode().lower().partition("host: ")[2].partition(":")[0])
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    resolving(monkeypatch, *[["127.0.0.1"]] * 4)
    async with Egress(LOOPBACK, keepalive=10) as egress:
        for host in ("a.example", "b.example", "a.example", "b.example"):
            await egress.request("GET", f"http://{host}:{port}/")
    server.close()
    assert sorted(connections) == [["a.example"] * 2, ["b.example"] * 2]


@pytest.mark.parametrize(("silent", "sent"), [("name server", False), ("server", True)])
async def test_after_the_time_limit_only_a_request_with_an_address_may_have_been_sent(
    monkeypatch: pytest.MonkeyPatch, silent: str, sent: bool
) -> None:
    async def forever(*_arguments: object) -> Any:
        await asyncio.Event().wait()

    async def resolve(_host: str, _port: int) -> list[Any]:
        return [ipaddress.ip_address("1.1.1.1")]

    monkeypatch.setattr("leasehold.security.egress._resolve", forever if silent == "name server" else resolve)
    monkeypatch.setattr(Egress, "_send", forever)
    async with Egress() as egress:
        with pytest.raises(EgressFailed) as failed:
            await egress.request("POST", "https://example.com/", content=b"order", timeout=0.01)
    assert failed.value.sent is sent


@pytest.mark.parametrize(
    ("name", "value"),
    [("authorization", "Bearer clé"), ("authorization", "Bearer ключ"), ("authorization", "Bearer a\nb: c"),
     ("authorization", "Bearer a "), ("x-prompt", "a\x00b"), ("x prompt", "a lighthouse")],
)  # fmt: skip
async def test_a_header_that_http_does_not_allow_is_refused_before_anybody_is_asked(name: str, value: str) -> None:
    async with Egress() as egress:
        with pytest.raises(EgressRefused) as refused:
            await egress.request("POST", "http://no-such-host.invalid/", headers={name: value})
    assert refused.value.code == "header_malformed"
    assert value not in str(refused.value)
