"""One reading of the URLs of servers, for every connection: what is not known is refused at start, by name.

PostgreSQL's are libpq's, with its meaning of `sslmode`; RabbitMQ's are those of its URI specification. No message says
more of a URL than the names of its parameters: the rest may hold a password.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit, urlunsplit

from leasehold.domain.errors import BadSetting
from leasehold.settings import Settings

_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_POSTGRES = frozenset({
    "host", "port", "dbname", "user", "password", "passfile", "options", "target_session_attrs",
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation",
    "ssl_min_protocol_version", "ssl_max_protocol_version",
})  # fmt: skip
_POSTGRES_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_AMQP = frozenset({"cafile", "cacertfile", "certfile", "keyfile", "verify", "auth"})
_AMQP_FILES = ("cafile", "cacertfile", "certfile", "keyfile")


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """Where PostgreSQL is. `dsn`: what asyncpg is given; `hosts`: as they are asked, each with its port."""

    dsn: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """Where RabbitMQ is. `tls`: of `amqps`."""

    url: str = field(repr=False)
    tls: ssl.SSLContext | None


def check_urls(settings: Settings) -> None:
    """What a process does before anything else. Raises BadSetting."""
    database_url(settings.database_url.get_secret_value())
    if settings.broker == "amqp":
        broker_url(settings.amqp_url.get_secret_value())
    if settings.s3_ca_file is not None:
        _load_authorities("LEASEHOLD_S3_CA_FILE", settings.s3_ca_file)


def refuse_bad_urls(settings: Settings) -> None:
    """As `check_urls`, for a process: it ends with the sentence, and no traceback."""
    try:
        check_urls(settings)
    except BadSetting as error:
        sys.exit(f"leasehold: {error}")


@lru_cache(maxsize=16)
def database_url(text: str) -> DatabaseUrl:
    """Read LEASEHOLD_DATABASE_URL. Raises BadSetting."""
    name = "LEASEHOLD_DATABASE_URL"
    parts = _split(name, text, ("postgresql", "postgres"))
    query = _query(name, parts, _POSTGRES)
    mode = query.get("sslmode", "prefer")
    if mode not in _SSL_MODES:
        raise BadSetting(name, f"sslmode is one of {', '.join(_SSL_MODES)}")
    if query.get("sslrootcert") == "system":  # as libpq 16: the system's authorities, and the name must be theirs
        if query.get("sslmode", "verify-full") != "verify-full":
            raise BadSetting(name, "sslrootcert=system needs sslmode=verify-full")
        query |= {"sslmode": "verify-full", "sslrootcert": _system_authorities(name)}
    _check_files(name, query, _POSTGRES_FILES)
    if mode != "disable" and "sslrootcert" in query:
        _load_authorities(f"{name}: sslrootcert", query["sslrootcert"])
    if mode != "disable" and "sslcert" in query:
        _load_certificate(name, query["sslcert"], query.get("sslkey"), query.get("sslpassword", ""))
    hosts = _hosts(name, parts, query)
    dsn = urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(query, quote_via=quote), ""))
    return DatabaseUrl(dsn if parts.netloc else dsn.replace("postgresql:", "postgresql://", 1), hosts)


@lru_cache(maxsize=16)
def broker_url(text: str) -> BrokerUrl:
    """Read LEASEHOLD_AMQP_URL. Raises BadSetting."""
    name = "LEASEHOLD_AMQP_URL"
    parts = _split(name, text, ("amqp", "amqps"))
    query = _query(name, parts, _AMQP)
    if len(_hosts(name, parts, {})) > 1:
        raise BadSetting(name, "one host is asked; several URLs are not taken")
    if parts.scheme == "amqp":
        if unused := sorted(query.keys() - {"auth"}):
            raise BadSetting(name, f"{', '.join(unused)} need the scheme amqps")
        return BrokerUrl(text, None)
    if query.get("verify", "verify_peer") not in ("verify_peer", "verify_none"):
        raise BadSetting(name, "verify is one of verify_peer, verify_none")
    _check_files(name, query, _AMQP_FILES)
    kept = {key: value for key, value in query.items() if key == "auth"}
    return BrokerUrl(urlunsplit(parts._replace(query=urlencode(kept))), _broker_tls(name, query))


def _broker_tls(name: str, query: Mapping[str, str]) -> ssl.SSLContext:
    authorities = query.get("cacertfile", query.get("cafile"))
    if authorities is not None:
        _load_authorities(f"{name}: {'cacertfile' if 'cacertfile' in query else 'cafile'}", authorities)
    context = ssl.create_default_context(cafile=authorities)
    if query.get("verify") == "verify_none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if "certfile" in query:
        _load_certificate(name, query["certfile"], query.get("keyfile"), "", context)
    return context


def _split(name: str, text: str, schemes: tuple[str, ...]) -> SplitResult:
    try:
        parts = urlsplit(text)
    except ValueError:
        raise BadSetting(name, "this is not a URL") from None
    if parts.scheme not in schemes:
        raise BadSetting(name, f"the URL begins with {schemes[0]}:// or {schemes[1]}://")
    if parts.fragment:
        raise BadSetting(name, "the URL has a #: in a user or password write it as %23")
    return parts


def _query(name: str, parts: SplitResult, known: frozenset[str]) -> dict[str, str]:
    """The parameters. One that is not known would be a typing error in `sslmode` as likely as not."""
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    names = [key for key, _ in pairs]
    if ("@" in parts.query and "@" not in parts.netloc) or not all(key.isidentifier() for key in names):
        raise BadSetting(name, "what follows the ? are no parameters: in a user or password write it as %3F")
    if unknown := sorted(set(names) - known):
        raise BadSetting(name, f"no such parameter: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if twice := sorted({key for key in names if names.count(key) > 1}):
        raise BadSetting(name, f"{', '.join(twice)} is there twice")
    return dict(pairs)


def _hosts(name: str, parts: SplitResult, query: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Several are told apart by commas. A password with a comma or a colon in it is no host."""
    ports = query.get("port", "5432").split(",")
    listed = parts.netloc.rpartition("@")[2] or query.get("host", "")
    found: list[tuple[str, int]] = []
    for at, one in enumerate(listed.split(",") if listed else ()):
        host, colon, port = one.rpartition(":")
        if not colon or one.endswith("]") or one.startswith("/"):  # [::1] has no port; a socket's directory has none
            host, port = one, ports[at] if at < len(ports) else ports[-1]
        if not port.isdecimal() or not 0 < int(port) < 65536:  # noqa: PLR2004 - what a port is
            raise BadSetting(name, "a port is a number from 1 to 65535, after the host and a colon")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


def _check_files(name: str, query: Mapping[str, str], keys: Iterable[str]) -> None:
    for key in keys:
        if key in query:
            _readable(f"{name}: {key}", query[key])


def _readable(name: str, path: str) -> None:
    """Raises BadSetting: an error of the file system would be taken for a server that is away."""
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise BadSetting(name, f"{path} cannot be read: {error.strerror}") from None


def _load_authorities(name: str, path: str) -> None:
    _readable(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError:
        raise BadSetting(name, f"{path} holds no certificate in PEM form") from None


def _load_certificate(
    name: str, certificate: str, key: str | None, password: str, into: ssl.SSLContext | None = None
) -> None:
    context = into if into is not None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate, key, lambda: password)
    except OSError:
        raise BadSetting(name, f"{certificate} and its key do not belong together, or are not in PEM form") from None


def _system_authorities(name: str) -> str:
    found = ssl.get_default_verify_paths().cafile
    if found is None:
        raise BadSetting(name, "this system has no file of authorities: name one as sslrootcert")
    return found
