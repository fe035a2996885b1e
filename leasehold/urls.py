"""Parses and checks the URLs of PostgreSQL and RabbitMQ, and checks those of HTTP services. A process with a wrong URL
refuses to start.

A URL of PostgreSQL has the form of libpq's URLs, and `sslmode` means what it means in libpq. A URL of RabbitMQ follows
RabbitMQ's URI specification. Both kinds of URLs may name several servers. This module refuses unknown parameters. Its
errors name the variable, the parameters and the files at fault, but never quote the URL, because a URL may contain a
password. In all functions, `name` is the variable that has the URL. Errors show this name.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from leasehold.domain.errors import BadSetting
from leasehold.settings import Settings

_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
# `..._PARAMETERS`: the parameters that a URL may have. `..._FILES`: those of them that name a file.
_POSTGRES_PARAMETERS = frozenset({
    "host", "port", "dbname", "user", "password", "passfile", "options", "target_session_attrs",
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation",
    "ssl_min_protocol_version", "ssl_max_protocol_version",
})  # fmt: skip
_POSTGRES_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_AMQP_PARAMETERS = frozenset({"cafile", "cacertfile", "certfile", "keyfile", "verify", "auth"})
_AMQP_FILES = ("cafile", "cacertfile", "certfile", "keyfile")
_AMQP_PORTS = {"amqp": 5672, "amqps": 5671}
#: The settings with a URL of HTTP. The platform appends a path to each of them except `promote_token_url`.
_HTTP_SETTINGS = (
    "s3_endpoint", "s3_public_endpoint", "public_url", "cdn_base_url", "promote_url", "promote_token_url",
    "generation_jimeng_url", "generation_ark_url", "generation_replicate_url", "generation_fal_url",
)  # fmt: skip
#: In LEASEHOLD_AMQP_URL, a comma before a scheme separates two URLs. Every other comma separates two hosts of one URL.
_NEXT_URL = re.compile(r",\s*(?=[a-z]+://)")
#: Advice for error messages: how to name several hosts.
_SEVERAL_HOSTS = "name several hosts as host1:5432,host2:5432 after the @, or as host=host1,host2&port=5432,5432"


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """The address of PostgreSQL. `hosts`: (host, port) in the order in which they are tried; empty: libpq's default.
    `dsn`: the rest of the URL, for asyncpg. It names no host if `hosts` is not empty.
    """

    dsn: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...]


class BrokerTls:
    """TLS for the connections to one node of RabbitMQ. `context` is made of the files that the URL names, as they were
    when they were last read without an error. The constructor raises BadSetting if the files cannot be used.
    """

    def __init__(self, name: str, query: Mapping[str, str]) -> None:
        self._name = name
        self._query = query
        self.context = _broker_tls(name, query)

    def read_again(self) -> None:
        """Read the files again, because they may have been renewed. If they cannot be used (for example, because the
        certificate has been renewed, and its key has not), keep `context` and raise BadSetting. If the URL names no
        file of authorities, this reads the system's authorities, which takes about 40 ms.
        """
        self.context = _broker_tls(self._name, self._query)


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """The address of one node of RabbitMQ. `tls`: the TLS of a URL with the scheme `amqps`; None: the connection uses
    no TLS.
    """

    url: str = field(repr=False)
    tls: BrokerTls | None


def check_urls(settings: Settings) -> None:
    """Check the URLs and certificate files of the settings. Every process calls it at its start. Raises BadSetting."""
    database_url(settings.database_url.get_secret_value())
    if direct_url := settings.database_direct_url.get_secret_value():
        database_url(direct_url, "LEASEHOLD_DATABASE_DIRECT_URL")
    if replica_url := settings.database_replica_url.get_secret_value():
        database_url(replica_url, "LEASEHOLD_DATABASE_REPLICA_URL")
    if settings.broker == "amqp":
        broker_urls(settings.amqp_url.get_secret_value())
    for name in _HTTP_SETTINGS:
        if url := getattr(settings, name):
            _check_http_url(f"LEASEHOLD_{name.upper()}", url, may_have_query=name == "promote_token_url")
    if settings.s3_ca_file is not None:
        _load_authorities("LEASEHOLD_S3_CA_FILE", settings.s3_ca_file)


def database_url(text: str, name: str = "LEASEHOLD_DATABASE_URL") -> DatabaseUrl:
    """Parse the URL of the variable `name`. A URL without a host takes host and port from PGHOST and PGPORT, as
    libpq's clients do. Raises BadSetting.
    """
    return _database_url(text, name, os.environ.get("PGHOST", ""), os.environ.get("PGPORT", ""))


@lru_cache(maxsize=16)
def _database_url(text: str, name: str, pghost: str, pgport: str) -> DatabaseUrl:
    # The hosts come from one of three places: after the @, from host= and port=, or from PGHOST and PGPORT. The DSN at
    # the end names no hosts, because db/servers.py passes the host to each connection separately.
    parts = _split(name, text, ("postgresql", "postgres"))
    query = _query(name, parts, _POSTGRES_PARAMETERS, dict.fromkeys(("host", "port"), _SEVERAL_HOSTS))
    query = _with_checked_tls(name, query)
    login, at_sign, host_list = parts.netloc.rpartition("@")
    if host_list.startswith(":"):  # a port without a host
        query, host_list = {"port": host_list[1:]} | query, ""
    if host_list and "host" in query:
        raise BadSetting(name, f"the URL names hosts after the @ and with host=; {_SEVERAL_HOSTS}")
    hosts = _hosts(name, host_list or query.get("host", ""), query.get("port", "5432"))
    if not hosts and not host_list:
        hosts = _hosts_of_environment(pghost, query.get("port") or pgport or "5432")
    if not hosts and "port" in query:  # check the port, which asyncpg gets for the default host
        _host_and_port(name, "", query["port"])
    if hosts:
        query = {key: value for key, value in query.items() if key not in ("host", "port")}
    netloc = login.replace("@", "%40") + at_sign
    dsn = urlunsplit(("postgresql", netloc, parts.path, urlencode(query, quote_via=quote), ""))
    if not netloc:  # urlunsplit then leaves out the //, which asyncpg needs
        dsn = dsn.replace("postgresql:", "postgresql://", 1)
    return DatabaseUrl(dsn, hosts)


def _with_checked_tls(name: str, query: dict[str, str]) -> dict[str, str]:
    """Check the parameters of TLS and their files. Returns all parameters, with the path of the system's file in place
    of `sslrootcert=system`. Raises BadSetting.
    """
    mode = query.get("sslmode", "prefer")
    if mode not in _SSL_MODES:
        raise BadSetting(name, f"sslmode is one of {', '.join(_SSL_MODES)}")
    if query.get("sslrootcert") == "system":  # as in libpq 16: the system's authorities
        if query.get("sslmode", "verify-full") != "verify-full":
            raise BadSetting(name, "sslrootcert=system needs sslmode=verify-full")
        query = query | {"sslmode": "verify-full", "sslrootcert": _system_authorities(name)}
    _check_files(name, query, _POSTGRES_FILES)
    if mode != "disable" and "sslrootcert" in query:
        _load_authorities(f"{name}: sslrootcert", query["sslrootcert"])
    if mode != "disable" and "sslcert" in query:
        _load_certificate(name, query["sslcert"], query.get("sslkey"), query.get("sslpassword", ""))
    return query


@lru_cache(maxsize=16)
def broker_urls(text: str) -> tuple[BrokerUrl, ...]:
    """Parse LEASEHOLD_AMQP_URL: one URL for each node, in the order of the text. Raises BadSetting.

    Accepts URLs separated by commas, and one URL with several hosts.
    """
    return tuple(node for url in _NEXT_URL.split(text.strip()) for node in _nodes_of(url))


def _nodes_of(text: str) -> Iterator[BrokerUrl]:
    """A BrokerUrl for each host of one URL."""
    name = "LEASEHOLD_AMQP_URL"
    parts = _split(name, text, ("amqp", "amqps"))
    login, at_sign, host_list = parts.netloc.rpartition("@")
    hosts = _hosts(name, host_list, str(_AMQP_PORTS[parts.scheme]))
    if len(hosts) < 2:  # noqa: PLR2004 - the URL stays as it is; a URL without a host means localhost
        yield _broker_url(name, parts)
        return
    for host, port in hosts:
        entry = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        yield _broker_url(name, parts._replace(netloc=f"{login}{at_sign}{entry}"))


def _broker_url(name: str, parts: SplitResult) -> BrokerUrl:
    query = _query(name, parts, _AMQP_PARAMETERS, {})
    if parts.scheme == "amqp":
        if unused := sorted(query.keys() - {"auth"}):
            raise BadSetting(name, f"{', '.join(unused)} need the scheme amqps")
        return BrokerUrl(urlunsplit(parts), None)
    if query.get("verify", "verify_peer") not in ("verify_peer", "verify_none"):
        raise BadSetting(name, "verify is one of verify_peer, verify_none")
    plain_query = {key: value for key, value in query.items() if key == "auth"}
    return BrokerUrl(urlunsplit(parts._replace(query=urlencode(plain_query))), BrokerTls(name, query))


def _broker_tls(name: str, query: Mapping[str, str]) -> ssl.SSLContext:
    _check_files(name, query, _AMQP_FILES)
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


def _check_http_url(name: str, text: str, *, may_have_query: bool) -> None:
    """Raises BadSetting for a wrong URL. Without this check, a wrong URL would fail only at the first request that
    needs it, and that error would not name the setting.
    """
    parts = _split(name, text, ("http", "https"))
    try:
        has_server = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        has_server = False
    if not has_server or any(character.isspace() for character in text):
        raise BadSetting(name, "after http:// or https:// follow a host and, if need be, a colon and its port")
    if "@" in parts.netloc:
        raise BadSetting(name, "the URL must have no user name and no password")
    if "?" in text and not may_have_query:
        raise BadSetting(name, "the URL must have no ?, because a path is appended to it")


def _split(name: str, text: str, schemes: tuple[str, ...]) -> SplitResult:
    try:
        parts = urlsplit(text)
    except ValueError:
        raise BadSetting(name, "this is not a URL") from None
    if parts.scheme not in schemes:
        raise BadSetting(name, f"the URL must begin with {schemes[0]}:// or {schemes[1]}://")
    if parts.fragment:
        raise BadSetting(name, "the URL contains a #: write it as %23 in a user name or password")
    return parts


def _query(name: str, parts: SplitResult, allowed: frozenset[str], advice: Mapping[str, str]) -> dict[str, str]:
    """The parameters of the URL. Raises BadSetting for a repeated parameter, and for an unknown parameter, which may be
    a misspelt `sslmode`. `advice`: parameter -> what to write instead of repeating the parameter.
    """
    pairs = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)  # libpq does not read a + as a space
    names = [key for key, _ in pairs]
    if ("@" in parts.query and "@" not in parts.netloc) or not all(key.isidentifier() for key in names):
        raise BadSetting(name, "no parameters follow the ?: write it as %3F in a user name or password")
    if unknown := sorted(set(names) - allowed):
        raise BadSetting(name, f"no such parameter: {', '.join(unknown)}; known are {', '.join(sorted(allowed))}")
    if repeated := sorted({key for key in names if names.count(key) > 1}):
        what_to_write = next((f": {advice[key]}" for key in repeated if key in advice), "")
        raise BadSetting(name, f"the URL has {', '.join(repeated)} more than once{what_to_write}")
    return dict(pairs)


def _hosts(name: str, host_list: str, port_list: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of each host. `port_list`: one default port for all hosts, or one for each host, with commas."""
    entries, ports = host_list.split(",") if host_list else [], port_list.split(",")
    if entries and len(ports) not in (1, len(entries)):
        raise BadSetting(name, "port= has one port for all hosts, or one for each")
    hosts: list[tuple[str, int]] = []
    for index, entry in enumerate(entries):
        host, port = _host_and_port(name, entry, ports[index % len(ports)])
        if not host and len(entries) > 1:
            raise BadSetting(name, "one of the hosts between the commas is empty")
        if host:
            hosts.append((unquote(host).strip("[]"), port))
    return tuple(hosts)


def _host_and_port(name: str, entry: str, default_port: str) -> tuple[str, int]:
    """Split `host:port`, or a host that names no port."""
    host, colon, port = entry.rpartition(":")
    if not colon or entry.endswith("]") or entry.startswith("/"):  # [::1] or a socket's folder, without a port
        host, port = entry, default_port
    if not port.isdecimal() or not 0 < int(port) < 65536:  # noqa: PLR2004 - the range of ports
        raise BadSetting(name, "a port is a number from 1 to 65535, after the host and a colon")
    return host, int(port)


def _hosts_of_environment(host_list: str, port_list: str) -> tuple[tuple[str, int], ...]:
    """The hosts of PGHOST and PGPORT, in the form that `_hosts` returns. PGHOST has no ports, so a colon in it is part
    of an IPv6 address.
    """
    hosts_in_brackets = (f"[{host}]" if ":" in host else host for host in host_list.split(","))
    return _hosts("PGHOST", ",".join(hosts_in_brackets), port_list)


def _check_files(name: str, query: Mapping[str, str], keys: Iterable[str]) -> None:
    for key in keys:
        if key in query:
            _check_readable(f"{name}: {key}", query[key])


def _check_readable(name: str, path: str) -> None:
    """Raises BadSetting if the file cannot be read. Without this check, the file's later OSError would look as if the
    server did not answer.
    """
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise BadSetting(name, f"{path} cannot be read: {error.strerror}") from None


def _load_authorities(name: str, path: str) -> None:
    _check_readable(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError:
        raise BadSetting(name, f"{path} holds no certificate in PEM form") from None


def _load_certificate(
    name: str, certificate: str, key: str | None, password: str, context: ssl.SSLContext | None = None
) -> None:
    """Load the certificate and its key into `context`; None: only check them. Raises BadSetting."""
    if context is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate, key, lambda: password)
    except OSError:
        raise BadSetting(name, f"{certificate} and its key do not belong together, or are not in PEM form") from None


def _system_authorities(name: str) -> str:
    path = ssl.get_default_verify_paths().cafile
    if path is None:
        raise BadSetting(name, "this system has no file of certificate authorities: set sslrootcert to a file")
    return path
