"""Every connection speaks TLS where its URL says so, checks whom it speaks to, and guesses nothing."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import asyncpg
import pytest
import structlog
from pydantic import SecretStr

from leasehold.broker import Delivery, Hint, make_broker
from leasehold.broker.amqp import connection
from leasehold.cli.doctor import examine
from leasehold.db.database import connect, make_pool, migrate
from leasehold.domain.errors import BadSetting, StoreUnavailable
from leasehold.domain.ids import new_id
from leasehold.embedded.postgres import Postgres
from leasehold.embedded.postgres_programs import find_postgres_with_tls
from leasehold.embedded.process import EmbeddedError
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.embedded.s3 import S3
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.urls import broker_urls, check_urls, database_url
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.runs.conftest import SCOPES, Client
from tests.support.backend import Backend, backend_of
from tests.support.certificates import Authority
from tests.support.not_here import not_here

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of PEM files. `stranger`: an authority that signed nothing here."""

    authority: Path
    stranger: Path
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("the tests' own")


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("tls")
    ours, stranger = directory / "authority.crt", directory / "stranger.crt"
    ours.write_text(authority.certificate)
    stranger.write_text(Authority("somebody else's").certificate)
    return Files(ours, stranger, *authority.pair("leasehold").write(directory, "client"))


@pytest.fixture(scope="module")
async def postgres_tls(run_directory: Path, authority: Authority) -> AsyncIterator[Postgres]:
    """Takes encrypted connections only, of clients with a certificate; its own is for `localhost`, and no address."""
    try:
        await find_postgres_with_tls()
    except EmbeddedError as error:
        not_here(str(error))
    tls = authority.server(clients=True, addresses=())
    server = Postgres(run_directory / "postgres-tls", durable=False, tls=tls)
    await server.start()
    yield server
    await server.stop("immediate")


@pytest.fixture(scope="module")
async def rabbitmq_tls(run_directory: Path, authority: Authority) -> AsyncIterator[RabbitMQ]:
    if backend_of("LEASEHOLD_TEST_AMQP_URL") is not Backend.PRIVATE:
        not_here("a RabbitMQ of our own, which can be started with TLS")
    tls = authority.server(clients=True)
    node = RabbitMQ(run_directory / "rabbitmq-tls", await install_rabbitmq(), tls=tls)
    await node.start()
    yield node
    await node.kill()


@pytest.fixture(scope="module")
async def s3_tls(run_directory: Path, authority: Authority) -> AsyncIterator[S3]:
    server = S3(run_directory / "s3-tls", tls=authority.server())
    await server.start()
    yield server
    await server.stop()


def database_of(server: Postgres, files: Files, *, mode: str = "verify-full", host: str = "localhost") -> str:
    said = f"sslmode={mode}&sslrootcert={files.authority}&sslcert={files.certificate}&sslkey={files.key}"
    return f"{server.url.replace('127.0.0.1', host)}?{said}"


def broker_of(node: RabbitMQ, files: Files) -> str:
    return f"{node.url}?cacertfile={files.authority}&certfile={files.certificate}&keyfile={files.key}"


@pytest.fixture
def encrypted(postgres_tls: Postgres, rabbitmq_tls: RabbitMQ, s3_tls: S3, files: Files, tmp_path: Path) -> Settings:
    return Settings(
        _env_file=None,
        database_url=SecretStr(database_of(postgres_tls, files)),
        amqp_url=SecretStr(broker_of(rabbitmq_tls, files)),
        s3_endpoint=s3_tls.endpoint,
        s3_ca_file=str(files.authority),
        s3_access_key=SecretStr(s3_tls.access_key),
        s3_secret_key=SecretStr(s3_tls.secret_key),
        pipelines="tests.runs.work:pipelines",
        work_dir=str(tmp_path),
        poll_seconds=5.0,
    )


@pytest.mark.usefixtures("patient_readiness")
async def test_the_whole_product_runs_on_servers_that_take_tls_only(encrypted: Settings) -> None:
    await migrate(encrypted.database_url.get_secret_value())
    connection = await connect(encrypted, "test")
    try:
        key = await create_key(connection, tenant_id="acme", client_id="tests", scopes=(*SCOPES, "media:read"))
        async with serving(encrypted) as running, client_of(running.url, key.text) as http, Worker(encrypted):
            client = Client(http)
            run = await client.start()
            await client.until(run, "succeeded")
            assert (await http.get(f"/media/{new_id()}")).status_code == 404
            ready = (await http.get("/readyz", params={"verbose": ""})).json()
            assert ready["status"] == "ok"
            plain = "SELECT application_name FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE NOT ssl"
            assert await connection.fetch(f"{plain} AND backend_type = 'client backend'") == []
        wrong = [finding.found for finding in await examine(encrypted) if not finding.ok]
        assert [found for found in wrong if not found.startswith("fsync off")] == []  # the tests' server is forgetful
    finally:
        await connection.close()


async def test_hints_go_over_amqps_and_over_a_database_with_tls(encrypted: Settings) -> None:
    for kind in ("amqp", "postgres"):
        broker = make_broker(encrypted.model_copy(update={"broker": kind}))
        heard = asyncio.Event()

        def hear(_delivery: Delivery, heard: asyncio.Event = heard) -> None:
            heard.set()

        await broker.open()
        await broker.consume({"media": 1}, hear, lambda _queue: None)
        async with asyncio.timeout(60):
            while not broker.connected or not all(await broker.publish([Hint(new_id(), "media", 1)])):
                await asyncio.sleep(0.05)
            if kind == "amqp":
                await heard.wait()
        await broker.close()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
async def test_both_schemes_of_postgresql_are_taken_by_every_kind_of_connection(
    scheme: str, postgres_tls: Postgres, files: Files
) -> None:
    url = scheme + database_of(postgres_tls, files).removeprefix("postgresql")
    settings = Settings(_env_file=None, database_url=SecretStr(url))
    await migrate(url)
    connection = await connect(settings, "test")
    await connection.close()
    async with make_pool(settings, "test", 1) as pool, pool.acquire() as lent:
        assert await lent.fetchval("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")


@pytest.mark.parametrize(
    ("mode", "host", "taken"),
    [
        ("disable", "localhost", False),  # the server takes no plain connection
        ("require", "127.0.0.1", True),
        ("verify-ca", "127.0.0.1", True),
        ("verify-full", "127.0.0.1", False),  # the certificate is not the address's
        ("verify-full", "localhost", True),
    ],
)
async def test_sslmode_means_what_libpq_says(
    mode: str, host: str, taken: bool, postgres_tls: Postgres, files: Files
) -> None:
    settings = Settings(_env_file=None, database_url=SecretStr(database_of(postgres_tls, files, mode=mode, host=host)))
    if taken:
        await (await connect(settings, "test")).close()
        return
    with pytest.raises((OSError, asyncpg.PostgresError)):
        await connect(settings, "test")


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
async def test_a_server_of_another_authority_is_not_spoken_to(mode: str, postgres_tls: Postgres, files: Files) -> None:
    """libpq: with a root certificate even `require` checks the authority."""
    url = database_of(postgres_tls, files, mode=mode).replace(str(files.authority), str(files.stranger))
    settings = Settings(_env_file=None, database_url=SecretStr(url))
    with pytest.raises(OSError, match=r"(?i)certificate verify failed"):
        await connect(settings, "test")
    async with make_pool(settings, "test", 1) as pool:
        with pytest.raises(OSError, match=r"(?i)certificate verify failed"):
            async with pool.acquire():
                pass


async def test_a_broker_or_a_store_of_another_authority_is_not_spoken_to(encrypted: Settings, files: Files) -> None:
    url = encrypted.amqp_url.get_secret_value().replace(str(files.authority), str(files.stranger))
    wrong = encrypted.model_copy(update={"amqp_url": SecretStr(url), "s3_ca_file": str(files.stranger)})
    broker = make_broker(wrong)
    await broker.open()
    store = ObjectStore.from_settings(wrong)
    await store.open()
    with pytest.raises(StoreUnavailable):
        await store.head("anything")
    await store.close()
    assert not broker.connected
    await broker.close()


class Listener:
    """A server that takes TLS from clients of `authority` only, and ends each connection. `clients`: the names in their
    certificates.
    """

    def __init__(self, directory: Path) -> None:
        self.clients: asyncio.Queue[str] = asyncio.Queue()
        self._directory = directory
        self._server: asyncio.Server | None = None

    async def start(self, authority: Authority, port: int = 0) -> int:
        """Listen in place of the server that was started before. Returns the port."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        pair = authority.pair("server", addresses=("127.0.0.1",))
        context.load_cert_chain(*pair.write(self._directory, "server"))
        self._server = await asyncio.start_server(self._hear, "127.0.0.1", port, ssl=context)
        return int(self._server.sockets[0].getsockname()[1])

    async def client_after_now(self) -> str:
        """The client of a connection that begins after this call."""
        for _ in range(self.clients.qsize() + 2):  # an attempt may be under way, and its files read already
            client = await self.clients.get()
        return client

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _hear(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("peercert")
        self.clients.put_nowait(dict(part[0] for part in certificate["subject"])["commonName"])
        writer.close()


async def test_renewed_files_are_those_of_the_next_connection_to_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody restarts a process for them. They come one after another: until all are there, the old ones hold."""
    monkeypatch.setattr(connection, "RECONNECT_LADDER", (timedelta(seconds=0.02),))
    old, new, listener = Authority("old"), Authority("new"), Listener(tmp_path)
    (trusted := tmp_path / "authority.crt").write_text(old.certificate)
    certificate, key = old.pair("first").write(tmp_path, "client")
    port = await listener.start(old)
    url = f"amqps://127.0.0.1:{port}/?cacertfile={trusted}&certfile={certificate}&keyfile={key}"
    serve: Any = None  # no connection lasts so long
    link = connection.Link(Settings(_env_file=None, amqp_url=SecretStr(url)), "test", serve)
    link.start()
    try:
        async with asyncio.timeout(60):
            assert await listener.client_after_now() == "first"
            renewed = new.pair("second")
            with structlog.testing.capture_logs() as lines:
                certificate.write_text(renewed.certificate)
                assert await listener.client_after_now() == "first"
                assert await listener.client_after_now() == "first"
            key.write_text(renewed.key)
            trusted.write_text(new.certificate)
            await listener.start(new, port)
            assert await listener.client_after_now() == "second"
        reasons = [line["reason"] for line in lines if line["event"].startswith("the TLS files for RabbitMQ")]
        assert reasons == [
            f"LEASEHOLD_AMQP_URL: {certificate} and its key do not belong together, or are not in PEM form."
        ]
    finally:
        await link.close()
        await listener.close()


async def test_a_store_with_another_authority_is_spoken_to_once_the_file_has_it(
    run_directory: Path, tmp_path: Path
) -> None:
    old, new = Authority("old"), Authority("new")
    (trusted := tmp_path / "authority.crt").write_text(old.certificate)
    server = S3(run_directory / "s3-renewed", tls=old.server())
    await server.start()
    settings = Settings(
        _env_file=None,
        s3_endpoint=server.endpoint,
        s3_ca_file=str(trusted),
        s3_access_key=SecretStr(server.access_key),
        s3_secret_key=SecretStr(server.secret_key),
    )
    store = ObjectStore.from_settings(settings)
    await store.open()
    try:
        for _ in range(2):
            assert await store.head("anything") is None
        await server.stop()
        server = S3(run_directory / "s3-renewed", port=server.port, tls=new.server())
        await server.start()
        with pytest.raises(StoreUnavailable):
            await store.head("anything")
        trusted.write_text("half of a file")
        with pytest.raises(StoreUnavailable):
            await store.head("anything")
        trusted.write_text(new.certificate)
        assert await store.head("anything") is None
    finally:
        await store.close()
        await server.stop()


async def test_verify_none_is_somebodys_own_decision(rabbitmq_tls: RabbitMQ, files: Files) -> None:
    url = broker_of(rabbitmq_tls, files).replace(f"cacertfile={files.authority}", "verify=verify_none")
    broker = make_broker(Settings(_env_file=None, amqp_url=SecretStr(url)))
    await broker.open()
    async with asyncio.timeout(60):
        while not broker.connected:
            await asyncio.sleep(0.05)
    await broker.close()


HTTP_SETTINGS = (
    "s3_endpoint", "s3_public_endpoint", "public_url", "cdn_base_url", "promote_url", "promote_token_url",
    "generation_jimeng_url", "generation_ark_url", "generation_replicate_url", "generation_fal_url",
)  # fmt: skip
BAD = [
    ("postgresql://u:pa55word@h/db?sslmod=require", "sslmod"),
    ("postgresql://u:pa55word@h/db?sslmode=verify", "sslmode is one of"),
    ("postgresql://u:pa55word@h/db?sslmode=require&sslmode=disable", "more than once"),
    ("postgresql://u:pa55word@h/db?sslmode=verify-full&sslrootcert=/no/such/file", "/no/such/file cannot be read"),
    ("postgresql://u:pa55word@h/db?sslmode=verify-ca&sslrootcert=/etc/hostname", "PEM"),
    ("postgresql://u:pa55word@h/db?channel_binding=require", "channel_binding"),
    ("postgresql://u:pa55word@h:port/db", "a port is a number"),
    ("postgresql://u:pa55word@/db?host=h1:1&host=h2:2", "host1:5432,host2:5432"),
    ("postgresql://u:pa55word@h1:1/db?host=h2:2", "host1:5432,host2:5432"),
    ("postgresql://u:pa55word@h1:1,h2:2,/db", "is empty"),
    ("postgresql://u:pa55word@/db?host=h1,h2,h3&port=1,2", "one for each"),
    ("postgresql://u:p?a55word=pa55word@h/db", "%3F"),
    ("postgresql://u:p#pa55word@h/db", "%23"),
    ("postgresql://u:p[pa55word@h/db", "not a URL"),
    ("postgresql+asyncpg://u:pa55word@h/db", "begin with postgresql://"),
    ("mysql://u:pa55word@h/db", "begin with postgresql://"),
]


@pytest.mark.parametrize(("url", "said"), BAD)
def test_a_database_url_that_is_not_understood_is_refused_in_a_sentence_without_its_password(
    url: str, said: str
) -> None:
    with pytest.raises(BadSetting) as refused:
        database_url(url)
    assert said in str(refused.value)
    assert "LEASEHOLD_DATABASE_URL" in str(refused.value)
    assert "pa55word" not in str(refused.value) + repr(refused.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("amqps://u:pa55word@h/?ca_certs=x", "ca_certs"),
        ("amqps://u:pa55word@h/?cacertfile=/no/such/file", "cannot be read"),
        ("amqps://u:pa55word@h/?verify=peer", "verify is one of"),
        ("amqp://u:pa55word@h/?cacertfile=/etc/hostname", "need the scheme amqps"),
        ("amqp://u:pa55word@h:1,g:x/", "a port is a number"),
        ("amqp://u:pa55word@h:1,,g:2/", "is empty"),
        ("amqp://u:pa55word@h:1/,http://u:pa55word@g:2/", "begin with amqp://"),
        ("amqp://u:pa55word@h:x/", "a port is a number"),
        ("http://u:pa55word@h/", "begin with amqp://"),
    ],
)
def test_a_broker_url_that_is_not_understood_is_refused_in_a_sentence_without_its_password(url: str, said: str) -> None:
    with pytest.raises(BadSetting) as refused:
        broker_urls(url)
    assert said in str(refused.value)
    assert "pa55word" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://leasehold@127.0.0.1:5432/leasehold",
        "postgres://u:p%23%3F%40%2C%3A@h/db?sslmode=require&target_session_attrs=read-write&options=-c%20search_path%3Dx",
        "postgresql://u:p@h1:5001,h2:5002/db",
        "postgresql://u:p@[::1]:5432/db",
        "postgresql:///db?host=/var/run/postgresql",
    ],
)
def test_what_libpq_takes_is_taken(url: str) -> None:
    assert database_url(url).dsn.startswith("postgresql://")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("pa55word.example", "begin with http://"),
        ("s3.example:9000", "begin with http://"),
        ("ftp://pa55word.example", "begin with http://"),
        ("http:///pa55word", "a host"),
        ("http://:9000/pa55word", "a host"),
        ("http://pa55word.example:port", "a host"),
        ("http://pa55word.example:0", "a host"),
        ("http://pa55word.example:65536", "a host"),
        ("http://pa55word .example", "a host"),
        ("http://[pa55word", "not a URL"),
        ("https://user:pa55word@s3.example", "no user name"),
        ("https://s3.example/#pa55word", "#"),
    ],
)
def test_a_url_of_http_that_no_request_could_use_is_refused_at_start_in_a_sentence_that_does_not_show_it(
    url: str, said: str
) -> None:
    for name in HTTP_SETTINGS:
        with pytest.raises(BadSetting) as refused:
            check_urls(Settings(_env_file=None, broker="postgres", **{name: url}))  # type: ignore[arg-type]  # of any fields
        assert f"LEASEHOLD_{name.upper()}: " in str(refused.value)
        assert said in str(refused.value)
        assert "pa55word" not in str(refused.value) + repr(refused.value)


@pytest.mark.parametrize("name", HTTP_SETTINGS)
def test_a_url_of_http_may_have_a_port_and_a_path_and_only_where_nothing_is_appended_a_query(name: str) -> None:
    for url in ("http://127.0.0.1:9000", "https://[::1]:9000/", "https://s3.example./some/path/"):
        check_urls(Settings(_env_file=None, broker="postgres", **{name: url}))  # type: ignore[arg-type]  # of any fields
    with_query = Settings(_env_file=None, broker="postgres", **{name: "https://s3.example/?a=b"})  # type: ignore[arg-type]  # of any fields
    if name == "promote_token_url":
        check_urls(with_query)
        return
    with pytest.raises(BadSetting, match=r"must have no \?"):
        check_urls(with_query)


def test_a_ca_file_that_cannot_be_read_is_refused_at_start() -> None:
    with pytest.raises(BadSetting, match="LEASEHOLD_S3_CA_FILE"):
        check_urls(Settings(_env_file=None, broker="postgres", s3_ca_file="/no/such/file"))


@pytest.mark.parametrize(
    ("variables", "sentences"),
    [
        (
            {"LEASEHOLD_DATABASE_URL": "postgresql://u:pa55word@127.0.0.1:9/db?sslmod=require"},
            ["LEASEHOLD_DATABASE_URL: no such parameter: sslmod"],
        ),
        ({"LEASEHOLD_S3_ENDPOINT": "pa55word:9000"}, ["LEASEHOLD_S3_ENDPOINT: the URL must begin with http://"]),
        ({"LEASEHOLD_API_PORT": "pa55word"}, ["LEASEHOLD_API_PORT: Input should be a valid integer"]),
        (
            {"LEASEHOLD_API_PORT": "70000", "LEASEHOLD_LOG_LEVEL": "pa55word"},
            ["LEASEHOLD_API_PORT: Input should be less than or equal to 65535", "LEASEHOLD_LOG_LEVEL: Input should be"],
        ),
        ({"LEASEHOLD_POOLS": "{pa55word"}, ["LEASEHOLD_POOLS: the value is not JSON"]),
        ({"LEASEHOLD_RENEW_SECONDS": "30"}, ["the settings: Value error, LEASEHOLD_RENEW_SECONDS must be less"]),
        (
            {"LEASEHOLD_DATABASE_URL_FILE": "/no/such/file"},
            ["the settings: Value error, LEASEHOLD_DATABASE_URL_FILE: /no/such/file: No such file"],
        ),
    ],
)
async def test_every_program_ends_with_a_sentence_and_no_traceback_if_a_variable_is_wrong(
    variables: dict[str, str], sentences: list[str]
) -> None:
    unset = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    environment = {**unset, **variables, "PYTHONPATH": str(ROOT)}
    programs = (
        ["leasehold.worker"],
        ["leasehold.api"],
        ["leasehold.cli.main", "migrate"],
    )

    async def ended(*program: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *program, env=environment, cwd=ROOT,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
        return process.returncode, said.decode()

    for status, said in await asyncio.gather(*(ended(*program) for program in programs)):
        assert status in (1, 2)  # of commands 2: what they were given is wrong
        assert [sentence for sentence in sentences if sentence not in said] == []
        assert "pa55word" not in said
        assert "Traceback" not in said


def test_a_wrong_setting_does_not_show_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_DATABASE_TIMEOUT", "pa55word")
    with pytest.raises(ValueError, match="database_timeout") as refused:
        Settings(_env_file=None)
    assert "pa55word" not in str(refused.value)


def test_a_password_keeps_its_characters_on_the_way() -> None:
    password = "p@:/?#[]%,&=+ ü"
    url = database_url(f"postgres://u:{quote(password, safe='')}@h:5/db?sslmode=require")
    assert urlsplit(url.dsn).password == quote(password, safe="")
    assert "h" in url.hosts[0]
    assert "u:" not in repr(url)
