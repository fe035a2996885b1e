"""One parser reads the URLs for everything that connects: every form of several hosts gives the same list."""

from __future__ import annotations

from itertools import pairwise
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from leasehold.broker.amqp.connection import CONNECT_SECONDS, Nodes
from leasehold.domain.errors import BadSetting
from leasehold.settings import Settings, servers_of_database
from leasehold.telemetry import redaction
from leasehold.urls import broker_urls, database_url


@pytest.fixture(autouse=True)
def no_hosts_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGHOST", raising=False)
    monkeypatch.delenv("PGPORT", raising=False)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p@h1:5001,h2:5002/db",
        "postgresql://u:p@/db?host=h1:5001,h2:5002",
        "postgresql://u:p@/db?host=h1,h2&port=5001,5002",
        "postgres://u:p@h1,h2/db?port=5001,5002",
    ],
)
def test_every_form_of_several_hosts_gives_the_same_hosts_and_login(url: str) -> None:
    parsed = database_url(url)
    assert parsed.hosts == (("h1", 5001), ("h2", 5002))
    assert parsed.dsn == "postgresql://u:p@/db"


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://u:p@h/db", (("h", 5432),)),
        ("postgresql://u:p@[::1]:5433,[fe80::2]/db", (("::1", 5433), ("fe80::2", 5432))),
        ("postgresql://u:p@%2Frun%2Fa,%2Frun%2Fb/db?port=1", (("/run/a", 1), ("/run/b", 1))),
        ("postgresql:///db?host=/run/a", (("/run/a", 5432),)),
        ("postgresql:///db", ()),
        ("postgresql://u@:5433/db?host=/run/a", (("/run/a", 5433),)),
    ],
)
def test_hosts_are_what_libpq_takes_them_for(url: str, hosts: tuple[tuple[str, int], ...]) -> None:
    assert database_url(url).hosts == hosts


@pytest.mark.parametrize(
    ("url", "hosts", "ports", "expected"),
    [
        ("postgresql://u:p@/db", "h1,h2", "", (("h1", 5432), ("h2", 5432))),
        ("postgresql:///db", "h1,h2", "6432", (("h1", 6432), ("h2", 6432))),
        ("postgresql://u@/db", "h1,::1", "1,2", (("h1", 1), ("::1", 2))),
        ("postgresql://u@/db?port=7", "h1,h2", "1,2", (("h1", 7), ("h2", 7))),
        ("postgresql://u@/db", "/run/postgresql", "", (("/run/postgresql", 5432),)),
        ("postgresql://u@here/db", "h1,h2", "1,2", (("here", 5432),)),
        ("postgresql://u@/db?host=here", "h1,h2", "1,2", (("here", 5432),)),
        ("postgresql://u@:7/db", "h1,h2", "1,2", (("h1", 7), ("h2", 7))),
        ("postgresql://u@/db", "", "6432", ()),
    ],
)
def test_a_url_without_a_host_has_the_hosts_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, url: str, hosts: str, ports: str, expected: tuple[tuple[str, int], ...]
) -> None:
    monkeypatch.setenv("PGHOST", hosts)
    monkeypatch.setenv("PGPORT", ports)
    assert database_url(url).hosts == expected


@pytest.mark.parametrize("url", ["postgresql://u@:5433/db", "postgresql://:5433/db", "postgresql:///db?port=5433"])
def test_a_port_without_a_host_is_kept_for_the_default_host(url: str) -> None:
    parsed = database_url(url)
    assert (parsed.hosts, urlsplit(parsed.dsn).query) == ((), "port=5433")
    with pytest.raises(BadSetting, match="a port is a number"):
        database_url(url.replace("5433", "54x33") + ("" if "?" in url else "?host=here"))


def test_wrong_ports_of_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "h1,h2,h3")
    monkeypatch.setenv("PGPORT", "1,2")
    with pytest.raises(BadSetting, match="one port for all hosts, or one for each"):
        database_url("postgresql://u@/db")


@pytest.mark.parametrize(
    "url",
    [
        "amqp://u:p@h1:5001/v,amqp://u:p@h2:5002/v",
        "amqp://u:p@h1:5001/v, amqp://u:p@h2:5002/v",
        "amqp://u:p@h1:5001,h2:5002/v",
    ],
)
def test_several_nodes_of_rabbitmq_are_several_urls(url: str) -> None:
    assert [node.url for node in broker_urls(url)] == ["amqp://u:p@h1:5001/v", "amqp://u:p@h2:5002/v"]


def test_a_comma_in_a_password_separates_nothing() -> None:
    assert [node.url for node in broker_urls("amqp://u:p,q@h:1/v")] == ["amqp://u:p,q@h:1/v"]
    assert broker_urls("amqp://u:p,q@h1,[::1]/v")[1].url == "amqp://u:p,q@[::1]:5672/v"


def test_the_passwords_of_all_urls_are_secret() -> None:
    redaction.learn(Settings(_env_file=None, amqp_url=SecretStr("amqp://u:first-word@h1/v,amqp://u:second-word@h2/v")))
    try:
        assert redaction.redact("first-word second-word") == f"{redaction.REDACTED} {redaction.REDACTED}"
    finally:
        redaction.learn(Settings(_env_file=None))


def _nodes(*hosts: str) -> Nodes:
    return Nodes(Settings(_env_file=None, amqp_url=SecretStr(",".join(f"amqp://{host}/" for host in hosts))))


def test_a_round_tries_every_node_at_once_and_a_later_round_gives_each_more_time() -> None:
    nodes = _nodes("a", "b", "c")
    tried, is_untried, seconds = [], [], []
    for _ in range(15):
        tried.append(nodes.current.url)
        seconds.append(nodes.connect_seconds)
        nodes.advance()
        is_untried.append(nodes.is_current_untried)
    assert {*tried[:3]} == {"amqp://a/", "amqp://b/", "amqp://c/"}
    assert tried[:3] * 5 == tried
    assert is_untried == [True, True, False] * 5
    assert seconds == [limit for limit in (1.0, 2.0, 4.0, 8.0, CONNECT_SECONDS) for _ in range(3)]


def test_a_node_that_accepts_and_closes_is_left_after_a_pause() -> None:
    nodes = _nodes("a", "b")
    tried = []
    for _ in range(4):
        nodes.record_accepted()
        tried.append(nodes.current.url)
        nodes.advance()
        assert not nodes.is_current_untried
        assert nodes.connect_seconds == 1.0
    assert all(one != other for one, other in pairwise(tried))


def test_a_single_node_has_all_the_time() -> None:
    nodes = _nodes("a")
    assert nodes.connect_seconds == CONNECT_SECONDS
    nodes.advance()
    assert not nodes.is_current_untried


def test_a_plus_in_a_parameter_of_postgresql_is_a_plus_as_for_libpq() -> None:
    assert database_url("postgresql://h/db?user=u&password=a+b").dsn == "postgresql:///db?user=u&password=a%2Bb"
    assert database_url("postgresql://h/db?user=u&password=a%2Bb").dsn == "postgresql:///db?user=u&password=a%2Bb"


def test_all_settings_that_name_a_server_of_the_database_are_set_together() -> None:
    assert set(servers_of_database("")) == {
        name for name in Settings.model_fields if name.startswith("database_") and name.endswith("_url")
    }
    assert [name for name, url in servers_of_database("postgresql://h/d").items() if url] == ["database_url"]
