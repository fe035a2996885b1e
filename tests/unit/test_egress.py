"""No address that a client names leads into our own network."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from leasehold.security import egress as egress_module
from leasehold.security.egress import Answer, AnswerTooLarge, Egress, EgressFailed, EgressRefused, is_public
from leasehold.settings import Settings
from tests.support.certificates import Authority
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
        ("http://127.0.0.1./", "host_unknown"),  # a name of four labels, which nobody has
        ("http://./", "host_unknown"),
        ("http://.example/", "host_unknown"),
        ("http://example../", "host_unknown"),
        ("http://[::ffff:127.0.0.1]/", "address_private"),
        ("http://1.1.1.1:22/", "port_refused"),
        ("ftp://1.1.1.1/", "url_malformed"),
        ("file:///etc/passwd", "url_malformed"),
        ("ttp://1.1.1.1/", "url_malformed"),
        ("//1.1.1.1/", "url_malformed"),
        ("http://x:ab/", "url_malformed"),
        ("http://[::1/", "url_malformed"),
        ("http://a[b/", "url_malformed"),
        ("http://a]b/", "url_malformed"),
        ("http://a%62c/", "url_malformed"),
        ("http://[2606:4700::1111%25eth0]/", "url_malformed"),
        ("http://1.1.1.1:65536/", "url_malformed"),
        ("http://1.1.1.1:-1/", "url_malformed"),
        (f"http://1.1.1.1:{10**30}/", "url_malformed"),
        ("http://1.1.1.1:65535/", "port_refused"),
        ("http://1.1.1.1:0/", "port_refused"),
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
    assert str(refused.value).endswith(".")  # a sentence, which people read


@pytest.mark.parametrize(
    ("url", "allowed", "code"),
    [
        ("http://1.1.1.1/", False, None),
        ("http://1.1.1.1:80/", False, None),
        ("https://1.1.1.1/", False, None),
        ("https://hook.example:80/", False, None),
        ("http://hook.example:443/", False, None),
        *[(f"https://hook.example:{port}/", False, "port_refused") for port in (0, 22, 79, 81, 442, 444, 8443)],
        ("https://1.1.1.1:81/", False, "port_refused"),
        ("https://10.0.0.1/", False, "address_private"),
        ("https://127.0.0.1:8443/", True, None),
        ("https://hook.example:8443/", True, None),  # the name may lead to a network in which every port is allowed
        ("https://1.1.1.1:8443/", True, "port_refused"),
        ("https://10.0.0.1/", True, "address_private"),
        ("https://10.0.0.1:8443/", True, "address_private"),
    ],
)
def test_an_address_is_refused_when_it_is_named_as_far_as_no_name_server_is_needed(
    url: str, allowed: bool, code: str | None
) -> None:
    egress = Egress(LOOPBACK if allowed else ())
    if code is None:
        egress.check_form(url)
    else:
        with pytest.raises(EgressRefused) as refused:
            egress.check_form(url)
        assert refused.value.code == code


@pytest.mark.parametrize(
    ("url", "addresses", "refused"),
    [
        ("http://hook.example/", ["1.1.1.1"], False),
        ("https://hook.example/", ["1.1.1.1", "127.0.0.1"], False),
        ("https://hook.example:8443/", ["127.0.0.1", "127.0.0.2"], False),
        ("https://hook.example:8443/", ["1.1.1.1"], True),
        ("https://hook.example:8443/", ["127.0.0.1", "1.1.1.1"], True),
    ],
)
async def test_only_a_name_that_leads_to_allowed_networks_alone_may_have_any_port(
    monkeypatch: pytest.MonkeyPatch, url: str, addresses: list[str], refused: bool
) -> None:
    resolving(monkeypatch, addresses)
    async with Egress(LOOPBACK) as egress:
        if refused:
            with pytest.raises(EgressRefused) as error:
                await egress.check(url)
            assert error.value.code == "port_refused"
        else:
            assert (await egress.check(url)).address == addresses[0]


async def test_an_address_with_a_zone_is_judged_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ["fe80::1%eth0"])
    async with Egress() as egress:
        with pytest.raises(EgressRefused) as refused:
            await egress.check("https://hook.example/")
    assert refused.value.code == "address_private"


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
async def answering(
    handle: Callable[[str], bytes], tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[str]]]:
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.append(said)
        writer.write(handle(said))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
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


async def test_no_log_has_a_url_whose_path_is_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    """httpx2 logs each request. A worker's log, and that of the job, have all lines from INFO on."""
    logging.getLogger("httpx2").setLevel(logging.NOTSET)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    with caplog.at_level(logging.DEBUG):
        async with answering(lambda _said: answer) as (port, heard), Egress(LOOPBACK) as egress:
            await egress.request("POST", f"http://127.0.0.1:{port}/services/sesame?token=sesame")
    assert "POST /services/sesame?token=sesame" in heard[0]
    assert "sesame" not in caplog.text


async def test_an_answer_without_end_is_cut_off() -> None:
    endless = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000
    async with answering(lambda _said: endless) as (port, _heard), Egress(LOOPBACK) as egress:
        with pytest.raises(EgressFailed):
            await egress.request("GET", f"http://127.0.0.1:{port}/", max_bytes=1000)


@pytest.mark.parametrize("sent", [b"x" * 100_000, b"x"], ids=["large", "without end"])
async def test_who_needs_no_body_has_the_answer_when_its_head_has_arrived(sent: bytes) -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 410 Gone\r\nretry-after: 7\r\ncontent-length: 100000\r\n\r\n" + sent)
        await reader.read()  # until the caller leaves
        writer.close()
        gone.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, Egress(LOOPBACK, keepalive=1) as egress:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        answer = await egress.request("POST", url, reads_body=False, max_bytes=10, timeout=60)
        assert (answer.status, answer.retry_after(), answer.body) == (410, 7.0, b"")
        await gone.wait()


async def test_a_download_lies_in_its_file_and_is_not_larger_than_allowed(tmp_path: Path) -> None:
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 700000\r\n\r\n" + b"x" * 700_000
    async with answering(lambda _said: said) as (port, _heard), Egress(LOOPBACK) as egress:
        got = await egress.download(f"http://127.0.0.1:{port}/a", tmp_path / "a", max_bytes=700_000)
        assert (got.status, got.size, got.head) == (200, 700_000, b"x" * 512)
        assert (tmp_path / "a").stat().st_size == 700_000
        with pytest.raises(AnswerTooLarge):
            await egress.download(f"http://127.0.0.1:{port}/b", tmp_path / "b", max_bytes=699_999)


async def test_a_download_shows_who_asks(tmp_path: Path) -> None:
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with answering(lambda _said: said) as (port, heard), Egress(LOOPBACK) as egress:
        headers = {"authorization": "Bearer secret"}
        await egress.download(f"http://127.0.0.1:{port}/", tmp_path / "a", max_bytes=2, headers=headers)
    assert "authorization: Bearer secret\r\n" in heard[0]


async def test_a_download_that_is_no_200_writes_nothing(tmp_path: Path) -> None:
    gone = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno"
    async with answering(lambda _said: gone) as (port, _heard), Egress(LOOPBACK) as egress:
        got = await egress.download(f"http://127.0.0.1:{port}/", tmp_path / "a", max_bytes=10)
    assert (got.status, got.size, got.head) == (403, 0, b"")
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


@pytest.mark.parametrize(("host", "is_of_certificate"), [
    ("hook.example", True), ("hook.example.", True), ("other.example", False), ("other.example.", False),
])  # fmt: skip
async def test_a_certificate_is_checked_for_the_name_without_the_dot_at_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, is_of_certificate: bool
) -> None:
    """`hook.example.` is the full name of `hook.example`. No certificate has it, and TLS never sends it."""
    authority = Authority("ours")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.pair("hook", names=("hook.example",)).write(tmp_path, "hook"))
    names: list[str | None] = []
    tls.sni_callback = lambda _socket, name, _context: names.append(name)
    trusting = ssl.create_default_context(cadata=authority.certificate)
    monkeypatch.setattr(egress_module, "_authorities", lambda: trusting)
    asked = resolving(monkeypatch, ["127.0.0.1"])
    async with (
        answering(lambda _said: b"HTTP/1.1 204 No Content\r\n\r\n", tls) as (port, heard),
        Egress(LOOPBACK) as egress,
    ):
        if is_of_certificate:
            assert (await egress.request("GET", f"https://{host}:{port}/")).status == 204
            assert f"host: {host}:{port}\r\n" in heard[0].lower()
        else:
            with pytest.raises(EgressFailed):
                await egress.request("GET", f"https://{host}:{port}/")
            assert heard == []
    assert (asked, names) == ([host], [host.removesuffix(".")])


async def test_an_authority_that_the_environment_names_vouches_for_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority("of the environment")
    (named := tmp_path / "authorities.pem").write_text(authority.certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(named))
    monkeypatch.setattr(egress_module, "_authorities", egress_module._authorities.__wrapped__)  # as in a new process
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.pair("hook", names=("hook.example",)).write(tmp_path, "hook"))
    resolving(monkeypatch, ["127.0.0.1"])
    async with (
        answering(lambda _said: b"HTTP/1.1 204 No Content\r\n\r\n", tls) as (port, heard),
        Egress(LOOPBACK) as egress,
    ):
        with pytest.raises(EgressFailed):
            await egress.request("GET", f"https://hook.example:{port}/")
    assert heard == []


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

    async def resolve(*_arguments: object) -> list[Any]:
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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_each_kind_of_redirect_is_followed_by_a_get_without_the_body_and_by_a_head_as_head(status: int) -> None:
    def handle(said: str) -> bytes:
        if " /a " in said:
            return f"HTTP/1.1 {status} Moved\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n".encode()
        return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    async with answering(handle) as (port, heard), Egress(LOOPBACK) as egress:
        for method in ("POST", "HEAD"):
            answer = await egress.request(
                method, f"http://127.0.0.1:{port}/a", headers={"x-key": "1"}, content=b"order", redirects=1
            )
            assert answer.status == 200
    assert [said.partition(" HTTP")[0] for said in heard] == ["POST /a", "GET /b", "HEAD /a", "HEAD /b"]
    assert all("x-key: 1" in said for said in heard)  # the same server may know who asks
    assert "content-length: 5" not in heard[1].lower()


@pytest.mark.parametrize("status", [300, 304])
async def test_an_answer_that_leads_nowhere_is_returned_as_it_is(status: int) -> None:
    said = f"HTTP/1.1 {status} No\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n".encode()
    async with answering(lambda _said: said) as (port, heard), Egress(LOOPBACK) as egress:
        assert (await egress.request("GET", f"http://127.0.0.1:{port}/", redirects=1)).status == status
    assert len(heard) == 1


async def test_a_redirect_more_than_the_caller_allows_is_refused(tmp_path: Path) -> None:
    moved = b"HTTP/1.1 302 Found\r\nlocation: /on\r\ncontent-length: 0\r\n\r\n"
    async with answering(lambda _said: moved) as (port, heard), Egress(LOOPBACK) as egress:
        for redirects in (1, 2):
            heard.clear()
            with pytest.raises(EgressRefused) as refused:
                await egress.request("GET", f"http://127.0.0.1:{port}/", redirects=redirects)
            assert refused.value.code == "too_many_redirects"
            assert len(heard) == redirects + 1
        assert (await egress.download(f"http://127.0.0.1:{port}/", tmp_path / "a", max_bytes=10)).status == 302


async def test_an_answer_may_have_64_kib_when_the_caller_names_no_other_limit() -> None:
    def handle(said: str) -> bytes:
        size = int(said.partition("/")[2].partition(" ")[0])
        return f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode() + b"x" * size

    async with answering(handle) as (port, _heard), Egress(LOOPBACK) as egress:
        assert len((await egress.request("GET", f"http://127.0.0.1:{port}/65536")).body) == 65536
        with pytest.raises(AnswerTooLarge):
            await egress.request("GET", f"http://127.0.0.1:{port}/65537")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("0", 0), ("7", 7), ("86400", 86_400), ("86401", 86_400), ("9" * 400, 86_400), ("-1", None), ("1.5", None),
     ("soon", None), ("", None), (None, None)],
)  # fmt: skip
def test_a_server_may_ask_for_a_pause_of_up_to_a_day(header: str | None, seconds: float | None) -> None:
    assert Answer(429, {} if header is None else {"retry-after": header}, b"").retry_after() == seconds


def test_a_server_may_name_the_time_until_which_it_wants_to_rest() -> None:
    def pause(seconds: float) -> float | None:
        return Answer(429, {"retry-after": formatdate(time.time() + seconds, usegmt=True)}, b"").retry_after()

    later = pause(3600)
    assert later is not None
    assert 3000 < later <= 3600
    assert pause(-3600) == 0
    assert pause(10 * 86_400) == 86_400


@pytest.mark.parametrize(
    ("body", "read"),
    [(b'{"a": 1}', {"a": 1}), (b"[1]", {}), (b"null", {}), (b'"a"', {}), (b"{", {}), (b"", {}), (b"\xff", {})],
)
def test_an_answer_that_is_no_object_is_read_as_an_empty_one(body: bytes, read: dict[str, Any]) -> None:
    assert Answer(200, {}, body).json_object() == read


@asynccontextmanager
async def counting_connections() -> AsyncIterator[tuple[int, list[list[str]], asyncio.Event]]:
    """A server that keeps connections: its port, the hosts that each connection was asked for, and whether a client
    has closed one. To /open it sends only the beginning of an answer.
    """
    connections: list[list[str]] = []
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hosts: list[str] = []
        connections.append(hosts)
        try:
            while said := (await reader.readuntil(b"\r\n\r\n")).decode():
                hosts.append(said.lower().partition("host: ")[2].partition(":")[0])
                size, body = (9, "a") if " /open " in said else (0, "")
                writer.write(f"HTTP/1.1 404 No\r\ncontent-length: {size}\r\n\r\n{body}".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            closed.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], connections, closed
    finally:
        server.close()


async def test_without_keepalive_each_request_has_a_connection_of_its_own() -> None:
    settings = Settings(_env_file=None, egress_allow=" 10.0.0.0/8, 127.0.0.0/8,")
    async with counting_connections() as (port, connections, _closed):
        for egress in (Egress(LOOPBACK), Egress.from_settings(settings)):
            async with egress:
                for _ in range(2):
                    await egress.request("GET", f"http://127.0.0.1:{port}/")
    assert connections == [["127.0.0.1"]] * 4


async def test_connections_to_a_limited_number_of_hosts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants name the hosts: kept without a limit, the connections would use up the process's file descriptors."""
    monkeypatch.setattr(egress_module, "_MAX_HOSTS", 1)
    resolving(monkeypatch, *[["127.0.0.1"]] * 6)
    async with counting_connections() as (port, connections, _closed), Egress(LOOPBACK, keepalive=10) as egress:
        for host in ("a.example", "b.example", "c.example") * 2:
            await egress.request("GET", f"http://{host}:{port}/")
    assert sorted(connections) == [["a.example"] * 2, ["b.example"], ["b.example"], ["c.example"], ["c.example"]]


async def test_at_the_end_no_connection_stays_open() -> None:
    async with counting_connections() as (port, _connections, closed):
        async with Egress(LOOPBACK, keepalive=10) as egress:
            await egress.request("GET", f"http://127.0.0.1:{port}/")
            assert not closed.is_set()
        async with asyncio.timeout(5):
            await closed.wait()


@pytest.mark.parametrize("keepalive", [0, 10])
async def test_an_answer_that_nobody_reads_to_its_end_holds_no_connection(tmp_path: Path, keepalive: int) -> None:
    async with (
        counting_connections() as (port, _connections, closed),
        Egress(LOOPBACK, keepalive=keepalive) as egress,
        asyncio.timeout(5),
    ):
        await egress.download(f"http://127.0.0.1:{port}/open", tmp_path / "a", max_bytes=10)
        await closed.wait()


async def test_a_proxy_that_the_environment_names_sees_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would connect to whatever address it finds for the name."""
    async with (
        answering(lambda _said: b"HTTP/1.1 204 No Content\r\n\r\n") as (port, heard),
        answering(lambda _said: b"HTTP/1.1 502 Bad Gateway\r\n\r\n") as (proxy, seen),
    ):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        async with Egress(LOOPBACK) as egress:
            assert (await egress.request("GET", f"http://127.0.0.1:{port}/")).status == 204
    assert (len(heard), seen) == (1, [])
